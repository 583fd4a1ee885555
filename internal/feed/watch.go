package feed

import (
	"fmt"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/wal"
)

// State is that of a watch.
type State uint8

// States of a watch.
const (
	StateLive            State = iota // the tailer offers it every commit
	StateLagging                      // readers read the log for it
	StateNeedsDifference              // the log does not have the next commits: see GapError
	StateEnded
)

var stateNames = [...]string{"live", "lagging", "needs_difference", "ended"}

// String is the name in metrics and lists.
func (s State) String() string { return stateNames[s] }

// GapError says that the log does not have every commit after a position.
type GapError struct {
	After Position
	// ResumeAt is the first epoch from which on the log can be read: a difference between After and a snapshot that is not
	// older than ResumeAt has everything.
	ResumeAt keys.Epoch
	Oldest   keys.Epoch // the first epoch of the log
	Cause    error      // the damage, or nil: the log is not kept for so long
}

func (e *GapError) Error() string {
	if e.Cause != nil {
		return fmt.Sprintf("feed: the log after epoch %d is damaged: %v", e.After.Epoch, e.Cause)
	}
	return fmt.Sprintf("feed: the log begins at epoch %d and does not have the commits after epoch %d any more", e.Oldest, e.After.Epoch)
}

// Unwrap returns the damage.
func (e *GapError) Unwrap() error { return e.Cause }

// LimitError says that a bound is reached.
type LimitError struct {
	What  string
	Limit int
}

func (e *LimitError) Error() string { return fmt.Sprintf("feed: more than %d %s", e.Limit, e.What) }

// AheadError says that a watch would begin after what this store has.
type AheadError struct {
	After  Position
	Stable keys.Epoch
}

func (e *AheadError) Error() string {
	return fmt.Sprintf("feed: the position after epoch %d is ahead of this store, which has committed up to epoch %d", e.After.Epoch, e.Stable)
}

// RemovedError says that a watch would begin after a commit that the history does not have any more: a repair of the log
// removed it, or a crash did before it was durable. No difference can tell what that has changed.
type RemovedError struct {
	After       Position
	First, Last keys.Epoch // the epochs that were skipped
}

func (e *RemovedError) Error() string {
	return fmt.Sprintf("feed: the position after epoch %d is of a commit that was removed: the history has no epochs %d to %d", e.After.Epoch, e.First, e.Last)
}

// WatchOptions say what a watch delivers.
type WatchOptions struct {
	Space   keys.Space // of the ranges; SpaceUser
	Ranges  []Range    // of clients' keys; none: the whole space
	Kinds   Kinds
	Origins Origins
	Now     bool     // begin after the stable epoch of this moment
	After   Position // otherwise begin here
	Tag     any      // the caller's
}

// Watch is one watch of a consumer.
type Watch struct {
	// Constant.
	ID       uint64
	Tag      any
	feed     *Feed
	consumer *Consumer
	filter
	start Position
	since time.Time

	// Guarded by Feed.mu.
	cursor
	standing
	queue   queue
	entries []entry // in the index; nil unless live or lagging
	pass    uint64  // of the index that has found it last
	waiting uint64  // turn of memory in which it began to wait for its consumer
}

// cursor is how far a watch is.
//
// Invariant: delivered <= queued, and the queue has what is between.
type cursor struct {
	delivered Position     // everything up to it came out of Next, or is not wanted
	queued    Position     // everything up to it was offered; for a live watch, ring.dispatched says more
	mark      wal.TailMark // where queued is in the log, if that is known
	taken     time.Time    // when something came out of Next last
}

// standing is what becomes of a watch.
type standing struct {
	state  State
	reason error     // StateEnded: why
	gap    *GapError // StateNeedsDifference: what is missing
	group  *group    // of the reader that reads for it; nil without
	inLine bool      // it waits for a reader
	ticket uint64    // of its place in the line
	full   bool      // its queue had no room for a commit, and its consumer has taken nothing since
	hungry bool      // it will when its consumer asks for more
	ready  bool      // it has something for Next
	told   bool      // Next has said that it needs a difference

	failures int // of reads of the log for it, in a row
}

