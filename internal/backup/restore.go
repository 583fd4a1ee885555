package backup

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// RestoreProgress says how far a restoration is.
type RestoreProgress struct {
	Parts, PartsTotal uint64
	Bytes             uint64 // of pages that were written
}

// RestoreOptions configure a restoration.
type RestoreOptions struct {
	AllowDamaged bool // restore a backup with damaged pages, which stay damaged
	Progress     func(RestoreProgress)
}

// RestoreBase writes the state of a backup into an existing directory without a store: the data file, and the quarantine
// file if the state has one, both durable. Store id, lineage and epoch are those of the backup; the state knows of no log. The
// chain, the space and the parts are checked before a byte is written, and the whole file after it. After an error the caller
// removes the directory. Errors: fs.ErrExist, ErrNoBackup, ErrDamaged, vfs.ErrNoSpace, and those of the target.
func RestoreBase(ctx context.Context, store objectstore.Store, m *Manifest, fsys vfs.FS, dir string, o RestoreOptions) error {
	chain, err := Chain(ctx, store, m)
	if err != nil {
		return err
	}
	if err := checkRestore(ctx, store, chain, fsys, dir, o); err != nil {
		return err
	}
	r, err := storage.BeginRestore(fsys, dir, m.State.Superblock)
	if err != nil {
		return err
	}
	restoring := &restoration{ctx: ctx, store: store, dir: m.dir(), into: r, options: o}
	for _, b := range chain {
		restoring.progress.PartsTotal += uint64(len(b.Parts))
	}
	for _, b := range chain {
		if err := restoring.restore(b); err != nil {
			return errors.Join(err, r.Abort())
		}
	}
	if err := restoring.clearDamaged(m); err != nil {
		return errors.Join(err, r.Abort())
	}
	file, err := restoring.quarantine(m)
	if err != nil {
		return errors.Join(err, r.Abort())
	}
	if err := r.Finish(file); err != nil {
		return err
	}
	return checkRestored(ctx, m, storage.Files{FS: fsys, Dir: dir})
}

// checkRestore is the plan: everything that can be refused before a byte is written.
func checkRestore(ctx context.Context, store objectstore.Store, chain []*Manifest, fsys vfs.FS, dir string, o RestoreOptions) error {
	m := chain[len(chain)-1]
	if len(m.Damaged) > 0 && !o.AllowDamaged {
		return fmt.Errorf("%w: %d pages of the store could not be read when backup %s was made, page %d first", ErrDamaged, len(m.Damaged), m.ID, m.Damaged[0])
	}
	free, err := fsys.Free(dir)
	if err != nil {
		return err
	}
	if need := int64(m.State.PageCount) * int64(m.State.PageSize); free < need {
		return fmt.Errorf("%w: %s has %d bytes free, the data file needs %d", vfs.ErrNoSpace, dir, free, need)
	}
	return checkParts(ctx, store, chain)
}

// checkParts checks that the target has all parts of a chain.
func checkParts(ctx context.Context, store objectstore.Store, chain []*Manifest) error {
	for _, m := range chain {
		parts := m.Parts
		if q := m.Quarantine; q != nil {
			parts = append(parts[:len(parts):len(parts)], Part{SHA256: q.SHA256, Bytes: q.Bytes})
		}
		for i := range parts {
			r, err := store.Read(ctx, partName(m.dir(), parts[i].SHA256), parts[i].Bytes, 0)
			if err != nil {
				return partError(m, &parts[i], err)
			}
			if err := r.Close(); err != nil {
				return err
			}
		}
	}
	return nil
}

// restoration is one restoration that writes pages.
type restoration struct {
	ctx      context.Context // of the restoration
	store    objectstore.Store
	dir      string // of the lineage
	into     *storage.Restoration
	options  RestoreOptions
	progress RestoreProgress
}

// restore writes the pages of one backup.
func (r *restoration) restore(m *Manifest) error {
	return eachPart(r.ctx, r.store, m, func(part *Part, object []byte) error {
		err := readPages(m, part, object, func(first page.ID, pages []byte) error {
			r.progress.Bytes += uint64(len(pages))
			return r.into.WritePages(first, pages)
		})
		if r.progress.Parts++; r.options.Progress != nil {
			r.options.Progress(r.progress)
		}
		return err
	})
}

// clearDamaged writes zeros over the pages that the backup lacks. A base may have older pages with these ids, which are intact, and would be taken for
// those that are lost.
func (r *restoration) clearDamaged(m *Manifest) error {
	zeros := make([]byte, m.State.PageSize)
	for _, id := range m.Damaged {
		if err := r.into.WritePages(page.ID(id), zeros); err != nil {
			return err
		}
	}
	return nil
}

