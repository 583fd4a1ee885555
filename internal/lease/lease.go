// Package lease ends what its owner has abandoned: keys that are attached to a lease are deleted when the lease ends, and
// so are the locks that are held with it.
//
//	grant ─► a lease with a time to live (TTL) ──keep-alive──► the TTL begins anew
//	         keys are attached by a put that names the lease
//	         deadline passed, or revoke ─► one commit: attached keys, attachments and lease are deleted
//
// Terms. A lease is live until its revocation begins, at its deadline or on request. A key is attached to the lease that
// its newest version names; a put with another lease, or without one, detaches it. A lock is a record that is attached to
// the lease of its holder; its token is the epoch of the commit that wrote it.
//
//	record                       value
//	l | id                       TTL, time of the grant, recorded remaining TTL, owner (format.go)
//	a | id | keyspace | key      empty: the key may be attached to the lease
//	o | name                     what the holder says of itself; metadata: the lease
//
// Deadlines are in memory, by the monotonic clock: a keep-alive writes nothing, and no change of the wall clock ends a
// lease. So a restart does not know when the last keep-alive was, and begins the whole TTL anew. For a lease longer than
// recordFrom that would be long after its owner has gone. What is left of such a lease is recorded every recordEvery; the
// next keep-alive removes the record before it is answered.
//
// Invariants:
//   - A lease never ends before its TTL has passed since its last answered keep-alive, whatever the wall clock does, and
//     however often the store restarts.
//   - A live version that names a lease has an attachment, and its lease exists: both are written in one batch, under the
//     latches of key and lease. Attachments may be stale; the version decides.
//   - Attachments of a lease whose revocation has begun are refused. The revocation sets a mark in memory, and then waits
//     for the commits that have held the lease's latch before: it finds all of their attachments.
//   - A revocation deletes a key only if, under the key's latch, the newest version names this lease.
//   - A lease has at most Options.Keys attachments, stale ones included; see counting.
//   - Tokens of one lock ascend, and at most one is valid at any epoch.
//
// Locks: Manager.mu before entry.mu; both are leaves to latches, and neither is held while a commit or a wait is under way.
//
// The package knows nothing of connections: what happens to waiters when a client leaves is decided by their contexts. Of clients it knows
// what Options.Client tells: their leases end in turn, and each leaves as many places to wait free as it has. Only what waits for a lock, or observes one, needs a place.
package lease

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// ID names a lease. Zero is no lease.
type ID uint64

// Limits of the TTL.
const (
	TTLMin = time.Second
	TTLMax = 10 * 365 * 24 * time.Hour
)

// OwnerBytesMax is the longest text that says whose lease it is.
const OwnerBytesMax = 255

// Errors.
var (
	ErrNotFound  = errors.New("the lease does not exist, or has ended")
	ErrRevoking  = errors.New("the lease is being revoked")
	ErrExists    = errors.New("a lease with this id exists")
	ErrTooMany   = errors.New("too many leases exist")
	ErrTTL       = fmt.Errorf("the time to live must be between %v and 10 years", TTLMin)
	ErrOwner     = fmt.Errorf("the owner has more than %d bytes", OwnerBytesMax)
	ErrLockName  = errors.New("the name of a lock must not be empty, and not be longer than the limit of keys less 16 bytes")
	ErrLockValue = fmt.Errorf("the value of a lock has more than %d bytes", LockValueBytesMax)
	ErrWaiters   = errors.New("too many requests wait for locks, or observe them")
)

// StepKeysMax is how many keys a lease has at most that end in one commit. The commit holds the latches of all of them, and
// computes the deletions meanwhile: with 100,000 keys, a put of another key waited for up to a second.
const StepKeysMax = 1000

// longStepKeys is how many keys each commit deletes if one is not enough. 1,000 keys have three fifths of the latches, which
// the puts of other keys share; a lease with a million keys would hold them up for as long as its revocation takes.
const longStepKeys = 128

// Options configure a Manager. Zero fields take the default named beside them.
type Options struct {
	Leases    int                          // that exist at once; 1,000,000
	Keys      int                          // attached to a lease; KeysMax
	Waiters   int                          // requests that wait for locks or observe them, at once; 100,000
	StepBytes int                          // of attachments that one commit of a revocation deletes; 16 MiB
	StepKeys  int                          // attachments that it deletes, if it deletes all; 1,000. See longStepKeys
	Grace     time.Duration                // by which leases are prolonged at a start; 1 s
	Elapsed   func() time.Duration         // the monotonic clock; since Open
	Client    func(context.Context) string // of a request: clients have turns when leases end, and leave places to wait free; nil if they are not told apart
	Now       func() time.Time             // what grants show as their time; time.Now

	unreadEvery time.Duration // 10 s; see readUnread
	yield       func()        // lets others run; runtime.Gosched
}