// Start is where the watch began.
func (w *Watch) Start() Position { return w.start }

// Cancel ends the watch. Nothing of it comes out of Next afterwards.
func (w *Watch) Cancel() {
	w.feed.lock()
	defer w.feed.unlock()
	w.feed.removeLocked(w)
}

// End ends the watch for a reason, which Next delivers instead of what is queued.
func (w *Watch) End(reason error) {
	w.feed.lock()
	defer w.feed.unlock()
	w.feed.endLocked(w, reason)
}

// Ended reports whether nothing but the reason of its end comes out of Next.
func (w *Watch) Ended() bool {
	w.feed.lock()
	defer w.feed.unlock()
	return w.state == StateEnded
}

// Resume continues a watch that needs a difference after a snapshot up to which the caller has delivered the difference.
func (w *Watch) Resume(at keys.Epoch) error {
	f := w.feed
	f.lock()
	defer f.unlock()
	switch {
	case w.state == StateEnded:
		return w.reason
	case w.state != StateNeedsDifference:
		return fmt.Errorf("feed: resumed in state %v", w.state)
	case at < w.gap.ResumeAt:
		return fmt.Errorf("feed: resumed after epoch %d, before epoch %d", at, w.gap.ResumeAt)
	}
	f.gapped--
	w.state, w.gap, w.told, w.mark = StateLagging, nil, false, wal.TailMark{}
	w.queued, w.delivered = Position{Epoch: at}, Position{Epoch: at}
	f.index.add(w)
	f.joinLocked(w)
	return nil
}

// Progress reports whether everything that was offered to the watch came out of Next, and up to which position that is
// everything that the watch wants. Only the goroutine that calls Next may call it.
func (w *Watch) Progress() (Position, bool) {
	f := w.feed
	f.lock()
	defer f.unlock()
	if w.queue.len() > 0 || w.state == StateNeedsDifference || w.state == StateEnded {
		return Position{}, false
	}
	w.delivered = latest(w.delivered, f.queuedLocked(w))
	return w.delivered, true
}

// queuedLocked is the position up to which everything was offered to a watch.
func (f *Feed) queuedLocked(w *Watch) Position {
	if w.state == StateLive {
		return latest(w.queued, Position{Epoch: f.ring.dispatched})
	}
	return w.queued
}

// offerLocked puts what a watch wants of a commit into its queue, and reports false if the queue has no room. A queue that
// is empty has room for any commit. The commit is the next one after what was offered before. A queue gets a copy of a borrowed one,
// which replaces it for other watches, too.
func (f *Feed) offerLocked(w *Watch, at **Commit) bool {
	c, from := *at, uint32(0)
	switch {
	case c.Epoch <= w.queued.Epoch:
		return true
	case c.Loaded != nil && c.before() < w.queued.Epoch: // the watch has some of the bulk loads
		c = f.load(keys.WholeSpace(w.queued.Epoch+1, c.Epoch, keys.SpaceUser))
	case c.Epoch == w.queued.Epoch+1:
		from = w.queued.Operations
	}
	f.runs = w.match(f.runs[:0], c, from)
	if len(f.runs) == 0 {
		return true
	}
	if w.queue.len() > 0 && !w.hasRoom(c, f.runs, &f.options) {
		w.full = true
		return false
	}
	if c.borrowed {
		c = c.own()
		*at = c
	}
	f.runs[len(f.runs)-1].to |= lastRun
	for _, r := range f.runs {
		f.pushLocked(w, ref{c, r})
	}
	f.readyLocked(w)
	return true
}

