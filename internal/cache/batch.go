package cache

import (
	"sync"
	"time"
)

// batch is the state of one Pages call.
type batch struct {
	flights []*flight
	reads   []Read
	at      []int // by flight: its index in the caller's slices
	joined  []joined
}

// joined is a page of a batch that another goroutine is reading.
type joined struct {
	flight *flight
	done   <-chan struct{}
	at     int
}

var batches = sync.Pool{New: func() any { return new(batch) }}

func (b *batch) free() {
	clear(b.flights)
	clear(b.reads)
	clear(b.joined)
	b.flights, b.reads, b.at, b.joined = b.flights[:0], b.reads[:0], b.at[:0], b.joined[:0]
	batches.Put(b)
}

// Pages puts page ids[i] into out[i], for all i: first the pages that are in memory, then all other
// pages with one ReadBatch. The guard protects the bytes as in Page. The first error, in no certain
// order, fails the call; the pages that were read without an error are cached nevertheless. If the
// visitor does not wait, no page is read.
func (c *Cache) Pages(ids []ID, h Hint, out [][]byte, v *Visitor) error {
	missing := 0
	t := c.table.Load()
	for i, id := range ids {
		f, ok := t.lookup(id)
		if !ok {
			out[i] = nil
			missing++
			continue
		}
		c.touch(f, h)
		out[i] = c.frame(f)
	}
	v.Hits.Add(uint64(len(ids) - missing))
	switch {
	case missing == 0:
		return nil
	case v.NoWait:
		return ErrWouldWait
	}
	start := time.Now()
	defer func() {
		v.Reads += uint64(missing)
		v.ReadTime += time.Since(start)
	}()
	b := batches.Get().(*batch)
	defer b.free()
	c.startAll(b, ids, h, out)
	c.readAll(b)
	err := c.finishAll(b, out)
	for _, j := range b.joined {
		p, e := c.await(j.flight, j.done, h)
		if out[j.at] = p; err == nil {
			err = e
		}
	}
	return err
}

// startAll finds a flight for each page that is missing in out: a new flight, or the flight of
// another goroutine that already reads the page.
func (c *Cache) startAll(b *batch, ids []ID, h Hint, out [][]byte) {
	c.lockForFrames()
	defer c.mu.Unlock()
	t := c.table.Load()
	for i, id := range ids {
		if out[i] != nil {
			continue
		}
		if f, ok := t.lookup(id); ok {
			c.touch(f, h)
			out[i] = c.frame(f)
			continue
		}
		if fl := c.flights[id]; fl != nil {
			b.joined = append(b.joined, joined{fl, c.joinLocked(fl), i})
			continue
		}
		c.missedLocked()
		b.add(c.startLocked(id, h, true), i)
	}
}

func (b *batch) add(fl *flight, at int) {
	b.flights = append(b.flights, fl)
	b.reads = append(b.reads, Read{ID: fl.id, Buf: fl.buf})
	b.at = append(b.at, at)
}

func (c *Cache) readAll(b *batch) {
	switch len(b.reads) {
	case 0:
	case 1:
		// A single page is read with Config.Read, which is faster than a ring for one page.
		b.reads[0].Err = c.config.Read(b.reads[0].ID, b.reads[0].Buf)
	default:
		c.config.ReadBatch(b.reads)
	}
}

// finishAll completes the batch's own flights before the batch waits for flights of others. So two
// batches that wait for each other's pages both get them.
func (c *Cache) finishAll(b *batch, out [][]byte) (first error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, fl := range b.flights {
		fl.err = b.reads[i].Err
		p, err := c.finishLocked(fl)
		if out != nil {
			out[b.at[i]] = p
		}
		if first == nil {
			first = err
		}
	}
	return first
}
