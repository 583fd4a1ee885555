package objectstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epochkv/epochkv/internal/vfs"
)

// directory is a store in a directory. An object is a file below the root with the object's name. Files that are being
// written are in the directory .incomplete of the root.
type directory struct{ root string }

const (
	incompleteDir      = ".incomplete"
	incompleteLifetime = 24 * time.Hour // a crash left files that are older

	renamesMax = 100 // attempts to give a file its name

	opRead = "read"
)

// errNotAFile refuses a pipe, a directory or a device with the name of an object.
var errNotAFile = errors.New("it is not a regular file")

func openDirectory(root string) (Store, error) {
	if root == "" {
		return nil, fmt.Errorf("%w: the path is empty", ErrURL)
	}
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrURL, err)
	}
	return &detached{&directory{root}}, nil
}

const fileScheme = "file"

// DirectoryOf is the path of a store that is a directory, as its URL has it.
func DirectoryOf(s Store) (path string, ok bool) {
	return strings.CutPrefix(s.String(), fileScheme+"://")
}

func (d *directory) String() string { return (&url.URL{Scheme: fileScheme, Path: d.root}).String() }

func (d *directory) path(name string) string { return filepath.Join(d.root, filepath.FromSlash(name)) }

// Create writes a temporary file, makes it durable, and gives it its name.
func (d *directory) Create(ctx context.Context, name string, content Content) error {
	if err := checkName(name); err != nil {
		return err
	}
	if _, err := os.Lstat(d.path(name)); err == nil {
		return d.exists(name)
	}
	temporary, err := d.writeTemporary(ctx, content)
	if err == nil {
		err = d.publish(temporary, name)
	}
	return fileError("create", name, err)
}

// exists returns ErrExists for an object that is durable: its creator may not have synced the directory yet.
func (d *directory) exists(name string) error {
	if err := syncParents(d.root, filepath.Dir(d.path(name))); err != nil {
		return fileError("create", name, err)
	}
	return fmt.Errorf("create %s: %w", name, ErrExists)
}

// writeTemporary writes the content to a file without a final name, durably.
func (d *directory) writeTemporary(ctx context.Context, content Content) (path string, err error) {
	dir := filepath.Join(d.root, incompleteDir)
	if err := makeDirs(dir); err != nil {
		return "", err
	}
	f, err := os.CreateTemp(dir, "object-")
	if err != nil {
		return "", err
	}
	err = copyContent(ctx, f, content)
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = ctx.Err() // it gets no name once the creation was given up
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return "", errors.Join(err, os.Remove(f.Name()))
	}
	return f.Name(), nil
}

// publish names a durable file, unless an object has the name. The file has gone when it returns.
func (d *directory) publish(temporary, name string) error {
	parent := filepath.Dir(d.path(name))
	var err error
	for range renamesMax { // another process may delete a directory that is empty before the file is in it
		if err = renameInto(parent, temporary, d.path(name)); !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	if err != nil {
		if gone := os.Remove(temporary); gone != nil && !errors.Is(gone, fs.ErrNotExist) {
			err = errors.Join(err, gone)
		}
	}
	if errors.Is(err, fs.ErrExist) {
		return d.exists(name)
	}
	if err != nil {
		return err
	}
	return syncParents(d.root, parent)
}

// renameInto makes a directory if there is none, and gives a file its name in it.
func renameInto(parent, from, to string) error {
	err := makeDirs(parent)
	if err == nil {
		err = vfs.GiveLike(from, parent)
	}
	if err == nil {
		err = renameNew(from, to)
	}
	return err
}

// renameNew is a rename that fails with fs.ErrExist instead of replacing a file. NFS and some others do not have it, and have
// links.
func renameNew(from, to string) error {
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EOPNOTSUPP) {
		if err = os.Link(from, to); err == nil {
			return os.Remove(from)
		}
	}
	return err
}

// copyContent writes the whole content.
func copyContent(ctx context.Context, f *os.File, content Content) (err error) {
	r, err := content.Open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	n, err := io.CopyBuffer(struct{ io.Writer }{f}, &contextReader{ctx, r}, make([]byte, copyBytes))
	if err == nil && content.Size() >= 0 && n != content.Size() {
		err = fmt.Errorf("the content has %d bytes instead of %d", n, content.Size())
	}
	return err
}

const copyBytes = 256 << 10

// contextReader ends a copy when the context ends.
type contextReader struct {
	ctx context.Context // of the copy
	io.Reader
}

func (r *contextReader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.Reader.Read(p)
}

// Read opens a range of a file.
func (d *directory) Read(ctx context.Context, name string, offset, length int64) (io.ReadCloser, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(d.path(name), os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe without a writer would block for ever
	if err != nil {
		return nil, fileError(opRead, name, err)
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errNotAFile
	}
	if err == nil {
		err = checkRange(name, info.Size(), offset, length)
	}
	if err == nil {
		_, err = f.Seek(offset, io.SeekStart)
	}
	if err != nil {
		return nil, errors.Join(fileError(opRead, name, err), f.Close())
	}
	if length < 0 {
		length = info.Size() - offset
	}
	return &exactReader{&fileReader{f, ctx, name}, length}, nil
}

// fileReader names the object in its errors, and ends with its context.
type fileReader struct {
	*os.File
	ctx  context.Context // of the read
	name string
}

func (r *fileReader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := r.File.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = fileError(opRead, r.name, err)
	}
	return n, err
}