// hasRoom reports whether the queue has room for some runs of a commit.
func (w *Watch) hasRoom(c *Commit, runs []run, o *Options) bool {
	if w.queue.commits+c.memory() > o.commitsMax() {
		return false
	}
	bytes := w.queue.bytes
	for _, r := range runs {
		one := ref{c, r}
		bytes += one.bytes()
	}
	return w.queue.len()+len(runs) <= o.QueueOperations && bytes <= o.QueueBytes
}

// halfEmpty reports whether a reader may read for the watch: whatever its queue has room for, if that was not too little.
func (w *Watch) halfEmpty() bool {
	o := &w.feed.options
	return !w.full && w.queue.len() <= o.QueueOperations/2 && w.queue.bytes <= o.QueueBytes/2 && w.queue.commits <= o.commitsMax()/2
}

// readyLocked tells the consumer of a watch that there is something for Next.
func (f *Feed) readyLocked(w *Watch) {
	if !w.ready {
		w.ready = true
		w.consumer.ready.push(w)
	}
	f.wakeLocked(w.consumer)
}

// lagLocked takes a watch away from the tailer or from its reader, or ends its need of a difference.
func (f *Feed) lagLocked(w *Watch) {
	switch w.state {
	case StateLive:
		f.live--
		f.index.demote(w)
	case StateNeedsDifference:
		f.gapped--
	case StateLagging, StateEnded:
	}
	f.leaveLineLocked(w)
	w.group, w.state = nil, StateLagging
}

// gapLocked says that the log does not have what comes next. What is queued is delivered first.
func (f *Feed) gapLocked(w *Watch, gap GapError) {
	w.queued = f.queuedLocked(w)
	f.lagLocked(w)
	f.index.remove(w)
	gap.After = w.queued
	f.gapped++
	w.state, w.gap, w.told = StateNeedsDifference, &gap, false
	f.counters.gaps++
	f.readyLocked(w)
}

// endLocked ends a watch. Its consumer keeps it until Next has delivered the reason.
func (f *Feed) endLocked(w *Watch, reason error) {
	if w.state == StateEnded {
		return
	}
	f.leaveLocked(w)
	w.state, w.reason = StateEnded, reason
	f.readyLocked(w)
	f.stopLocked()
}

// removeLocked ends a watch without a word.
func (f *Feed) removeLocked(w *Watch) {
	if w.state != StateEnded {
		f.leaveLocked(w)
		w.state, w.reason = StateEnded, ErrClosed
	}
	w.consumer.forget(w)
	f.stopLocked()
}

// leaveLocked frees what the feed has for a watch.
func (f *Feed) leaveLocked(w *Watch) {
	f.lagLocked(w)
	f.index.remove(w)
	f.dropQueueLocked(w)
	w.gap = nil
	delete(f.watches, w.ID)
}

// WatchInfo describes a watch.
type WatchInfo struct {
	ID               uint64
	Identity         string
	Ranges           []Range // of internal keys
	State            State
	Position         Position // up to which everything was delivered
	Lag              uint64   // epochs from there to the stable epoch
	QueuedOperations int      // references in the queue
	QueuedBytes      int64
	Since, Taken     time.Time // when it began, and when its consumer took something last
}

// Info describes the watch.
func (w *Watch) Info() WatchInfo {
	stable := w.feed.source.Stable()
	w.feed.lock()
	defer w.feed.unlock()
	return w.infoLocked(stable)
}

func (w *Watch) infoLocked(stable keys.Epoch) WatchInfo {
	at := w.delivered
	if w.queue.len() == 0 && w.state != StateEnded {
		at = latest(at, w.feed.queuedLocked(w))
	}
	return WatchInfo{
		ID: w.ID, Identity: w.consumer.identity, Ranges: w.ranges, State: w.state, Position: at, Lag: uint64(max(stable, at.Epoch) - at.Epoch),
		QueuedOperations: w.queue.len(), QueuedBytes: w.queue.bytes, Since: w.since, Taken: w.taken,
	}
}
