package backup

import (
	"context"
	"fmt"
	"io"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// copier reads the live pages of a state in ascending order, and decides which belong to the backup:
//
//	full           all
//	incremental    those that the base has not: whose header names a checkpoint after the base's, whose id is not in the table of the base,
//	               or whose checksum is another one there
//
// An incremental backup reads all live pages, too, unless this process has made its base: then it knows which pages can differ, and takes the
// others from the table of the base. A page that is not in that table is read in any case. So that a mistake about what can differ does not
// stay unnoticed for ever, a sixty-fourth of the pages is read in any case, too, another one each time.
type copier struct {
	job   *job
	ctx   context.Context // of the reading
	pages *assembler
	table *tableWriter
	base  *tableReader // nil without a base

	// The neighbouring pages that are read next.
	first page.ID
	limit int          // as many can be read at once
	run   []tableEntry // what the base has in their places
}

// renewing is a store that renews a pin while it is read.
type renewing struct {
	objectstore.Store
	pin pin
}

func (j *job) renewing() objectstore.Store { return &renewing{j.store, j.pin} }

func (r *renewing) Read(ctx context.Context, name string, offset, length int64) (io.ReadCloser, error) {
	inner, err := r.Store.Read(ctx, name, offset, length)
	if err != nil {
		return nil, err
	}
	return &renewingReader{inner, r.pin}, nil
}

type renewingReader struct {
	io.ReadCloser
	pin pin
}

func (r *renewingReader) Read(p []byte) (int, error) {
	_ = r.pin.Renew() // the reader of pages finds out
	return r.ReadCloser.Read(p)
}

// readPages reads the pages, and sends them and the table in parts.
func (j *job) readPages(s *sender) error {
	size := j.state.Pages.PageSize()
	c := &copier{job: j, ctx: s.ctx, pages: newAssembler(s, partPages, size, j.options)}
	c.table = newTableWriter(s, size, c.pages.compressor)
	if j.base != nil {
		c.base = newTableReader(s.ctx, j.renewing(), j.base)
	}
	err := c.copy()
	if err != nil {
		_ = c.pages.close() // there is an error already
		return err
	}
	if err := c.pages.finish(); err != nil {
		return err
	}
	return c.table.finish()
}

func (c *copier) copy() error {
	pages := c.job.state.Pages
	for id := pages.NextCopied(0); id < pages.PageCount(); id = pages.NextCopied(id + 1) {
		was, err := c.inBase(id)
		if err != nil {
			return err
		}
		if was.id == id && !c.job.reads(id) {
			err = c.keep(was)
		} else {
			err = c.extend(id, was)
		}
		if err != nil {
			return err
		}
	}
	return c.readRun()
}

// inBase is what the table of the base says of a page; nothing if it has none or not this page.
func (c *copier) inBase(id page.ID) (tableEntry, error) {
	if c.base == nil {
		return tableEntry{}, nil
	}
	e, ok, err := c.base.at(id)
	if err != nil {
		return tableEntry{}, fmt.Errorf("the base of the backup: %w; make a full backup", err)
	}
	if !ok {
		return tableEntry{}, nil
	}
	return e, nil
}

// keep takes a page from the base.
func (c *copier) keep(was tableEntry) error {
	if err := c.readRun(); err != nil {
		return err
	}
	if invariants.Enabled {
		c.checkKept(was)
	}
	return c.table.add(was)
}

// checkKept fails if a page that is not read is not that of the base.
func (c *copier) checkKept(was tableEntry) {
	buf := alignedRun(c.job.state.Pages.PageSize())[:c.job.state.Pages.PageSize()]
	err := c.job.state.Pages.ReadPage(was.id, buf)
	if c.job.pin.Renew() != nil || err != nil {
		return // or pages were reused
	}
	if at := page.ReadHeader(buf).Checkpoint; at > c.job.base.State.Checkpoint || sumOf(buf) != was.sum {
		invariants.Fail("page %d of checkpoint %d is not read, and differs from the base of checkpoint %d", was.id, at, c.job.base.State.Checkpoint)
	}
}

// extend adds a page to those that are read next. Before it reads those that are no neighbours, and those of another part.
func (c *copier) extend(id page.ID, was tableEntry) error {
	if n := len(c.run); n > 0 && (id != c.first+page.ID(n) || n == c.limit) {
		if err := c.readRun(); err != nil {
			return err
		}
	}
	if len(c.run) == 0 {
		if err := c.begin(id); err != nil {
			return err
		}
	}
	c.run = append(c.run, was)
	return nil
}

// begin begins a run. No run crosses the boundary between two parts.
func (c *copier) begin(id page.ID) error {
	if err := c.pages.boundary(id); err != nil {
		return err
	}
	size := c.job.state.Pages.PageSize()
	part := page.ID(c.job.options.PartBytes / int64(size))
	room := len(c.pages.room(runBytes/size)) / size
	c.first, c.limit = id, min(room, int((id/part+1)*part-id))
	return nil
}

// readRun reads the pages of the run into the frame, and adds those that belong to the backup. They count only if the pin has not ended
// meanwhile.
func (c *copier) readRun() error {
	n := len(c.run)
	if n == 0 {
		return nil
	}
	j, size := c.job, c.job.state.Pages.PageSize()
	buf := c.pages.room(n)
	if err := j.throttle(c.ctx, len(buf)); err != nil {
		return err
	}
	damaged := map[page.ID]bool{}
	err := j.state.Pages.ReadRun(c.first, buf, func(id page.ID, damage error) error {
		if !j.options.KeepGoing || len(j.manifest.Damaged) == damagedMax {
			return &DamagedPageError{id, storage.TranslateError(damage)}
		}
		damaged[id] = true
		j.manifest.Damaged = append(j.manifest.Damaged, uint64(id))
		return nil
	})
	if ended := j.pin.Renew(); ended != nil {
		return ended // and damage may be only that pages were reused
	}
	if err != nil {
		return err
	}
	for i, was := range c.run {
		id, p := c.first+page.ID(i), buf[i*size:(i+1)*size]
		if err := c.addRead(id, p, was, damaged[id]); err != nil {
			return err
		}
	}
	c.run = c.run[:0]
	j.read += uint64(n)
	j.report()
	return c.pages.full()
}

// addRead adds a page that was read to the table, and to the backup if it belongs to it.
func (c *copier) addRead(id page.ID, p []byte, was tableEntry, damaged bool) error {
	e := tableEntry{id: id}
	if damaged {
		return c.table.add(e)
	}
	e.sum = sumOf(p)
	if was.id == id && was != e && !c.job.mayDiffer(id) {
		c.job.state.Pages.ForgetCopies() // the next backup reads all pages
		return &UnknownChangeError{id, c.job.base.ID}
	}
	if c.belongs(e, was, page.ReadHeader(p).Checkpoint) {
		c.pages.add(id, p)
	}
	return c.table.add(e)
}

// UnknownChangeError means that a page has changed since the base of a backup, and the pager did not know: a defect of this program. The
// incremental backups since the last one that has read all pages may lack pages.
type UnknownChangeError struct {
	Page page.ID
	Base string
}

func (e *UnknownChangeError) Error() string {
	return fmt.Sprintf("backup: page %d differs from the base %s, but is not among the pages that were written since; make a full backup now, and report this defect", e.Page, e.Base)
}

// belongs reports whether a page that a checkpoint wrote belongs to the backup. The header alone is not enough: a page that is live again after
// the allocation map was rebuilt may be older than the base, which does not have it.
func (c *copier) belongs(e, was tableEntry, writtenBy uint64) bool {
	switch {
	case c.base == nil, writtenBy > c.job.base.State.Checkpoint:
		return true
	case !c.job.base.hasTable():
		return false
	}
	return was != e
}
