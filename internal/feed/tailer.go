package feed

import (
	"context"
	"errors"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/wal"
)

const (
	// wakeEvery is the least time between two wakes of the tailer: under load it takes many commits at once.
	wakeEvery = time.Millisecond
	// lateAfter is for how long the tailer offers what has been committed before it is late, and fanoutMax of how many watches of a client it
	// offers a commit then.
	lateAfter = 5 * time.Millisecond
	fanoutMax = 64
	// retryEvery is the time between attempts to go on after an error.
	retryEvery = 100 * time.Millisecond
	// failuresMax is how often a read that fails for another reason than damage is tried again before it counts as damage.
	failuresMax = 50
)

// tailer reads the log up to the stable epoch and offers it to the live watches. It ends when it is not Feed.tailer any more.
type tailer struct {
	feed *Feed
	stop context.CancelFunc

	// Owned by its goroutine.
	log      *logReader // nil before the first step and after an error
	failures int
	began    time.Time // of the step
	pieces   []piece   // read, and not offered yet
}

func (t *tailer) run(ctx context.Context) {
	defer t.close()
	for f := t.feed; ctx.Err() == nil; {
		if err := f.source.Await(ctx, t.position(), f.options.SyncInterval); err != nil {
			if ctx.Err() == nil {
				f.fail(err)
			}
			return
		}
		if err := t.step(ctx); err != nil {
			t.recover(ctx, err)
		}
		sleep(ctx, wakeEvery-time.Since(t.began))
	}
}

func (t *tailer) close() {
	if t.log != nil {
		t.log.close()
	}
	t.log = nil
}

// fail ends every watch because the store has failed.
func (f *Feed) fail(err error) {
	f.lock()
	defer f.unlock()
	f.endAllLocked(err)
}

func (t *tailer) position() keys.Epoch {
	t.feed.lock()
	defer t.feed.unlock()
	return t.feed.ring.dispatched
}

// step offers every commit up to the stable epoch to the live watches.
func (t *tailer) step(ctx context.Context) error {
	f, through := t.feed, t.feed.source.Stable()
	t.began = time.Now()
	if t.log == nil {
		t.log = f.readLog(ctx, nil, t.position()+1, wal.TailMark{})
	}
	for {
		more, err := t.read(through)
		if len(t.pieces) > 0 {
			if !t.dispatch() {
				t.close()
				return nil
			}
			t.failures = 0
		}
		if err != nil || !more {
			return err
		}
	}
}

// read reads the next pieces up to an epoch: one, and what is in memory after it. It reports false if there is nothing more. What was read before an
// error is to be offered.
func (t *tailer) read(through keys.Epoch) (more bool, _ error) {
	clear(t.pieces)
	t.pieces = t.pieces[:0]
	after := t.log.Position() - 1
	rec, ok, err := t.log.next(through)
	for ok {
		p := piece{through: rec.Epoch}
		if p.commits, err = t.feed.commitsOf(&rec, after); err != nil {
			return false, err
		}
		if t.pieces = append(t.pieces, p); len(t.pieces) == piecesMax {
			return true, nil
		}
		after = t.log.Position() - 1
		rec, ok = t.log.More(through)
	}
	return len(t.pieces) > 0, err
}

// commitsOf are the commits of a record of the log: none for a no-op record.
func (f *Feed) commitsOf(rec *wal.TailRecord, after keys.Epoch) ([]*Commit, error) {
	switch {
	case rec.Gap && !rec.Skipped:
		return f.loads(after, rec.Epoch), nil
	case len(rec.Body) == 0:
		return nil, nil
	}
	c, err := f.decode(rec)
	if err != nil {
		return nil, err
	}
	return []*Commit{c}, nil
}

// loads are the commits of the bulk loads in a gap of the log. If the store does not know which keys were loaded, because
// it was opened again since, they are those of the whole space.
func (f *Feed) loads(after, through keys.Epoch) (commits []*Commit) {
	known, complete := f.source.BulkLoads(after, through)
	if !complete || len(known) == 0 {
		known = []keys.LoadedRange{keys.WholeSpace(after+1, through, keys.SpaceUser)}
	}
	for _, one := range known {
		commits = append(commits, f.load(one))
	}
	return commits
}

