package btree

import (
	"sync"

	"github.com/epochkv/epochkv/internal/storage/page"
)

const (
	// streamPages is how many new pages a part may hold back when it is its turn.
	streamPages = 32
	// bufferPages is how many new pages a part may hold back before its turn. It bounds the memory of a merge whose work is
	// unevenly divided; the part then waits until all parts before it are done.
	bufferPages = 1024
	// Extents grow from small ones, so that a merge of one key does not reserve many pages, to extentMax.
	extentMin = 4
	extentMax = 64
)

// ordered is the part of a merge that happens in order, one part of the plan at a time: page ids are given out, large values placed,
// and the upper levels built. Because nothing here depends on who is ready first, neither does any byte of the result.
type ordered struct {
	m    *merge
	mu   sync.Mutex
	cond sync.Cond // the turn moved on, or the merge failed

	// Guarded by mu.
	turn    int // index of the part whose turn it is
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

// fail ends the merge with err, if it is one, and is the first.
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

// stream writes out the pages of a part that is still being merged, if it is its turn and they are many, and makes it wait for
// its turn if they are too many. The last child stays: the part may yet take it back.
func (o *ordered) stream(p *partition, w *worker) error {
	n := len(w.pack.out)
	if n < streamPages {
		return nil
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

// commit ends a part.
func (o *ordered) commit(p *partition, w *worker) error {
	o.mu.Lock()
	err := o.addChildrenLocked(p, w.pack.out)
	if err == nil {
		err = o.accountLocked(w)
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

// settleLocked waits for the part's turn and gives its items their places.
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
		if err := o.upper.put(it.Child, 0, it.page != nil); err != nil {
			return err
		}
	}
	return nil
}

// passLocked hands on what lies in front of a part.
func (o *ordered) addEventsLocked(events []event) error {
	for i := range events {
		e := &events[i]
		if e.freed {
			o.result.Freed = append(o.result.Freed, e.child.ID)
		} else if err := o.upper.put(e.child, e.level, false); err != nil {
			return err
		}
	}
	return nil
}

// placeLocked finds places for the large values of a leaf and writes the references into it.
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

// accountLocked takes over what the worker noted about a part.
func (o *ordered) accountLocked(w *worker) error {
	o.result.Freed = append(o.result.Freed, w.freed...)
	o.result.Stats.Add(&w.stats)
	for _, r := range w.dropped {
		o.result.Stats.Dropped++
		if err := o.m.Values.Drop(r); err != nil {
			return err
		}
	}
	return nil
}

// allocLocked gives out the next page id.
func (o *ordered) allocLocked() (page.ID, error) {
	if o.left == 0 {
		n := min(max(2*o.extent, extentMin), extentMax)
		first, count, err := o.m.Sink.AllocExtent(n)
		if err != nil {
			return 0, err
		}
		o.next, o.left, o.extent = first, count, n
	}
	id := o.next
	o.next++
	o.left--
	return id, nil
}

// write seals the new pages among items and hands them to the sink. It runs outside the lock.
func (o *ordered) write(w *worker, items []item) error {
	for i := range items {
		it := &items[i]
		if it.page == nil {
			continue
		}
		page.SetID(it.page, it.ID)
		if err := o.m.Sink.WritePage(it.ID, it.page); err != nil {
			return err
		}
		w.pages.put(it.page)
		it.page = nil
	}
	return nil
}

// finish hands on what lies behind the last part, closes the upper levels, and returns the result.
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
	return &o.result, nil
}
