package feed

import (
	"cmp"
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/wal"
)

// memory counts what the queues take: their references, and the commits that only queues refer to. The ring counts its own.
type memory struct {
	ringMax, queuesMax int64
	queues             int64
	walkFrom           int64        // makeRoomLocked looks at the queues if they take more
	turn               uint64       // counts what happens to queues: the clock of Watch.waiting
	reading            int64        // large records that are being read, and were not offered yet
	offered            time.Time    // when the last one was
	line               []*logReader // that wait for room
	copied             int          // parts of large records that are being copied for deliveries
}

// addToRingLocked puts a commit into the ring, and drops as many of the oldest as make room. The newest stays, however
// large it is: without it no watch could take it.
func (f *Feed) addToRingLocked(c *Commit) {
	f.ring.add(c)
	f.trimRingLocked()
}

func (f *Feed) trimRingLocked() {
	for f.ring.bytes > f.memory.ringMax && f.ring.len() > 1 {
		f.dropFromRingLocked()
	}
}

func (f *Feed) dropFromRingLocked() {
	if c := f.ring.drop(); c.refs > 0 {
		f.memory.queues += c.size
	} else {
		c.detachLocked()
	}
}

func (f *Feed) dropRingLocked() {
	for f.ring.len() > 0 {
		f.dropFromRingLocked()
	}
	f.ring.reset(f.ring.dispatched)
}

// retainLocked counts a reference to a commit.
func (f *Feed) retainLocked(c *Commit) {
	if c.refs == 0 && !c.inRing {
		f.memory.queues += c.size
		if c.slab != nil {
			f.retainSlabLocked(c.slab)
		}
	}
	c.refs++
}

func (f *Feed) releaseLocked(c *Commit) {
	if c.refs--; c.refs == 0 && !c.inRing {
		f.memory.queues -= c.size
		c.detachLocked()
		if c.slab != nil {
			f.releaseSlabLocked(c.slab)
		}
	}
}

// growLocked counts what was attached to a commit of the ring or of a queue.
func (f *Feed) growLocked(c *Commit, size int64) {
	c.size += size
	c.attachedSize = size
	if c.inRing {
		f.ring.bytes += size
		f.trimRingLocked()
	} else {
		f.memory.queues += size
	}
	f.makeRoomLocked()
}

// makeRoomLocked lets the watches from whose queues nothing was taken for the longest time lose them while the queues take
// too much. It frees a quarter at once, because it looks at all watches. The epochs of the references say less: a watch
// that catches up has old ones and may be served well.
func (f *Feed) makeRoomLocked() {
	if f.memory.queues <= f.memory.queuesMax {
		f.memory.walkFrom = 0
		return
	}
	if f.memory.queues <= f.memory.walkFrom {
		return
	}
	defer func() { f.memory.walkFrom = f.memory.queues + f.memory.queuesMax/16 }() // with each commit it would find the same
	full, _ := f.byWaitLocked()
	for _, w := range full[:max(len(full), 1)-1] { // the last one keeps its queue, so that something is delivered however little memory there is
		if f.memory.queues <= f.memory.queuesMax-f.memory.queuesMax/4 {
			return
		}
		f.evictLocked(w)
	}
}

// commitsMax is how many bytes of commits the queue of one watch may keep in memory, if it has more than one: of each commit the watch may want one operation
// of many. So the last watch that has a queue has less than all of them may take.
func (o *Options) commitsMax() int64 { return o.MemoryBytes / 4 }

// byWaitLocked are the watches with a queue that may be taken away, first those from whose queues nothing was taken for the longest
// time, and the number of the others: their consumers are about to take something.
func (f *Feed) byWaitLocked() (full []*Watch, awaited int) {
	for _, w := range f.watches {
		switch {
		case w.queue.len() == 0:
		case w.isAwaitedLocked():
			awaited++
		default:
			full = append(full, w)
		}
	}
	slices.SortFunc(full, func(a, b *Watch) int {
		return cmp.Or(cmp.Compare(a.waiting, b.waiting), cmp.Compare(a.ID, b.ID))
	})
	return full, awaited
}

// evictLocked takes the queue away from a watch, which lags from then on at the begin of that queue. It is read for again
// when its consumer asks for more.
func (f *Feed) evictLocked(w *Watch) {
	first := w.queue.first()
	w.queued = Position{first.commit.before(), first.from}
	f.dropQueueLocked(w)
	switch w.state {
	case StateLive:
		f.counters.becameLagging.Memory++
	case StateNeedsDifference: // it has not said so, and finds out again
		f.index.add(w)
	}
	f.lagLocked(w)
	w.gap, w.mark = nil, wal.TailMark{}
	if !w.hungry {
		w.hungry = true
		w.consumer.hungry = append(w.consumer.hungry, w)
	}
}

// dropQueueLocked empties the queue of a watch.
func (f *Feed) dropQueueLocked(w *Watch) {
	w.full = false
	for w.queue.len() > 0 {
		f.popLocked(w)
	}
	f.memory.queues -= w.queue.free()
}

// pushLocked appends a reference to the queue of a watch.
func (f *Feed) pushLocked(w *Watch, r ref) {
	if w.queue.len() == 0 {
		f.touchLocked(w)
	}
	f.retainLocked(r.commit)
	f.memory.queues += w.queue.push(r)
}

// touchLocked says that the watch has begun to wait for its consumer, again.
func (f *Feed) touchLocked(w *Watch) {
	f.memory.turn++
	w.waiting = f.memory.turn
}

// popLocked removes the first reference from the queue of a watch.
func (f *Feed) popLocked(w *Watch) { f.releaseLocked(w.queue.pop().commit) }