// dispatch offers what was read to the live watches. It reports false if the tailer has been stopped. Readers take the mutex again and again while they
// offer, so the tailer does much each time that it has it; but no more than they.
func (t *tailer) dispatch() bool {
	f, offers := t.feed, 0
	f.lock()
	defer f.unlock()
	for _, p := range t.pieces {
		if offers >= offersMax {
			f.yieldLocked(true)
			offers = 0
		}
		if f.tailer != t {
			return false
		}
		for _, c := range p.commits {
			offers += f.dispatchLocked(c, t.isLate())
		}
		f.ring.dispatched = p.through
	}
	f.stopLocked()
	return f.tailer == t
}

// isLate reports whether the tailer has offered for so long that the next commits wait.
func (t *tailer) isLate() bool { return time.Since(t.began) > t.feed.options.lateAfter }

// dispatchLocked offers a commit to the live watches, and returns to how many.
func (f *Feed) dispatchLocked(c *Commit, late bool) (offers int) {
	f.addToRingLocked(c)
	candidates := f.candidatesLocked(c)
	var many map[string]bool
	if late && len(candidates) > f.options.fanoutMax {
		many = f.tooManyLocked(candidates)
	}
	for _, w := range candidates {
		switch {
		case w.state != StateLive:
		case many[w.consumer.client]:
			f.counters.becameLagging.Fanout++
			f.lagAtLocked(w, c)
			if w.halfEmpty() {
				f.joinLocked(w)
			}
		case !f.offerLocked(w, &c):
			f.counters.becameLagging.Queue++
			f.lagAtLocked(w, c)
		}
	}
	f.ring.dispatched = c.Epoch
	f.makeRoomLocked()
	return len(candidates)
}

// lagAtLocked lets a live watch lag that was not offered a commit.
func (f *Feed) lagAtLocked(w *Watch, c *Commit) {
	w.queued = latest(w.queued, Position{Epoch: c.before()})
	f.lagLocked(w)
}

// tooManyLocked are the clients of which so many watches want a commit that others would wait for all of them, if there are others. A client with
// thousands of watches of the same keys takes a millisecond for each commit. Readers offer it to them, in the turns of clients.
func (f *Feed) tooManyLocked(candidates []*Watch) map[string]bool {
	count := map[string]int{}
	for _, w := range candidates {
		count[w.consumer.client]++
	}
	many := map[string]bool{}
	for client, n := range count {
		if n > f.options.fanoutMax && n < f.live {
			many[client] = true
		}
	}
	return many
}

// candidatesLocked are the live watches that may want something of a commit. Of a bulk load, which is rare, all watches are asked.
func (f *Feed) candidatesLocked(c *Commit) []*Watch {
	if c.Loaded == nil {
		found, _ := f.index.candidates(c, true, len(f.watches))
		return found
	}
	all := make([]*Watch, 0, len(f.watches))
	for _, w := range f.watches {
		all = append(all, w)
	}
	return all
}

// recover goes on after an error. Memory still has what the damaged part of the log was to deliver: it is brought into the
// tree, from which the watches take the difference.
func (t *tailer) recover(ctx context.Context, err error) {
	t.close()
	f := t.feed
	t.failures++
	gap, ok := f.gapAt(ctx, t.position()+1, err, t.failures)
	if !ok {
		sleep(ctx, retryEvery)
		return
	}
	f.lock()
	defer f.unlock()
	if f.tailer != t {
		return
	}
	for _, w := range f.watches {
		if w.state == StateLive && f.queuedLocked(w).Epoch < gap.ResumeAt {
			f.gapLocked(w, gap)
		}
	}
	f.dropRingLocked()
	f.ring.reset(gap.ResumeAt)
}

// gapAt finds out why the log cannot be read at an epoch, and from where on it can. It reports false if that is not known
// yet, or if another attempt may succeed, after so many failures in a row.
func (f *Feed) gapAt(ctx context.Context, at keys.Epoch, err error, failures int) (gap GapError, ok bool) {
	if truncated, is := errors.AsType[*wal.TruncatedError](err); is {
		return GapError{ResumeAt: truncated.Oldest - 1, Oldest: truncated.Oldest}, true
	}
	if !isDamage(err) && failures <= failuresMax {
		return gap, false
	}
	f.lock()
	f.counters.damages++
	f.counters.damage = err
	f.unlock()
	next, ok, failed := f.source.Secure(ctx, at)
	if failed != nil || !ok {
		return gap, false
	}
	return GapError{ResumeAt: next - 1, Oldest: f.source.OldestInLog(), Cause: err}, true
}

func isDamage(err error) bool {
	return errors.Is(err, wal.ErrCorrupt) || errors.Is(err, wal.ErrVersion) || errors.Is(err, batch.ErrCorrupt)
}

func sleep(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