// Manager has the leases and locks of a store.
type Manager struct {
	// Constant after Open.
	store    *mvcc.Store
	options  Options
	turnTime time.Duration // turnTime, but for tests
	seed     maphash.Seed  // of the numbers of clients

	mu       sync.RWMutex
	leases   map[ID]*entry
	reserved int      // grants under way
	granting granting // those of which the record may be there, although the lease is not in memory yet
	lines    lines    // of the leases that are not being revoked at this moment: each at its deadline, or before it if it was kept alive since
	busy     []*entry // leases that are being revoked
	tried    tried    // those whose revocation goes on or is tried again

	sessions struct { // each of one goroutine, and not counted by the limit: clients may have all others in use
		revoker, recorder, reader *mvcc.Session
	}
	counting    counting
	listing     chan struct{} // holds a token of a list
	unread      unreadLeases
	wake        chan struct{} // holds a token if the expirer must look again
	failed      sync.Once
	storeFailed chan struct{} // closed when a turn has found that the store has failed: no revocation will succeed
	locks       lockTable
	counters    counters
}

// Open reads the leases of a store. The caller runs Run until the store closes.
func Open(ctx context.Context, store *mvcc.Store, o Options) (*Manager, error) {
	started := time.Now()
	orDefault(&o.Leases, 1_000_000)
	orDefault(&o.Waiters, 100_000)
	orDefault(&o.Keys, KeysMax)
	orDefault(&o.StepBytes, 16<<20)
	orDefault(&o.StepKeys, StepKeysMax)
	orDefault(&o.Grace, time.Second)
	orDefault(&o.unreadEvery, unreadEvery)
	if o.yield == nil {
		o.yield = runtime.Gosched
	}
	if o.Elapsed == nil {
		o.Elapsed = func() time.Duration { return time.Since(started) }
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	m := &Manager{
		store: store, options: o, turnTime: turnTime, seed: maphash.MakeSeed(), leases: map[ID]*entry{}, granting: granting{}, lines: lines{all: map[uint64]*line{}}, wake: make(chan struct{}, 1), storeFailed: make(chan struct{}),
		counting: counting{wake: make(chan struct{}, 1)}, listing: make(chan struct{}, 1),
	}
	m.sessions.revoker, m.sessions.recorder, m.sessions.reader = store.OwnSession(), store.OwnSession(), store.OwnSession()
	m.counting.session = store.OwnSession()
	m.locks.queues, m.locks.clients, m.locks.max = map[string]*lockQueue{}, map[string]int{}, o.Waiters
	if err := m.load(ctx); err != nil {
		return nil, fmt.Errorf("read the leases: %w", err)
	}
	store.GuardLeases(mvcc.LeaseGuard{
		Admit: func(id uint64, keys int) error { return m.admit(ID(id), keys) },
		Room:  func(id uint64) int { return m.room(ID(id)) },
	})
	return m, nil
}

func orDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// entry is a lease in memory.
type entry struct {
	id ID
	// since is the epoch of the grant; zero if something may have been attached before it. Constant once the lease is in
	// Manager.leases.
	since keys.Epoch
	// epoch is that of the grant, until which nothing is told of the lease that a crash could take back; zero: it was read from the store. Constant.
	epoch keys.Epoch

	// Changed while Manager.mu is held: in the line of which client the lease is, where, and for which time.
	client atomic.Uint64
	at     time.Duration
	index  int
	tried  int // its place in Manager.tried, and one more; zero: it is not there

	mu       sync.Mutex
	record   record        // what is stored, but for remaining, which is zero
	deadline time.Duration // in elapsed time
	revoking bool          // never goes back
	recorded bool          // what is left may be recorded: a keep-alive removes that first
	gone     bool
	attached attachedKeys
	clearing int32         // keep-alives that remove it
	cleared  uint32        // how often one of them has begun to
	ended    chan struct{} // closed when the lease is revoked; nil while nothing waits for it

	progress progress // of the goroutine that revokes
}

// endedLocked is a channel that is closed when the lease has been revoked.
func (e *entry) endedLocked() chan struct{} {
	if e.ended == nil {
		e.ended = make(chan struct{})
		if e.gone {
			close(e.ended)
		}
	}
	return e.ended
}

// knows reports whether a lease is in memory, or will be.
func (m *Manager) knows(id ID) bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.leases[id] != nil || m.granting[id] != nil
}

