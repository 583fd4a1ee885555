package mvcc

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// expirer deletes keys after their deadlines, at a rate that leaves writers what they need (expiryPace).
//
//	commits ─► expiry queue ─► run: up to now, in the order of deadlines ─► workers: latch, compare, delete ─► commits
//	   └─ a deadline before next: wake ─┘
//
// It sleeps until the earliest deadline in the queue, at most expirySleepMax; without deadlines it only waits for a wake.
//
// Invariants:
//   - A key is deleted only by a commit that begins when the store's clock shows its deadline or later.
//   - next is not after the earliest deadline of an entry that no pass has taken yet. A pass sets it to none and waits until
//     all epochs reserved by then are visible, before it takes its snapshot; a commit looks at next after its versions are
//     installed. So the pass sees the entry, or the commit sees that next is later and lowers it.
type expirer struct {
	store *Store
	next  atomic.Uint64 // milliseconds since 1970, noDeadline without any
	wake  chan struct{} // a token when a commit has lowered next
	// progress is the first deadline of the batch before the newest one of a running pass; noDeadline between passes. While more batches are in flight, those
	// before it may have earlier ones: the lag is too small by as much.
	progress atomic.Uint64
	expired  atomic.Uint64 // keys that were deleted
	stale    atomic.Uint64 // entries that were deleted alone
	skipped  atomic.Uint64 // entries left in the queue, because of damaged pages
	commits  atomic.Uint64
	failure  atomic.Pointer[error] // of the last pass; nil if it was complete
	unread   atomic.Pointer[error] // the first damage that hid entries from the last pass, or their keys; nil if none did

	sessions [expiryCommitsLate]*Session // of the workers

	// Owned by run.
	session  *Session // that reads the queue
	size     int      // entries of a batch; see adapt
	jobs     chan *expiryBatch
	done     chan *expiryBatch
	idle     []*expiryBatch
	inFlight int
	retryAt  time.Time // when entries that were skipped are tried again; zero if there are none
	retry    uint64    // earliest deadline among them
	hidden   error     // the first damage of the pass
}

const (
	noDeadline = math.MaxUint64

	// expirySleepMax bounds the sleep of the expirer, because the clock may be set ahead (clock.Accept).
	expirySleepMax = time.Second
	// expiryPassMax is how long a pass begins batches.
	expiryPassMax = time.Second
	// expiryBackoff is the pause after a pass that failed.
	expiryBackoff = time.Second
	// expiryRetryAfter is when entries that damaged pages hide are tried again.
	expiryRetryAfter = time.Minute
	// expiryCommitsMax is how many commits of the expirer are in flight, and expiryCommitsLate how many while it is late: beside many clients each of them
	// waits for latches and processors as long as each of theirs.
	expiryCommitsMax  = 2
	expiryCommitsLate = 8
	// expiryBatchMax is the number of entries in a commit: 1000 random keys would hold a good part of all latches.
	expiryBatchMax = 128
	// expiryBatchMin is the least: what a commit of so many reads under its latches is read before. Halved any further, on a busy machine or for keys that
	// are not in memory, the expirer would be slower than the clients whose keys it deletes.
	expiryBatchMin = readBeforeMin
	// A batch that holds its latches for longer than expiryHeldMax, or takes longer than expiryTookMax, is halved, unless it is late.
	expiryHeldMax = 200 * time.Microsecond
	expiryTookMax = 20 * time.Millisecond
	// A batch is late from expiryLateMax after its first deadline on. It may take for as long as it has to, and hold its latches for expiryHeldLate: it waits
	// for latches and processors, which many clients want as well, and a smaller batch would wait as long.
	expiryLateMax  = time.Second
	expiryHeldLate = 10 * expiryHeldMax
)

// queueUpper is the end of the expiry queue, as ScanSystem takes it.
var queueUpper = []byte{keys.SystemExpiry + 1}

