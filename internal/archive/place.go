package archive

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"sync"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
)

const (
	logDir      = "log"
	restoresDir = "restores"
	lineageName = "lineage.json"
	smallBytes  = 64 << 10 // more than a lineage file or the note of an owner can have

	// infoReaders is how many trailers are read at once.
	infoReaders = 64
)

// place is the part of a target that one lineage has.
type place struct {
	store   objectstore.Store
	lineage keys.Lineage
}

// openFile is a file of the archive that is read. The caller closes it.
type openFile struct {
	*Reader
	io.Closer
}

// open opens a file and reads its header.
func (p *place) open(ctx context.Context, name string) (openFile, error) {
	src, err := p.store.Read(ctx, name, 0, -1)
	if err != nil {
		return openFile{}, orDamage(name, 0, err)
	}
	r, err := NewReader(name, src)
	if err != nil {
		return openFile{}, errors.Join(err, src.Close())
	}
	return openFile{r, src}, nil
}

func (p *place) name(elements ...string) string {
	return path.Join(append([]string{p.lineage.String()}, elements...)...)
}

// file is an archive file as its name and the list say it.
type file struct {
	name        string // of the object
	first, last keys.Epoch
	size        int64
	created     time.Time // by the clock of the target
}

// files are the archive files, in the order of their first epochs.
func (p *place) files(ctx context.Context) (list []file, err error) {
	err = p.eachFile(ctx, func(f file) error {
		list = append(list, f)
		return nil
	})
	return list, err
}

// filesMax is of how many files the server keeps something at once: an archive whose files are not merged has millions.
const filesMax = 10_000

// newestFiles are the archive files with the largest epochs, the newest first; with a file, those that come after it in this order.
func (p *place) newestFiles(ctx context.Context, before *file) (list []file, err error) {
	order := func(x, y file) int {
		return cmp.Or(cmp.Compare(y.last, x.last), cmp.Compare(x.first, y.first), cmp.Compare(x.name, y.name))
	}
	shorten := func() {
		slices.SortFunc(list, order)
		list = list[:min(len(list), filesMax/2)]
	}
	err = p.eachFile(ctx, func(f file) error {
		if before != nil && order(f, *before) <= 0 {
			return nil
		}
		if list = append(list, f); len(list) == filesMax {
			shorten()
		}
		return nil
	})
	shorten()
	return list, err
}

// eachFile lists the archive files. An error of each ends the list.
func (p *place) eachFile(ctx context.Context, each func(file) error) error {
	return p.store.List(ctx, p.name(logDir)+"/", func(o objectstore.Object) error {
		if first, last, ok := ParseFileName(path.Base(o.Name)); ok && path.Dir(o.Name) == p.name(logDir) {
			return each(file{o.Name, first, last, o.Size, o.Created})
		}
		return nil
	})
}

// size is the size of an object. It is asked for by its whole name, so that the list is short.
func (p *place) size(ctx context.Context, f *file) (size int64, err error) {
	size = -1
	err = p.store.List(ctx, f.name, func(o objectstore.Object) error {
		if o.Name != f.name {
			return nil
		}
		if o.Created.IsZero() { // the caller deletes a file that is damaged, and this one may be whole
			return fmt.Errorf("archive: the device does not tell the size of %s", f.name)
		}
		size = o.Size
		return nil
	})
	if err == nil && size < 0 {
		err = fmt.Errorf("archive: %s was created, and is not in the list yet", f.name)
	}
	return size, err
}

// info reads the trailer of a file, and checks that it is that of the file's name and lineage.
func (p *place) info(ctx context.Context, f *file) (i Info, err error) {
	src, err := p.read(ctx, f.name, max(0, f.size-trailerSize), min(trailerSize, f.size))
	if err != nil {
		return i, err
	}
	if i, err = decodeTrailer(f.name, f.size, src); err != nil {
		return i, err
	}
	return i, p.belongs(f, &i)
}

// belongs refuses a file under the name of another one.
func (p *place) belongs(f *file, i *Info) error {
	if i.Lineage != p.lineage {
		return &LineageError{File: f.name, Found: i.Lineage, Want: p.lineage}
	}
	if i.First != f.first || i.Last.Epoch != f.last {
		return &DamageError{f.name, f.size - trailerSize, fmt.Sprintf("the file has epochs %d to %d, its name says others", i.First, i.Last.Epoch)}
	}
	return nil
}