func (m *Manager) find(id ID) (*entry, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if e := m.leases[id]; e != nil {
		return e, nil
	}
	return nil, &Error{ID: id, Err: ErrNotFound}
}

// Error is an error of one lease.
type Error struct {
	ID  ID
	Err error // ErrNotFound, ErrRevoking, ErrExists or ErrTooManyKeys
}

func (e *Error) Error() string { return fmt.Sprintf("lease %d: %v", e.ID, e.Err) }

// Unwrap is the sentinel.
func (e *Error) Unwrap() error { return e.Err }

// Info describes a lease.
type Info struct {
	ID        ID
	TTL       time.Duration
	Remaining time.Duration // zero if the deadline has passed
	Granted   time.Time     // by the wall clock of then
	Owner     string
	Revoking  bool
}

func (m *Manager) info(e *entry) Info {
	e.mu.Lock()
	defer e.mu.Unlock()
	return Info{
		ID: e.id, TTL: e.record.ttl, Remaining: max(0, e.deadline-m.options.Elapsed()), Granted: e.record.granted,
		Owner: e.record.owner, Revoking: e.revoking,
	}
}

// Grant makes a lease and returns the epoch of its commit; the caller waits until that is durable. With the id zero it
// chooses one. A lease that is not known, because a damaged page hid its record at the start, is taken over with its keys and locks: see Unread. Errors: ErrTTL, ErrOwner, ErrExists, ErrTooMany, and those of a commit.
func (m *Manager) Grant(ctx context.Context, id ID, ttl time.Duration, owner string) (Info, keys.Epoch, error) {
	switch {
	case ttl < TTLMin || ttl > TTLMax:
		return Info{}, 0, ErrTTL
	case len(owner) > OwnerBytesMax:
		return Info{}, 0, ErrOwner
	}
	if err := m.store.RequireFeatureLevel(keys.FeatureLevelHistory, "leases"); err != nil {
		return Info{}, 0, err
	}
	if err := m.reserve(); err != nil {
		return Info{}, 0, err
	}
	defer m.release()
	for id == 0 {
		id = ID(rand.Uint64() >> 1) // fits into an int64 of other languages
	}
	e := &entry{id: id, attached: attachedKeys{countAt: m.options.Keys / 2}, record: record{ttl: time.Duration(wholeSeconds(ttl)) * time.Second, granted: m.options.Now(), owner: owner}}
	e.client.Store(m.clientNumber(ctx))
	epoch, err := m.commitGrant(ctx, e)
	for errors.Is(err, errGrantFailed) {
		epoch, err = m.commitGrant(ctx, e)
	}
	if err != nil {
		return Info{}, 0, err
	}
	m.add(e)
	m.counters.granted.Add(1)
	return m.info(e), epoch, nil
}

// errGrantFailed says that another grant of the lease, for which this one has waited, has failed.
var errGrantFailed = errors.New("another grant of the lease has failed")

func (m *Manager) commitGrant(ctx context.Context, e *entry) (keys.Epoch, error) {
	x, err := m.store.SessionOf(ctx)
	if err != nil {
		return 0, err
	}
	defer x.Close()
	var w mvcc.Write
	w.Durability = mvcc.DurabilitySync
	w.SetOwn()
	key := leaseKey(e.id)
	w.Batch.Set(keys.SpaceSystem, key, e.record.encode()) // no record beside a deletion: on a full disk it would take the reserve
	adopts := false
	w.Under(func(l *mvcc.Latched) error {
		n, err := l.Newest(keys.Append(nil, keys.SpaceSystem, key))
		exists := err == nil && n.Found
		if errors.Is(err, mvcc.ErrDamaged) { // what is attached to a lease that is not known, because its record cannot be read, is now attached to this one
			adopts, err = true, nil
			exists = m.knows(e.id)
		}
		switch {
		case exists:
			return &Error{ID: e.id, Err: ErrExists}
		case err == nil:
			m.beginGrant(e)
		}
		return err
	})
	e.epoch, err = x.Commit(ctx, &w)
	if !adopts {
		e.since = e.epoch
	}
	if err != nil {
		m.endGrant(e)
	}
	if errors.Is(err, ErrExists) { // another attempt of this request may have granted it, and not know yet whether that is durable
		if err := m.awaitEntered(ctx, e.id); err != nil {
			return 0, err
		}
		if adopts && !m.knows(e.id) {
			return 0, errGrantFailed
		}
		if err := m.store.Wait(ctx, x.Await(), mvcc.DurabilitySync); err != nil {
			return 0, err
		}
	}
	return e.epoch, err
}

