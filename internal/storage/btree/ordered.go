package btree

import (
	"cmp"
	"slices"
	"sync"

	"github.com/epochkv/epochkv/internal/storage/page"
)

const (
	// streamPages is how many finished pages a partition keeps before it writes them, once it is
	// its turn.
	streamPages = 32
	// bufferPages is how many finished pages a partition may keep before its turn. It bounds the
	// memory of a merge whose work is unevenly divided: the partition then waits until all
	// partitions before it are done.
	bufferPages = 1024
	// The first extents are small, so that a merge of one key does not reserve many pages. They
	// grow up to extentMax.
	extentMin = 4
	extentMax = 64
)

// ordered is the step of a merge that happens in key order, one partition of the plan at a time: it
// assigns page ids, stores large values, and builds the upper levels. Nothing here depends on which
// worker is ready first, so no byte of the result does either.
type ordered struct {
	m    *merge
	mu   sync.Mutex
	cond sync.Cond // the next partition has its turn, or the merge failed

	// Guarded by mu.
	turn    int // index of the partition whose turn it is
	failure error
	upper   upper
	next    page.ID // in the current extent
	left    int
	extent  int // size that the current extent was asked for
	result  Result
}

func (o *ordered) init(m *merge) {
	o.m = m
	o.cond.L = &o.mu
	o.upper = upper{m: m, o: o, src: m.Source()}
}

// fail ends the merge with err, unless err is nil or an earlier error ended it.
func (o *ordered) fail(err error) {
	if err == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.failure == nil {
		o.failure = err
	}
	o.cond.Broadcast()
}

func (o *ordered) err() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.failure
}

// stream writes the pages of a partition that is still being merged, if it is its turn and there
// are at least streamPages. With bufferPages the partition waits for its turn. The last child stays
// in memory, because the partition may still dissolve it.
func (o *ordered) stream(p *partition, w *worker) error {
	n := len(w.pack.out)
	if n < streamPages {
		return nil
	}
	if w.pack.err != nil {
		return w.pack.err
	}
	o.mu.Lock()
	if o.turn != p.index && n < bufferPages {
		o.mu.Unlock()
		return nil
	}
	err := o.addChildrenLocked(p, w.pack.out[:n-1])
	o.mu.Unlock()
	if err != nil {
		return err
	}
	if err := o.write(w, w.pack.out[:n-1]); err != nil {
		return err
	}
	w.pack.out = append(w.pack.out[:0], w.pack.out[n-1])
	return nil
}

// commit ends a partition.
func (o *ordered) commit(p *partition, w *worker) error {
	if err := cmp.Or(w.pack.err, w.checkBalance()); err != nil {
		return err
	}
	o.mu.Lock()
	err := o.addChildrenLocked(p, w.pack.out)
	if err == nil {
		err = o.accountLocked(p, w)
	}
	if err == nil {
		o.turn++
		o.cond.Broadcast()
	}
	o.mu.Unlock()
	if err != nil {
		return err
	}
	return o.write(w, w.pack.out)
}

// addChildrenLocked waits for the partition's turn, assigns page ids, stores large values, and
// gives the children to the upper levels.
func (o *ordered) addChildrenLocked(p *partition, items []item) error {
	for o.turn != p.index && o.failure == nil {
		o.cond.Wait()
	}
	if o.failure != nil {
		return o.failure
	}
	if err := o.addEventsLocked(p.before); err != nil {
		return err
	}
	p.before = nil
	for i := range items {
		it := &items[i]
		if it.page != nil {
			id, err := o.allocLocked()
			if err != nil {
				return err
			}
			it.ID = id
			o.result.Stats.LeafPages++
			if err := o.storeLocked(it); err != nil {
				return err
			}
		}
		if err := o.upper.put(it.Child, 0, it.page != nil, nil); err != nil {
			return err
		}
	}
	return nil
}

// addEventsLocked gives the upper levels what is in the base before a partition.
func (o *ordered) addEventsLocked(events []event) error {
	for i := range events {
		e := &events[i]
		if e.freed {
			o.result.Freed = append(o.result.Freed, e.child.ID)
		} else if err := o.upper.put(e.child, e.level, false, e.bound); err != nil {
			return err
		}
	}
	return nil
}

// storeLocked stores the large values of a leaf and writes the references into it.
func (o *ordered) storeLocked(it *item) error {
	for _, l := range it.large {
		ref, err := o.m.Values.Store(l.value)
		if err != nil {
			return err
		}
		o.result.Stats.Stored++
		copy(it.page[l.offset:], ref[:])
	}
	return nil
}

// dropsAhead is how many values are announced before they are dropped.
const dropsAhead = 32

// accountLocked adds the worker's counts of a partition to the result, and drops values. A leaf with a reference to a value that does not exist is
// damage: after a write that the device has lost, an older version of the leaf is there.
func (o *ordered) accountLocked(p *partition, w *worker) error {
	o.result.Freed = append(o.result.Freed, w.freed...)
	o.result.Stats.Add(&w.stats)
	var refs [dropsAhead]page.Ref
	for next := range slices.Chunk(w.dropped, dropsAhead) {
		for i, d := range next {
			refs[i] = d.ref
		}
		o.m.Values.ReadAhead(refs[:len(next)])
		for _, d := range next {
			if err := o.dropLocked(p, d); err != nil {
				return err
			}
		}
	}
	return nil
}

func (o *ordered) dropLocked(p *partition, d droppedValue) error {
	o.result.Stats.Dropped++
	err := o.m.Values.Drop(d.ref)
	if d.leaf < 0 || !o.m.isUnreadable(err) {
		return err
	}
	c := &p.children[d.leaf]
	o.m.unreadablePages.add(UnreadablePage{ID: c.ID, Lower: c.Separator, Upper: p.endOf(d.leaf), Err: err})
	return nil
}

// allocLocked assigns the next page id.
func (o *ordered) allocLocked() (page.ID, error) {
	if o.left == 0 {
		n := min(max(2*o.extent, extentMin), extentMax)
		first, count, err := o.m.Sink.AllocExtent(n)
		if err != nil {
			return 0, err
		}
		if err := checkExtent(first, count, n); err != nil {
			return 0, err
		}
		o.next, o.left, o.extent = first, count, n
	}
	id := o.next
	o.next++
	o.left--
	return id, nil
}

// write sets the ids of the new pages among items and hands the pages to the sink. It runs outside
// the lock.
func (o *ordered) write(w *worker, items []item) error {
	for i := range items {
		it := &items[i]
		if it.page == nil {
			continue
		}
		page.SetID(it.page, it.ID)
		if err := o.m.writePage(it.ID, it.from, it.page); err != nil {
			return err
		}
		w.pages.put(it.page)
		it.page = nil
	}
	return nil
}

// finish adds what is in the base after the last partition, closes the upper levels, and returns
// the result.
func (o *ordered) finish(rest []event) (*Result, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := o.addEventsLocked(rest); err != nil {
		return nil, err
	}
	root, err := o.upper.finish()
	if err != nil {
		return nil, err
	}
	o.result.Root = root
	return &o.result, checkFreed(&o.result)
}
