package feed

import (
	"bytes"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// Consumer are the watches of one stream. One goroutine calls Next.
type Consumer struct {
	feed     *Feed
	identity string // for Info
	client   string // that has its turns when the log is read for watches that lag; see catchUp
	wake     chan struct{}

	// Guarded by Feed.mu.
	watches  map[uint64]*Watch
	ready    fifo[*Watch] // with something for Next; they take turns. One that has ended meanwhile is still in it
	hungry   []*Watch     // that lost their queues and are read for again when Next is called, or Take for one of them
	awaited  *Watch       // whose queue is not taken away, because Take was called for it and is called again once it has something
	closed   bool
	awakened bool // it will be woken when Feed.mu is released
}

// NewConsumer returns a consumer with a name. Close ends it.
func (f *Feed) NewConsumer(identity string) *Consumer {
	return &Consumer{feed: f, identity: identity, client: identity, wake: make(chan struct{}, 1), watches: map[uint64]*Watch{}}
}

// Of says whose consumer it is, if its client may have others under other names. It is called before the first watch.
func (c *Consumer) Of(client string) *Consumer {
	c.client = client
	return c
}

// Watch begins a watch. Errors: *LimitError, *RangeError, *AheadError, ErrClosed.
func (c *Consumer) Watch(o WatchOptions) (*Watch, error) {
	f := c.feed
	if o.Space == 0 {
		o.Space = keys.SpaceUser
	}
	if len(o.Ranges) > f.options.RangesMax {
		return nil, &LimitError{"ranges in a watch", f.options.RangesMax}
	}
	wanted, err := newFilter(o.Space, o.Ranges, o.Kinds, o.Origins)
	if err != nil {
		return nil, err
	}
	stable := f.source.Stable()
	if o.Now {
		o.After = Position{Epoch: stable}
	}
	if o.After.Epoch > stable || o.After.Epoch == stable && o.After.Operations > 0 {
		return nil, &AheadError{o.After, stable}
	}
	w := &Watch{Tag: o.Tag, feed: f, consumer: c, filter: wanted, start: o.After, since: time.Now()}
	w.queued, w.delivered, w.taken, w.state = o.After, o.After, w.since, StateLagging
	f.lock()
	defer f.unlock()
	if err := c.admitLocked(w); err != nil {
		return nil, err
	}
	f.startLocked(stable)
	f.index.add(w)
	g := &group{watches: []*Watch{w}}
	w.group = g
	if stable-o.After.Epoch <= createdMax {
		f.takeOverLocked(g)
	}
	f.dismissLocked(w, g)
	return w, nil
}

// admitLocked checks the bounds, and gives the watch its id.
func (c *Consumer) admitLocked(w *Watch) error {
	f := c.feed
	switch {
	case f.closed || c.closed:
		return ErrClosed
	case len(f.watches) >= f.options.WatchesMax:
		return &LimitError{"watches of the server", f.options.WatchesMax}
	case len(c.watches) >= f.options.ConsumerWatchesMax:
		return &LimitError{"watches of a stream", f.options.ConsumerWatchesMax}
	}
	f.lastID++
	w.ID = f.lastID
	f.watches[w.ID], c.watches[w.ID] = w, w
	return nil
}

func (c *Consumer) forget(w *Watch) {
	delete(c.watches, w.ID)
	if c.awaited == w {
		c.awaited = nil
	}
}

// Wake delivers when there may be something for Next.
func (c *Consumer) Wake() <-chan struct{} { return c.wake }

// Close ends the watches of the consumer, one by one: to take the ranges of all of them out of the index may take a second, in which the others
// go on.
func (c *Consumer) Close() {
	f := c.feed
	f.lock()
	c.closed = true
	all := slices.Collect(maps.Values(c.watches))
	f.unlock()
	for _, w := range all {
		w.Cancel()
	}
	f.lock()
	defer f.unlock()
	c.ready, c.hungry, c.awaited = fifo[*Watch]{}, nil, nil
}

// Defaults of a Limit.
const (
	eventsMax     = 1000
	eventBytesMax = 256 << 10
	// keptFactor bounds the commits that a delivery keeps in memory by so many times Limit.Bytes. Of larger ones it has copies.
	keptFactor = 2
)

// Limit bounds what Next and Take return.
type Limit struct {
	Events int // 1,000
	Bytes  int // of keys and values, and of what follows; 256 KiB. One operation may be larger
	Large  int // bytes of a larger operation; 0: of any size

	EventBytes, CommitBytes int // that an operation and a commit count beside

	kept int64 // of commits
}

// Delivery is what one watch delivers: parts of commits in order, or, without parts, a change of its state or the size of a large
// operation that is next. What waits for a client keeps commits of at most twice Limit.Bytes in memory: of those that are larger it
// has copies of the operations.
type Delivery struct {
	Watch    *Watch
	Large    int        // bytes of the next operation, which is larger than Limit.Large: Take takes it
	Key      []byte     // of that operation, an internal key
	Epoch    keys.Epoch // of its commit
	Parts    []Part
	Position Position // after the parts
	State    State
	Err      error // StateNeedsDifference: a *GapError. StateEnded: the reason
}

// Release lets another delivery use the memory of the list of parts, which the caller does not use any more.
func (d *Delivery) Release() {
	partLists.put(d.Parts)
	*d = Delivery{}
}

// partLists are lists of parts of deliveries that were released.
var partLists partPool

type partPool struct{ lists sync.Pool }

func (p *partPool) get() []Part {
	if list, ok := p.lists.Get().(*[]Part); ok {
		return *list
	}
	return nil
}

func (p *partPool) put(list []Part) {
	if cap(list) > 0 {
		clear(list)
		list = list[:0]
		p.lists.Put(&list)
	}
}

// Part is what a delivery has of one commit.
type Part struct {
	Commit *Commit
	End    bool // nothing more of the commit follows for this watch
	Copied bool // the commit is too large to be kept: it has no operations here, but for those of the part

	first  run // of the operations; empty: there are none
	more   []run
	copies []batch.Op
}

// Operations are the operations of the part, with their indexes in the commit.
func (p *Part) Operations(yield func(index int, op batch.Op) bool) {
	n := 0
	for r, k := p.first, 0; ; r, k = p.more[k], k+1 {
		for i := r.from; i < r.to; i++ {
			if !yield(int(i), p.operation(n, int(i))) {
				return
			}
			n++
		}
		if k == len(p.more) {
			return
		}
	}
}

// operation is the nth operation of the part, which has an index in the commit.
func (p *Part) operation(n, index int) batch.Op {
	if p.copies != nil {
		return p.copies[n]
	}
	return p.Commit.Operation(index)
}

// copyOperations lets the part keep no more of its commit than its operations.
func (p *Part) copyOperations() {
	list, memory := make([]batch.Op, 0, p.Count()), make([]byte, 0, p.Bytes())
	keep := func(b []byte) []byte {
		if b == nil {
			return nil
		}
		at := len(memory)
		memory = append(memory, b...)
		return memory[at:len(memory):len(memory)]
	}
	for _, op := range p.Operations {
		list = append(list, batch.Op{Kind: op.Kind, Key: keep(op.Key), Value: keep(op.Value)})
	}
	p.Commit, p.copies = p.Commit.head(), list
}

// Count is the number of operations of the part.
func (p *Part) Count() int {
	n := int(p.first.to - p.first.from)
	for _, r := range p.more {
		n += int(r.to - r.from)
	}
	return n
}

// First is the index of the first operation of the part.
func (p *Part) First() int { return int(p.first.from) }

// Bytes is the size of the keys and values of the part.
func (p *Part) Bytes() (n int) {
	for _, op := range p.Operations {
		n += len(op.Key) + len(op.Value)
	}
	return n
}

// Next returns what the next watch has to deliver, or false if there is nothing now. It does not wait.
func (c *Consumer) Next(l Limit) (d Delivery, ok bool) {
	f := c.feed
	l.setDefaults()
	f.lock()
	c.awaited = nil
	f.feedHungryLocked(c)
	for c.ready.len() > 0 && !ok {
		w := c.ready.pop()
		w.ready = false
		d, ok = f.deliverLocked(w, l)
	}
	f.unlock()
	f.copyParts(&d)
	return d, ok
}

// Take returns what one watch of the consumer has to deliver, like Next. If the watch has lost its queue, it is read for again, and
// keeps the next queue until the consumer calls Take, Next or Forgo. Others wait for that: the consumer calls Take as soon as it is
// woken, and waits for no client before.
func (c *Consumer) Take(w *Watch, l Limit) (d Delivery, ok bool) {
	f := c.feed
	l.setDefaults()
	f.lock()
	c.awaited = nil
	if d, ok = f.deliverLocked(w, l); !ok && w.state != StateEnded {
		c.awaited = w
		if w.hungry { // the others wait for Next: nothing of them is taken now
			c.hungry = slices.DeleteFunc(c.hungry, func(one *Watch) bool { return one == w })
			f.feedLocked(w)
		}
	}
	f.unlock()
	f.copyParts(&d)
	return d, ok
}

// Forgo says that the consumer does not call Take for the watch that it awaits.
func (c *Consumer) Forgo() {
	c.feed.lock()
	defer c.feed.unlock()
	c.awaited = nil
}

func (l *Limit) setDefaults() {
	orDefault(&l.Events, eventsMax)
	orDefault(&l.Bytes, eventBytesMax)
	orDefault(&l.Large, math.MaxInt)
	l.kept = keptFactor * int64(l.Bytes)
}

// copyParts copies the operations of large commits, which count as memory of the queues until then.
func (f *Feed) copyParts(d *Delivery) {
	for i := range d.Parts {
		p := &d.Parts[i]
		if !p.Copied {
			continue
		}
		c := p.Commit
		p.copyOperations()
		f.lock()
		if c.large {
			f.memory.copied--
		}
		f.releaseLocked(c)
		f.unlock()
	}
}

// feedHungryLocked lets readers read for the watches of a consumer that lost their queues.
func (f *Feed) feedHungryLocked(c *Consumer) {
	for i, w := range c.hungry {
		c.hungry[i] = nil
		f.feedLocked(w)
	}
	c.hungry = c.hungry[:0]
}

func (f *Feed) feedLocked(w *Watch) {
	w.hungry = false
	f.joinLocked(w)
}

// deliverLocked takes from the queue of a watch what the limit allows, or reports its state after an empty queue.
func (f *Feed) deliverLocked(w *Watch, l Limit) (Delivery, bool) {
	switch {
	case w.state == StateEnded:
		if w.consumer.watches[w.ID] == nil {
			return Delivery{}, false
		}
		w.consumer.forget(w)
		return Delivery{Watch: w, Position: w.delivered, State: StateEnded, Err: w.reason}, true
	case w.queue.len() > 0:
		first := w.queue.first()
		if large := first.firstBytes() + l.EventBytes; large > max(l.Bytes, l.Large) {
			f.readyLocked(w)
			key := bytes.Clone(first.commit.key(int(first.from)))
			return Delivery{Watch: w, Large: large, Key: key, Epoch: first.commit.Epoch, Position: w.delivered, State: w.state}, true
		}
		return f.takeLocked(w, l), true
	case w.gap != nil && !w.told:
		w.told = true
		w.delivered = latest(w.delivered, w.gap.After)
		return Delivery{Watch: w, Position: w.delivered, State: w.state, Err: w.gap}, true
	}
	return Delivery{}, false
}

// takeLocked takes from the queue of a watch what the limit allows.
func (f *Feed) takeLocked(w *Watch, l Limit) Delivery {
	d := Delivery{Watch: w, Parts: partLists.get()}
	for more := true; more && w.queue.len() > 0; {
		more = f.takeOneLocked(w, &d, &l)
	}
	w.taken, w.full = time.Now(), false
	if w.queue.len() == 0 {
		f.memory.queues -= w.queue.shrink()
	}
	f.touchLocked(w)
	d.Position, d.State = w.delivered, w.state
	if w.state == StateNeedsDifference {
		d.State = StateLagging // until that is said
	}
	if w.queue.len() > 0 || w.gap != nil && !w.told {
		f.readyLocked(w)
	}
	if w.state == StateLagging && w.halfEmpty() {
		f.joinLocked(w)
	}
	return d
}

// takeOneLocked takes the wanted operations with which the first reference begins, as many as the limit allows. It reports false when the
// limit is reached.
func (f *Feed) takeOneLocked(w *Watch, d *Delivery, l *Limit) (more bool) {
	r := w.queue.first()
	c, taken := r.commit, run{from: r.from, to: r.from}
	end := w.endWanted(c, r.from, r.end())
	if c.Loaded != nil && l.Events <= 0 {
		return false
	}
	if !d.ends(c) {
		l.Bytes -= l.CommitBytes
	}
	for ; taken.to < end && l.Events > 0; taken.to++ {
		size := c.bytesOf(int(taken.to)) + l.EventBytes
		if size > l.Bytes && (len(d.Parts) > 0 || taken.to > taken.from) {
			break
		}
		l.Bytes -= size
		l.Events--
	}
	if taken.to == taken.from && c.Loaded == nil {
		return false
	}
	rest := taken.to
	if rest == end {
		rest = w.nextWanted(c, rest, r.end())
	}
	whole := rest == r.end()
	last := whole && r.isLast()
	f.counters.events += uint64(taken.to - taken.from)
	if c.Loaded != nil {
		l.Events--
		f.counters.events++
	}
	f.addPartLocked(d, c, taken, last, l)
	switch {
	case last:
		w.delivered = Position{Epoch: c.Epoch}
	default:
		w.delivered = Position{c.Epoch - 1, taken.to}
	}
	if whole {
		f.popLocked(w)
	} else {
		w.queue.shorten(rest)
	}
	return taken.to == end
}

// ends reports whether the last part is of a commit.
func (d *Delivery) ends(c *Commit) bool {
	n := len(d.Parts)
	return n > 0 && d.Parts[n-1].Commit == c
}

// keeps is how much more memory the delivery keeps with a commit: that of its slab, unless the commit before has the same.
func (d *Delivery) keeps(c *Commit) int64 {
	if c.slab == nil {
		return c.size
	}
	if n := len(d.Parts); n > 0 && !d.Parts[n-1].Copied && d.Parts[n-1].Commit.slab == c.slab {
		return c.size
	}
	return c.slab.bytes + c.size
}

// addPartLocked adds a run, to the part of its commit if there is one. A commit is kept in memory for as long as a response refers
// to some of it, and no queue counts it any more: more than the limit is not kept but copied.
func (f *Feed) addPartLocked(d *Delivery, c *Commit, r run, last bool, l *Limit) {
	if !d.ends(c) {
		p, size := Part{Commit: c}, d.keeps(c)
		if l.kept -= size; l.kept < 0 && c.Loaded == nil {
			p.Copied = true
			l.kept += size
			f.retainLocked(c)
			if c.large {
				f.memory.copied++
			}
		}
		p.first, p.End = r, last
		d.Parts = append(d.Parts, p)
		return
	}
	p := &d.Parts[len(d.Parts)-1]
	p.more, p.End = append(p.more, r), last
}