func newExpirer(s *Store) *expirer {
	e := &expirer{store: s, wake: make(chan struct{}, 1), size: expiryBatchMax, session: s.newSession()}
	for i := range e.sessions {
		e.sessions[i] = s.newSession()
	}
	e.progress.Store(noDeadline)
	return e // next is zero: the first pass looks at the whole queue
}

// note is called by a commit that has installed an entry with this deadline.
func (e *expirer) note(deadline uint64) {
	for {
		next := e.next.Load()
		if deadline >= next {
			return
		}
		if e.next.CompareAndSwap(next, deadline) {
			break
		}
	}
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// now is the store's clock in milliseconds.
func (e *expirer) now() uint64 { return e.store.clock.Now() / 1000 }

// run expires keys until ctx ends.
func (e *expirer) run(ctx context.Context) {
	e.jobs, e.done = make(chan *expiryBatch), make(chan *expiryBatch, expiryCommitsLate)
	var workers sync.WaitGroup
	for _, x := range e.sessions {
		e.idle = append(e.idle, new(expiryBatch))
		workers.Go(func() {
			for b := range e.jobs {
				b.commit(ctx, x)
				e.done <- b
			}
		})
	}
	for e.sleep(ctx) {
		err := e.pass(ctx, time.Now().Add(expiryPassMax))
		e.failure.Store(nil)
		if err != nil && ctx.Err() == nil {
			e.failure.Store(&err)
			wait(ctx, expiryBackoff)
		}
	}
	close(e.jobs)
	workers.Wait()
}

// sleep returns true when the earliest deadline has passed, and false when ctx has ended.
func (e *expirer) sleep(ctx context.Context) bool {
	for {
		if !e.retryAt.IsZero() && !time.Now().Before(e.retryAt) {
			e.retryAt = time.Time{}
			e.note(e.retry)
		}
		next, now := e.next.Load(), e.now()
		if ctx.Err() != nil || next <= now {
			return ctx.Err() == nil
		}
		if next == noDeadline && e.retryAt.IsZero() {
			select {
			case <-ctx.Done():
			case <-e.wake:
			}
			continue
		}
		timer := time.NewTimer(time.Duration(min(next-now, uint64(expirySleepMax/time.Millisecond))) * time.Millisecond)
		select {
		case <-ctx.Done():
		case <-e.wake:
		case <-timer.C:
		}
		timer.Stop()
	}
}

func wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// pass handles the entries from the earliest deadline up to now, and sets next to the deadline after them. It begins no batch after until: commits
// note their deadlines in next meanwhile, and these count as lag until the pass ends, although it may have handled them.
func (e *expirer) pass(ctx context.Context, until time.Time) (err error) {
	first := e.next.Swap(noDeadline)
	e.progress.Store(first)
	e.hidden = nil
	defer func() {
		for e.inFlight > 0 {
			err = errors.Join(err, e.collect())
		}
		e.noteDamage()
		if err != nil {
			e.note(e.progress.Load())
		}
		e.progress.Store(noDeadline)
	}()
	if err := e.store.watermark.wait(ctx, e.store.engine.Reserved(), e.session.parker); err != nil {
		return err
	}
	from := binary.BigEndian.AppendUint64([]byte{keys.SystemExpiry}, first)
	pace := expiryPace{began: time.Now()}
	for more := true; more; {
		for e.inFlight >= e.commitsMax(first) {
			if err := e.collect(); err != nil {
				return err
			}
		}
		b := e.idle[len(e.idle)-1]
		if from, more, err = e.fill(ctx, b, from); err != nil {
			return err
		}
		if len(b.ends) > 0 {
			e.idle = e.idle[:len(e.idle)-1]
			e.progress.Store(first)
			first = b.first()
			e.jobs <- b
			e.inFlight++
			pace.pause(ctx, len(b.ends))
		}
		if more && time.Now().After(until) {
			e.note(queueDeadline(from))
			return nil
		}
	}
	return nil
}

// commitsMax is how many commits may be in flight, by the deadline that the newest of them begins with.
func (e *expirer) commitsMax(deadline uint64) int {
	if e.late(deadline) > expiryLateMax {
		return expiryCommitsLate
	}
	return expiryCommitsMax
}

// late is how long ago the deadline was.
func (e *expirer) late(deadline uint64) time.Duration {
	return time.Duration(max(e.now(), deadline)-deadline) * time.Millisecond
}

// fill reads the entries of a batch, from a key on, and returns the key from which to go on, if there may be more that are due.
func (e *expirer) fill(ctx context.Context, b *expiryBatch, from []byte) (next []byte, more bool, err error) {
	b.reset()
	now := e.now()
	visit := func(key, _ []byte, _ keys.Epoch) bool {
		if len(key) <= 1+deadlineBytes { // it names no key
			return true
		}
		if deadline := binary.BigEndian.Uint64(key[1:]); deadline > now {
			e.note(deadline)
			return false
		}
		if len(b.ends) == e.size {
			more, next = true, append(from[:0], key...)
			return false
		}
		b.add(key)
		return true
	}
	err = e.session.ScanReadable(ctx, from, queueUpper, visit, func(lower, _ []byte, err error) {
		// The queue goes on after the damaged page. What the page hides is looked for again later.
		e.later(queueDeadline(lower), err)
	})
	return next, more, err
}

// queueDeadline is the earliest deadline of an entry with a key of SpaceSystem that is not less than key, which is in the queue or
// before it.
func queueDeadline(key []byte) uint64 {
	if len(key) == 0 || key[0] != keys.SystemExpiry {
		return 0
	}
	var deadline [deadlineBytes]byte
	copy(deadline[:], key[1:])
	return binary.BigEndian.Uint64(deadline[:])
}

// collect waits for a batch, and counts what it did.
func (e *expirer) collect() error {
	b := <-e.done
	e.inFlight--
	e.idle = append(e.idle, b)
	if b.err != nil {
		e.note(b.first()) // a batch that began later may be complete: progress is no bound for this one
		return b.err
	}
	e.commits.Add(1)
	e.expired.Add(uint64(b.expired))
	e.stale.Add(uint64(b.stale))
	if b.skipped > 0 {
		e.skipped.Add(uint64(b.skipped))
		e.later(b.first(), b.damage)
	}
	e.adapt(b.held, b.took, e.late(b.first()))
	return nil
}

// later says that an entry with this deadline is to be tried again, because of damage.
func (e *expirer) later(deadline uint64, damage error) {
	if e.retryAt.IsZero() {
		e.retryAt, e.retry = time.Now().Add(expiryRetryAfter), deadline
	}
	e.retry = min(e.retry, deadline)
	if e.hidden == nil {
		e.hidden = damage
	}
}

// noteDamage tells at the end of a pass what damage hides. A pass that has met none clears that only when nothing is left to be
// tried again: it may have begun after the damage.
func (e *expirer) noteDamage() {
	switch {
	case e.hidden != nil:
		damage := e.hidden
		e.unread.Store(&damage)
	case e.retryAt.IsZero():
		e.unread.Store(nil)
	}
}

// adapt halves the batches when one has held its latches or taken for too long, and lets them grow by an eighth otherwise.
func (e *expirer) adapt(held, took, late time.Duration) {
	if held > expiryHeldLate || late <= expiryLateMax && (held > expiryHeldMax || took > expiryTookMax) {
		e.size = max(e.size/2, expiryBatchMin)
	} else {
		e.size = min(e.size+max(e.size/8, 1), expiryBatchMax)
	}
}

// lag is how long ago the earliest deadline was that has not been handled.
func (e *expirer) lag() time.Duration {
	earliest := min(e.next.Load(), e.progress.Load())
	if earliest == 0 || earliest == noDeadline { // zero: the queue was not looked at since the start. An idle clock is not read
		return 0
	}
	return e.late(earliest)
}