// isDurable reports whether the grant of a lease is durable.
func (m *Manager) isDurable(e *entry) bool { return e.epoch <= m.store.Durable() }

// awaitGrant waits until the grant of a lease is durable.
func (m *Manager) awaitGrant(ctx context.Context, e *entry) error {
	if m.isDurable(e) {
		return nil
	}
	return m.store.Wait(ctx, e.epoch, mvcc.DurabilitySync)
}

// reserve makes room for one more lease.
func (m *Manager) reserve() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.leases)+m.reserved >= m.options.Leases {
		return ErrTooMany
	}
	m.reserved++
	return nil
}

func (m *Manager) release() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reserved--
}

// add begins the life of a lease that is committed.
func (m *Manager) add(e *entry) {
	e.deadline = m.options.Elapsed() + e.record.ttl
	m.mu.Lock()
	defer m.mu.Unlock()
	at := e.deadline
	if before := m.leases[e.id]; before != nil && before.index != notScheduled { // it was read, or Revoke was asked for it, when its record could not be read
		m.unschedule(before)
		m.tried.remove(before)
		before.mu.Lock()
		if before.revoking {
			at, e.revoking, e.ended = 0, true, before.ended
		}
		before.mu.Unlock()
	}
	m.leases[e.id] = e
	m.endGrantLocked(e)
	if m.schedule(e, at) {
		m.wakeUp()
	}
}

// Lease describes one lease. The error is ErrNotFound, or why ctx ended.
func (m *Manager) Lease(ctx context.Context, id ID) (Info, error) {
	e, err := m.find(id)
	if err == nil {
		err = m.awaitGrant(ctx, e)
	}
	if err != nil {
		return Info{}, err
	}
	return m.info(e), nil
}

// List describes up to limit leases with ids after one, in the order of their ids; more says that there are others. One list at a time
// looks at all leases, in parts: leases that exist all the time are in it, those that begin or end meanwhile may be. Then others have the processor
// for as long. The error is why ctx ended.
func (m *Manager) List(ctx context.Context, after ID, limit int) (list []Info, more bool, err error) {
	select {
	case m.listing <- struct{}{}:
		began := m.options.Elapsed()
		defer func() { // the next list begins when others had the processor for as long
			time.AfterFunc(m.options.Elapsed()-began, func() { <-m.listing })
		}()
	case <-ctx.Done():
		return nil, false, context.Cause(ctx)
	}
	found := m.first(after, limit+1)
	if more = len(found) > limit; more {
		found = found[:limit]
	}
	list = make([]Info, 0, len(found))
	for _, e := range found {
		if err := m.awaitGrant(ctx, e); err != nil {
			return nil, false, err
		}
		list = append(list, m.info(e))
	}
	return list, more, nil
}

// leasesPerTurn is how many leases a list looks at in a row. Grants wait meanwhile, and once one of them waits, all that looks for a lease.
const leasesPerTurn = 1024

// first are the first n leases with ids after one. It keeps no more than twice as many of the leases, of which there may be a million.
func (m *Manager) first(after ID, n int) (found []*entry) {
	full, last := false, ID(0)
	trim := func() {
		if found = ordered(found, n); len(found) == n {
			full, last = true, found[n-1].id
		}
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	looked := 0
	for id, e := range m.leases { // a range over a map may go on after the map was changed, as long as nothing changes it at that moment
		if looked++; looked%leasesPerTurn == 0 {
			m.mu.RUnlock()
			m.options.yield()
			m.mu.RLock()
		}
		if id <= after || full && id >= last {
			continue
		}
		if found = append(found, e); len(found) == 2*n {
			trim()
		}
	}
	trim()
	return found
}

// ordered are the first n of some leases, in the order of their ids. One that was granted anew between two parts of a list is there once.
func ordered(found []*entry, n int) []*entry {
	slices.SortFunc(found, func(x, y *entry) int { return cmp.Or(cmp.Compare(x.id, y.id), cmp.Compare(y.since, x.since)) })
	found = slices.CompactFunc(found, func(x, y *entry) bool { return x.id == y.id })
	clear(found[min(n, len(found)):])
	return found[:min(n, len(found))]
}
