package pager

import (
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// ErrCorrupt matches every CorruptError.
var ErrCorrupt = errors.New("pager: page corruption")

// CorruptError is a damaged page. It is reported and never served.
type CorruptError struct {
	File   string
	Page   page.ID
	Offset int64
	Reason string
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("pager: %s: page %d at offset %d is damaged: %s", e.File, e.Page, e.Offset, e.Reason)
}

// Is makes errors.Is(err, ErrCorrupt) true.
func (e *CorruptError) Is(target error) bool { return target == ErrCorrupt }

// Corrupt returns the error for a page whose contents its reader cannot interpret, and counts it.
func (p *Pager) Corrupt(id page.ID, reason string) error { return p.corrupt(id, reason) }

func (p *Pager) corrupt(id page.ID, reason string) error {
	p.counters.damaged.Add(1)
	return &CorruptError{File: p.file.Name(), Page: id, Offset: p.offset(id), Reason: reason}
}

func (p *Pager) offset(id page.ID) int64 { return int64(id) * int64(p.pageSize) }

// readWindow bounds the memory of the pager's own reads, in pages.
const readWindow = 64

// ReadPage reads page id into buf, which must have the page size. It checks that buf then holds that
// page, whole, and that no later state than the open one wrote it. It takes no lock.
func (p *Pager) ReadPage(id page.ID, buf []byte) error {
	if id < superblocks || id > maxPage {
		return p.corrupt(id, "no page has this id")
	}
	p.counters.reads.Add(1)
	if n, err := p.file.ReadAt(buf[:p.pageSize], p.offset(id)); err != nil {
		return p.readFailed(id, n, err)
	}
	return p.check(id, buf)
}

// Read is one page of a batch.
type Read struct {
	ID  page.ID
	Buf []byte
	Err error
}

// ReadPages reads a batch of pages in one submission. It sets the Err of each read, and returns the first
// of them. If one of the ids is impossible, it reads nothing.
func (p *Pager) ReadPages(reads []Read) error {
	reqs := make([]vfs.Request, len(reads))
	for i := range reads {
		if reads[i].ID < superblocks || reads[i].ID > maxPage {
			err := p.corrupt(reads[i].ID, "no page has this id")
			for j := range reads {
				reads[j].Err = err
			}
			return err
		}
		reqs[i] = vfs.Request{Buf: reads[i].Buf[:p.pageSize], Offset: p.offset(reads[i].ID)}
	}
	p.counters.reads.Add(uint64(len(reads)))
	_ = p.file.ReadBatch(reqs) // each request has its own error
	var first error
	for i := range reads {
		if err := reqs[i].Err; err != nil {
			reads[i].Err = p.readFailed(reads[i].ID, 0, err)
		} else {
			reads[i].Err = p.check(reads[i].ID, reads[i].Buf)
		}
		if first == nil {
			first = reads[i].Err
		}
	}
	return first
}

// readFailed returns damage if the device has lost the page, or if the page is past the end of the file.
// It returns other failures as they are.
func (p *Pager) readFailed(id page.ID, n int, err error) error {
	if size, e := p.file.Size(); e == nil && size < p.offset(id+1) {
		return p.corrupt(id, fmt.Sprintf("the file ends at %d", size))
	}
	if errors.Is(err, vfs.ErrDevice) {
		return p.corrupt(id, fmt.Sprintf("the device cannot read it: %v", err))
	}
	return fmt.Errorf("pager: reading page %d (%d bytes read): %w", id, n, err)
}

func (p *Pager) check(id page.ID, buf []byte) error {
	if err := page.Check(buf[:p.pageSize], id); err != nil {
		return p.corrupt(id, err.Error())
	}
	if c, newest := page.ReadHeader(buf).Checkpoint, p.building.Load(); c > newest {
		return p.corrupt(id, fmt.Sprintf("checkpoint %d wrote it, and the newest is %d", c, newest))
	}
	return nil
}

// readEach reads pages in windows, and calls each with every page, in order. buf is valid until each
// returns.
func (p *Pager) readEach(ids []page.ID, each func(i int, buf []byte) error) error {
	window := min(len(ids), readWindow)
	slab := vfs.AlignedBuffer(window * p.pageSize)
	reads := make([]Read, window)
	for start := 0; start < len(ids); start += window {
		n := min(window, len(ids)-start)
		for i := range n {
			reads[i] = Read{ID: ids[start+i], Buf: slab[i*p.pageSize : (i+1)*p.pageSize]}
		}
		if err := p.ReadPages(reads[:n]); err != nil {
			return err
		}
		for i := range n {
			if err := each(start+i, reads[i].Buf); err != nil {
				return err
			}
		}
	}
	return nil
}