// List walks the directories. It also removes what crashes left of unfinished objects.
func (d *directory) List(ctx context.Context, prefix string, each func(Object) error) error {
	d.removeAbandoned()
	l := directoryList{d, prefix, each, 0}
	return l.below(ctx, "")
}

// directoryList is a list of a directory.
type directoryList struct {
	*directory
	prefix     string
	each       func(Object) error
	unreadable int // objects so far
}

const (
	unreadableMax   = 16 // in one list; with more of them it is the device that cannot be read
	unreadablePause = 100 * time.Millisecond
)

func (l *directoryList) below(ctx context.Context, dir string) error {
	entries, err := os.ReadDir(l.path(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fileError("list", dir, err)
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return cmp.Compare(listName(a), listName(b)) })
	for _, entry := range entries {
		name := dir + listName(entry)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case checkName(strings.TrimSuffix(name, "/")) != nil: // another program's, or lost+found
		case entry.IsDir() && (strings.HasPrefix(name, l.prefix) || strings.HasPrefix(l.prefix, name)):
			err = l.below(ctx, name)
		case entry.Type().IsRegular() && strings.HasPrefix(name, l.prefix):
			err = l.file(ctx, name, entry)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// listName is a name by which the order of the entries of a directory is that of the objects below them.
func listName(entry fs.DirEntry) string {
	if entry.IsDir() {
		return entry.Name() + "/"
	}
	return entry.Name()
}

// file reports a file. What the file system notes about it may be damaged: that ends no list, so that the others are found.
func (l *directoryList) file(ctx context.Context, name string, entry fs.DirEntry) error {
	info, err := entry.Info()
	for pause := unreadablePause; unreadable(err) && pause <= 4*unreadablePause; pause *= 2 { // a network may say so for a while
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
		info, err = entry.Info()
	}
	switch {
	case errors.Is(err, fs.ErrNotExist): // deleted meanwhile
		return nil
	case unreadable(err) && l.unreadable < unreadableMax:
		l.unreadable++
		return l.each(Object{Name: name})
	case err != nil:
		return fileError("list", name, err)
	}
	return l.each(Object{name, info.Size(), info.ModTime()})
}

// removeAbandoned removes old unfinished objects. What cannot be removed now is left to the next list.
func (d *directory) removeAbandoned() {
	dir := filepath.Join(d.root, incompleteDir)
	entries, _ := os.ReadDir(dir) // usually there is none
	for _, entry := range entries {
		if info, err := entry.Info(); err == nil && time.Since(info.ModTime()) > incompleteLifetime {
			_ = os.Remove(filepath.Join(dir, entry.Name()))
		}
	}
}

// Delete removes a file, and directories that are empty then.
func (d *directory) Delete(_ context.Context, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	if err := os.Remove(d.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fileError("delete", name, err)
	}
	dir := filepath.Dir(d.path(name))
	for dir != d.root && os.Remove(dir) == nil {
		dir = filepath.Dir(dir)
	}
	return fileError("delete", name, syncDir(dir))
}

// makeDirs makes a directory and its missing parents, durably. An empty directory may be deleted at the same time. What root makes belongs to
// the account of the directory that it is in: the server must be able to read it.
func makeDirs(dir string) error {
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	parent := filepath.Dir(dir)
	if err := makeDirs(parent); err != nil {
		return err
	}
	if err := vfs.MkdirLike(dir, parent); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return syncDir(parent)
}

// syncParents syncs a directory and its parents up to the root.
func syncParents(root, dir string) error {
	for ; ; dir = filepath.Dir(dir) {
		if err := syncDir(dir); err != nil || dir == root || len(dir) <= len(root) {
			return err
		}
	}
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // deleted meanwhile, because it was empty
	}
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// fileError translates an error of the file system.
func fileError(operation, name string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrExists):
		return err
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s %s: %w: %w", operation, name, ErrNotFound, err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s %s: %w: %w", operation, name, ErrDenied, err)
	case operation == opRead && unreadable(err):
		return fmt.Errorf("%s %s: %w: %w: %w", operation, name, ErrUnreadable, errTemporary, err)
	case temporaryFileError(err):
		return fmt.Errorf("%s %s: %w: %w", operation, name, errTemporary, err)
	}
	return fmt.Errorf("%s %s: %w", operation, name, err)
}

// unreadable reports whether a block of a file cannot be read, or what the file system notes about the file is damaged.
func unreadable(err error) bool {
	return errors.Is(err, syscall.EIO) || errors.Is(err, syscall.EUCLEAN) || errors.Is(err, syscall.EBADMSG)
}

// temporaryFileError reports whether a network file system may succeed later. A full device is not temporary: the operator
// must know of it. After EIO of an fsync the whole file is written again.
func temporaryFileError(err error) bool {
	return slices.ContainsFunc([]syscall.Errno{
		syscall.EIO, syscall.EINTR, syscall.EAGAIN, syscall.ESTALE, syscall.ETIMEDOUT, syscall.EHOSTDOWN, syscall.EHOSTUNREACH,
		syscall.ENETDOWN, syscall.ENETUNREACH, syscall.ECONNRESET, syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM,
	}, func(errno syscall.Errno) bool { return errors.Is(err, errno) })
}
