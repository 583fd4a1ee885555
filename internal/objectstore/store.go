// Package objectstore is where backups and archives are written: a directory, or a bucket of a store that speaks the S3
// protocol.
//
//	object   a name and bytes. It is created whole, never changed, and deleted whole
//	name     segments of letters, digits, '.', '_' and '-', separated by '/'; no segment begins with '.'
//	store    objects under a common root: a directory, or a bucket and a prefix
//
//	Open(URL) ─► retrying ─► detached ─► directory     temporary file, fsync, rename that never replaces, fsync of directories
//	                     └─► bucket                    PUT with If-None-Match: *
//
// A caller may rely on these promises:
//   - Create makes the whole object or none. It never changes an object that exists: that is ErrExists. When Create returns
//     nil or ErrExists, an object with the name is durable.
//   - If Create returns another error, the object may exist or not. If it exists, it is whole.
//   - List reports every object of which Create has returned nil before, in ascending order of names, also those that cannot be read. A store with late lists
//     may break that promise, so nothing that must be found is found only by listing.
//   - Every call ends when its context does, also while the kernel does not return from a system call: leftMax such calls at once.
//   - No call waits for ever for a target that has stopped to answer, to send or to take bytes: that is a failure that may be over.
//   - Failures that may be over after a pause are tried again, with growing pauses, until the attempts are used up.
//
// The package does not know what the objects contain. It compresses and encrypts nothing.
package objectstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"regexp"
	"strings"
	"time"
)

// Errors that callers test with errors.Is.
var (
	// ErrExists means that an object has this name already. It was not changed.
	ErrExists = errors.New("object exists")
	// ErrNotFound means that no object has this name.
	ErrNotFound = errors.New("no such object")
	// ErrShort means that an object has fewer bytes than a read wants.
	ErrShort = errors.New("object is too short")
	// ErrUnreadable means that the device of a directory cannot read an object. A network may also say so for a while.
	ErrUnreadable = errors.New("object cannot be read")
	// ErrDenied means that the store refuses the access: credentials or permissions.
	ErrDenied = errors.New("access denied")
	// ErrName means that a name is not one of an object.
	ErrName = errors.New("not a name of an object")
	// ErrURL means that a URL does not name a store.
	ErrURL = errors.New("not a URL of a store")

	// errTemporary marks failures that may be over after a pause.
	errTemporary = errors.New("temporary failure")
)

// Store holds objects. Its methods may be called concurrently.
type Store interface {
	// Create makes an object. See the package's promises.
	Create(ctx context.Context, name string, content Content) error
	// Read opens length bytes of an object from offset on; a negative length is everything from there. ErrShort means that the
	// object ends before.
	Read(ctx context.Context, name string, offset, length int64) (io.ReadCloser, error)
	// List calls each for every object whose name begins with a prefix, in ascending order. An error of each ends the list.
	List(ctx context.Context, prefix string, each func(Object) error) error
	// Delete removes an object. It is no error if there is none.
	Delete(ctx context.Context, name string) error
	// String is the URL of the store, without credentials.
	String() string
}

// Object is what a list says of an object. Of one that the device cannot read it says the name alone.
type Object struct {
	Name    string
	Size    int64
	Created time.Time // by the clock of the store; zero if it is not known
}

// YoungerThan reports whether an object may have been created less than an age before now, which is a time of the store.
func (o *Object) YoungerThan(age time.Duration, now time.Time) bool {
	return o.Created.IsZero() || now.Sub(o.Created) < age
}

// Content is what Create writes. Open is called once for each attempt, and returns the same bytes each time.
type Content interface {
	Open() (io.ReadCloser, error)
	Size() int64 // in bytes; negative if it is not known
}

// Bytes are the content of a small object.
type Bytes []byte

// Open returns a reader of the bytes.
func (b Bytes) Open() (io.ReadCloser, error) { return &bytesReader{rest: b}, nil }

// Size is the number of bytes.
func (b Bytes) Size() int64 { return int64(len(b)) }

// bytesReader has no method but Read and Close, so that a client library does not seek in it.
type bytesReader struct{ rest []byte }

func (r *bytesReader) Read(p []byte) (int, error) {
	if len(r.rest) == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

func (r *bytesReader) Close() error { return nil }

// Options configure a store. The zero value takes what the environment says.
type Options struct {
	Retry Retry
	S3    S3Options
}

// Open opens the store of a URL: s3://BUCKET/PREFIX, file:///PATH, or a path. It does not access the store.
func Open(target string, o Options) (Store, error) {
	inner, err := open(target, o)
	if err != nil {
		return nil, err
	}
	return WithRetries(inner, o.Retry), nil
}

func open(target string, o Options) (Store, error) {
	scheme, rest, ok := strings.Cut(target, "://")
	switch {
	case !ok:
		return openDirectory(target)
	case scheme == fileScheme:
		u, err := url.Parse(target)
		if err != nil || u.Host != "" || u.RawQuery != "" || u.Fragment != "" {
			return nil, fmt.Errorf("%w: %q; expected file:///PATH with an absolute path", ErrURL, target)
		}
		return openDirectory(u.Path)
	case scheme == "s3":
		bucket, prefix, _ := strings.Cut(rest, "/")
		return newBucket(bucket, strings.Trim(prefix, "/"), o.S3)
	}
	return nil, fmt.Errorf("%w: unknown scheme %q; expected s3://BUCKET/PREFIX, file:///PATH, or a path", ErrURL, scheme)
}

const nameBytesMax = 512 // S3 allows 1,024 with the prefix

var nameForm = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$`)

// checkName refuses what cannot be a file name and a key of S3 alike, and names that leave the root.
func checkName(name string) error {
	if len(name) > nameBytesMax || !nameForm.MatchString(name) {
		return fmt.Errorf("%w: %.100q", ErrName, name)
	}
	return nil
}

// checkRange reports whether an object of this size has a range.
func checkRange(name string, size, offset, length int64) error {
	if end := offset + max(0, length); end > size {
		return fmt.Errorf("read %s: %w: it has %d bytes, bytes up to %d were wanted", name, ErrShort, size, end)
	}
	return nil
}

// exactReader reads a range of an object. An end before that of the range is a broken connection.
type exactReader struct {
	io.ReadCloser
	left int64
}

func (r *exactReader) Read(p []byte) (int, error) {
	if r.left == 0 {
		return 0, io.EOF
	}
	n, err := r.ReadCloser.Read(p[:min(int64(len(p)), r.left)])
	if r.left -= int64(n); r.left > 0 && errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}