func (r *restoration) quarantine(m *Manifest) (*storage.QuarantineFile, error) {
	if m.Quarantine == nil {
		return nil, nil //nolint:nilnil // most backups have none
	}
	return readQuarantine(r.ctx, r.store, m)
}

func readQuarantine(ctx context.Context, store objectstore.Store, m *Manifest) (*storage.QuarantineFile, error) {
	file := &storage.QuarantineFile{Number: m.Quarantine.File}
	var object bytes.Buffer
	err := readPartObject(ctx, store, m, &Part{SHA256: m.Quarantine.SHA256, Bytes: m.Quarantine.Bytes}, &object)
	if err != nil {
		return nil, err
	}
	file.Content, err = fileContent(m.Quarantine.SHA256, object.Bytes(), m.State.PageSize, quarantineBytesMax)
	return file, err
}

// fileContent is the file in a part, of so many bytes at most: a part may have thousands of times its size.
func fileContent(name string, part []byte, pageSize, most int) (content []byte, err error) {
	err = readPart(name, part, partFile, pageSize, func(p []byte) error {
		if len(content)+len(p) > most {
			return fmt.Errorf("%w: part %s has a file of more than %d bytes", ErrDamaged, name, most)
		}
		content = append(content, p...)
		return nil
	})
	return content, err
}

// fetched is a part that was read from the target.
type fetched struct {
	part   *Part
	object *bytes.Buffer
	err    error
}

// eachPart reads the parts of a backup in order. The next part is read while one is used, into the memory of the one before.
func eachPart(ctx context.Context, store objectstore.Store, m *Manifest, use func(part *Part, object []byte) error) error {
	ctx, cancel := context.WithCancel(ctx)
	next, free := make(chan fetched), make(chan *bytes.Buffer, 2)
	free <- new(bytes.Buffer)
	free <- new(bytes.Buffer)
	go func() {
		defer close(next)
		for i := range m.Parts {
			f := fetched{part: &m.Parts[i], object: <-free}
			f.err = readPartObject(ctx, store, m, f.part, f.object)
			next <- f
			if f.err != nil {
				return
			}
		}
	}()
	var failed error
	for f := range next { // to the end, so that the goroutine ends
		if failed == nil {
			if failed = f.err; failed == nil {
				failed = use(f.part, f.object.Bytes())
			}
			if failed != nil {
				cancel()
			}
		}
		free <- f.object
	}
	cancel()
	return failed
}

// readPages checks a part of pages, and calls each for every run of neighbouring pages.
func readPages(m *Manifest, part *Part, object []byte, each func(first page.ID, pages []byte) error) error {
	count, first, last := uint64(0), page.ID(0), page.ID(0)
	damaged := func(err error) error { return fmt.Errorf("%w: part %s: %w", ErrDamaged, part.SHA256, err) }
	err := readPart(part.SHA256, object, partPages, m.State.PageSize, func(content []byte) (err error) {
		if count == 0 && len(content) >= page.HeaderSize {
			first = page.ReadHeader(content).ID
		}
		count += uint64(len(content) / m.State.PageSize)
		var writing error
		last, err = checkPages(content, m.State.PageSize, last, func(id page.ID, pages []byte) error {
			writing = each(id, pages)
			return writing
		})
		if writing != nil {
			return writing
		}
		if err != nil {
			return damaged(err)
		}
		if uint64(last) >= m.State.PageCount {
			return damaged(fmt.Errorf("page %d is after the last one", last))
		}
		return nil
	})
	if err == nil && (count != part.Pages || uint64(first) != part.First || uint64(last) != part.Last) {
		return damaged(fmt.Errorf("it has %d pages from %d to %d, the manifest says %d from %d to %d", count, first, last, part.Pages, part.First, part.Last))
	}
	return err
}

// checkRestored reads the restored file, and compares all live pages with the digest of the backup.
func checkRestored(ctx context.Context, m *Manifest, files storage.Files) (err error) {
	state, err := files.OpenState()
	if err != nil {
		return storage.TranslateError(err)
	}
	defer func() { err = errors.Join(err, state.Close()) }()
	if err := state.Pages.ReadMap(); err != nil {
		return storage.TranslateError(err)
	}
	sum, err := digestOf(ctx, &state.Pages.Reader, state.Pages.NextCopied, state.Pages.Copied, m.Damaged)
	if err != nil {
		return err
	}
	if sum != m.Digest {
		return fmt.Errorf("%w: the pages of the restored file are not those of backup %s: a base is wrong, or pages are missing", ErrDamaged, m.ID)
	}
	return nil
}
