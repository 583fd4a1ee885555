package pager

import (
	"github.com/epochkv/epochkv/internal/storage/page"
)

// Stats tells how the space of the file is used, and what I/O the pager did. Live, pending and free pages
// together are all pages of the file. The superblocks count as live.
type Stats struct {
	PageSize   int
	FileBytes  int64
	Live       uint64 // pages that the newest state reaches
	Pending    uint64 // pages that wait for readers
	Free       uint64 // free pages within the file, including those past the page count
	PageCount  uint64 // pages up to the last live one
	MapPages   uint64 // of the allocation map
	SuperPages uint64 // of superblocks and their copies
	Blobs      BlobState

	PagesRead    uint64
	PagesWritten uint64
	Submissions  uint64 // runs of neighbouring pages that were written in one piece
	Damaged      uint64 // pages that a read refused
}

// spaceCounts is the part of Stats that only the owner of the space can count.
type spaceCounts struct {
	live, pending, busy, mapPages uint64
}

func (p *Pager) publishStats() {
	p.stats.Store(&spaceCounts{
		live:     uint64(p.space.live.Count()),
		pending:  uint64(p.space.pendingCount()),
		busy:     uint64(p.space.busy.Count()),
		mapPages: uint64(p.allocation.PageCount()),
	})
}

// Stats returns the counters. Page counts are as of the end of the last checkpoint.
func (p *Pager) Stats() Stats {
	counts, size := p.stats.Load(), p.fileSize.Load()
	return Stats{
		PageSize:     p.pageSize,
		FileBytes:    size,
		Live:         counts.live,
		Pending:      counts.pending,
		Free:         uint64(size/int64(p.pageSize)) - min(counts.busy, uint64(size/int64(p.pageSize))),
		PageCount:    uint64(p.current().pageCount),
		MapPages:     counts.mapPages,
		SuperPages:   p.superPages(),
		Blobs:        p.current().blobs,
		PagesRead:    p.reads.Load(),
		PagesWritten: p.written.pages.Load(),
		Submissions:  p.written.submissions.Load(),
		Damaged:      p.damaged.Load(),
	}
}

// BytesUnsynced is the size of the pages that were written since the last sync, also by checkpoints that were aborted.
func (p *Pager) BytesUnsynced() uint64 {
	synced := p.written.synced.Load() // before pages, which never falls below it
	return (p.written.pages.Load() - synced) * uint64(p.pageSize)
}

// syncPages syncs the pages that were written. One goroutine at a time calls it.
func (p *Pager) syncPages() error {
	written := p.written.pages.Load()
	if err := p.sync(p.file.SyncData, p.fail); err != nil {
		return err
	}
	p.written.synced.Store(written)
	return nil
}

// sync syncs the file, one goroutine at a time. After a sync that failed it syncs nothing: that one may have dropped pages that others
// have written, and a later sync reports success without writing them. failed records an error before another sync can begin.
func (p *Pager) sync(call func() error, failed func(error) error) error {
	p.syncing.Lock()
	defer p.syncing.Unlock()
	if err := p.Err(); err != nil {
		return err
	}
	if err := call(); err != nil {
		return failed(err)
	}
	return nil
}

func (p *Pager) superPages() uint64 {
	if p.current().copy == 0 {
		return superblocks
	}
	return 2 * superblocks
}

// Audit compares the allocation map with the pages that are reachable. reachable calls its argument once
// for every page that the tree and the blob store reach. Audit adds the map's own pages and the
// superblocks. No checkpoint may be open.
func (p *Pager) Audit(reachable func(each func(page.ID) error) error) error {
	if !p.open.CompareAndSwap(false, true) {
		return ErrBusy
	}
	defer p.open.Store(false)
	if err := p.auditSpace(); err != nil {
		return err
	}
	return p.auditLive(&p.space.live, p.allocation, reachable)
}

// auditSpace checks the space in memory between checkpoints.
func (p *Pager) auditSpace() error {
	if err := p.space.audit(); err != nil {
		return brokenf("%w", err)
	}
	if n := p.space.taken.Count(); n != 0 {
		return brokenf("%d pages are taken and no checkpoint is open", n)
	}
	return nil
}