// infos reads the trailers of files, several at once. What is wrong with one of the files is its error in the second result.
func (p *place) infos(ctx context.Context, list []file) ([]Info, []error, error) {
	found, errs := make([]Info, len(list)), make([]error, len(list))
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for r := range infoReaders {
		wg.Go(func() {
			for i := r; i < len(list) && ctx.Err() == nil; i += infoReaders {
				if found[i], errs[i] = p.info(ctx, &list[i]); errs[i] != nil && !ofFile(errs[i]) {
					cancel(errs[i])
				}
			}
		})
	}
	wg.Wait()
	return found, errs, context.Cause(ctx)
}

// ofFile reports whether an error is about one file, and not about the target.
func ofFile(err error) bool {
	foreign := new(LineageError)
	return errors.As(err, &foreign) ||
		slices.ContainsFunc([]error{ErrDamaged, ErrNewerFormat, objectstore.ErrNotFound, objectstore.ErrShort}, func(kind error) bool { return errors.Is(err, kind) })
}

// read reads a part of an object. Without a length it reads the beginning of a small one: anything may be there under its name.
func (p *place) read(ctx context.Context, name string, offset, length int64) (data []byte, err error) {
	r, err := p.store.Read(ctx, name, offset, length)
	if err != nil {
		return nil, orDamage(name, offset, err)
	}
	defer func() { err = errors.Join(orDamage(name, offset, err), r.Close()) }()
	if length < 0 {
		return io.ReadAll(io.LimitReader(r, smallBytes))
	}
	return io.ReadAll(r)
}

// orDamage makes damage of the error of a device that cannot read an object: other objects, and other targets of a restore, do not need it.
func orDamage(name string, offset int64, err error) error {
	if errors.Is(err, objectstore.ErrUnreadable) {
		return &DamageError{name, offset, err.Error()}
	}
	return err
}

// LineageError means that a file belongs to another history than its place.
type LineageError struct {
	File        string
	Found, Want keys.Lineage
}

func (e *LineageError) Error() string {
	return fmt.Sprintf("archive: %s belongs to lineage %s and not to %s", e.File, e.Found, e.Want)
}

// Origin is what the file lineage.json says of a history.
type Origin struct {
	Format      int       `json:"format"` // 1
	Lineage     string    `json:"lineage"`
	StoreID     string    `json:"store_id"`
	ParentEpoch uint64    `json:"parent_epoch,omitempty"` // of another lineage, at which this one began
	PageSize    int       `json:"page_size,omitempty"`    // of the store; zero if the archive began before it was noted
	Created     time.Time `json:"created"`                // when the archive began
}

// StoreError means that another store has the place, under the same lineage.
type StoreError struct{ File, Found, Want string }

func (e *StoreError) Error() string {
	return fmt.Sprintf("archive: %s says that the archive is that of store %s, and this is store %s", e.File, e.Found, e.Want)
}

// PageSizeOf is the page size of the store of a lineage; zero if lineage.json does not say it, or cannot be read.
func PageSizeOf(ctx context.Context, store objectstore.Store, lineage keys.Lineage) (int, error) {
	o, err := (&place{store, lineage}).origin(ctx)
	if err != nil && ofFile(err) {
		return 0, nil
	}
	return o.PageSize, err
}

// claim makes lineage.json, or compares it with what it should say. One that is damaged says nothing, and is made again.
func (p *place) claim(ctx context.Context, o Origin) error {
	name := p.name(lineageName)
	found, err := p.origin(ctx)
	if errors.Is(err, ErrDamaged) {
		if err := p.store.Delete(ctx, name); err != nil {
			return err
		}
	}
	if errors.Is(err, objectstore.ErrNotFound) || errors.Is(err, ErrDamaged) {
		data, err := json.MarshalIndent(o, "", "  ")
		if err != nil {
			return err
		}
		if err = p.store.Create(ctx, name, objectstore.Bytes(append(data, '\n'))); !errors.Is(err, objectstore.ErrExists) {
			return err
		}
		if found, err = p.origin(ctx); err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	if found.Lineage != o.Lineage || found.StoreID != o.StoreID {
		return &StoreError{name, found.StoreID + " of lineage " + found.Lineage, o.StoreID + " of lineage " + o.Lineage}
	}
	return nil
}

// origin reads lineage.json.
func (p *place) origin(ctx context.Context) (o Origin, err error) {
	name := p.name(lineageName)
	data, err := p.read(ctx, name, 0, -1)
	if err != nil {
		return o, err
	}
	if err := json.Unmarshal(data, &o); err != nil {
		return o, &DamageError{name, 0, err.Error()}
	}
	if o.Format != 1 {
		return o, fmt.Errorf("%w: %s has format %d, this program knows 1", ErrNewerFormat, name, o.Format)
	}
	return o, nil
}
