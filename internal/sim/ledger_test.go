package sim

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/lease"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// ledger is what the clients of a store know. Every commit has an epoch, so the commits in the order of their epochs are the whole
// history, whatever ran at once: what each client saw is compared with it when all of them have ended.
//
// A crash takes back the commits after the newest epoch that the next start recovers, and no others. It must not take back what
// was promised: acknowledged SYNC commits, and those that an answer has shown.
type ledger struct {
	mu      sync.Mutex
	started time.Time

	commits  map[keys.Epoch]*commit
	used     map[keys.Epoch]bool // that a client has seen, in every run of the store
	seen     map[keys.Epoch]bool // of commits that were acknowledged; true if a crash has lost them
	tokens   map[keys.Epoch]lease.ID
	ended    map[string][]keys.Epoch // when locks were released
	fences   map[mvcc.RequestID]keys.Epoch
	requests map[mvcc.RequestID]*mvcc.Request
	past     map[uint64]pastState // states at times
	acked    keys.Epoch           // every later snapshot has it
	promised keys.Epoch           // no crash takes it back
	promiser string
	checks   []func(*states) error
	pending  []pendingDelete
	failures []error
}

// pastState is the first answer that told the state at a time. While the log has the commits after it, it has all commits of then.
type pastState struct {
	epoch keys.Epoch
	whole bool
}

// commit is one commit of a client.
type commit struct {
	epoch   keys.Epoch
	sync    bool
	writes  map[string]written
	request mvcc.RequestID
	before  uint64 // the store's clock when it began, and when it was answered
	after   uint64
}

// written is what a commit wrote of a key.
type written struct {
	value   string
	deleted bool
	expires uint64
	lease   *leaseModel
}

func newLedger() *ledger {
	return &ledger{
		started: time.Now(), commits: map[keys.Epoch]*commit{}, used: map[keys.Epoch]bool{}, seen: map[keys.Epoch]bool{}, tokens: map[keys.Epoch]lease.ID{},
		ended: map[string][]keys.Epoch{}, fences: map[mvcc.RequestID]keys.Epoch{}, requests: map[mvcc.RequestID]*mvcc.Request{}, past: map[uint64]pastState{},
	}
}

// floor is the newest epoch that was acknowledged: what begins now sees it.
func (l *ledger) floor() keys.Epoch {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.acked
}

// add notes a commit that has its epoch.
func (l *ledger) add(c *commit) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.used[c.epoch] {
		l.failures = append(l.failures, fmt.Errorf("epoch %d was given out twice", c.epoch))
	}
	l.used[c.epoch] = true
	l.commits[c.epoch] = c
}

// acknowledge notes that a commit was acknowledged.
func (l *ledger) acknowledge(e keys.Epoch, durable bool, what string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.acked, l.seen[e] = max(l.acked, e), false
	if durable {
		l.promiseLocked(e, what)
	}
}

func (l *ledger) promiseLocked(e keys.Epoch, what string) {
	if e > l.promised {
		l.promised, l.promiser = e, what
	}
}

// promise notes that no crash may take an epoch back.
func (l *ledger) promise(e keys.Epoch, what string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.promiseLocked(e, what)
}

// later has a check made when all clients have ended.
func (l *ledger) later(check func(*states) error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.checks = append(l.checks, check)
}

func (l *ledger) fail(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failures = append(l.failures, fmt.Errorf(format, args...))
}

// crash forgets what the store has lost.
func (l *ledger) crash(recovered keys.Epoch) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if recovered < l.promised {
		l.failures = append(l.failures, fmt.Errorf("epoch %d was promised by %s, and %d is the newest after the crash", l.promised, l.promiser, recovered))
	}
	after := func(e keys.Epoch) bool { return e > recovered }
	for e := range l.seen {
		l.seen[e] = l.seen[e] || after(e)
	}
	l.promised = min(l.promised, recovered)
	maps.DeleteFunc(l.commits, func(e keys.Epoch, _ *commit) bool { return after(e) })
	maps.DeleteFunc(l.tokens, func(e keys.Epoch, _ lease.ID) bool { return e > l.promised })
	maps.DeleteFunc(l.fences, func(_ mvcc.RequestID, e keys.Epoch) bool { return e > l.promised })
	clear(l.past)
	for name, list := range l.ended {
		l.ended[name] = slices.DeleteFunc(list, after)
	}
	l.acked = recovered
}

// states are all versions that the commits have written.
type states struct {
	*ledger
	keys map[string][]stateVersion // ascending
	all  []string
}

type stateVersion struct {
	epoch keys.Epoch
	sync  bool
	written
}

func (l *ledger) states() *states {
	s := &states{ledger: l, keys: map[string][]stateVersion{}}
	for _, e := range slices.Sorted(maps.Keys(l.commits)) {
		c := l.commits[e]
		for key, w := range c.writes {
			s.keys[key] = append(s.keys[key], stateVersion{epoch: e, sync: c.sync, written: w})
		}
	}
	s.all = slices.Sorted(maps.Keys(s.keys))
	return s
}

// at is the newest version of a key up to an epoch. Without one, it is a deletion at epoch zero.
func (s *states) at(key string, e keys.Epoch) stateVersion {
	list := s.keys[key]
	i, _ := slices.BinarySearchFunc(list, e+1, func(v stateVersion, e keys.Epoch) int { return cmp.Compare(v.epoch, e) })
	if i == 0 {
		return stateVersion{written: written{deleted: true}}
	}
	return list[i-1]
}

// changed is the first version of a key between two epochs, without these.
func (s *states) changed(key string, after, before keys.Epoch) (keys.Epoch, bool) {
	list := s.keys[key]
	i, _ := slices.BinarySearchFunc(list, after+1, func(v stateVersion, e keys.Epoch) int { return cmp.Compare(v.epoch, e) })
	if i < len(list) && list[i].epoch < before {
		return list[i].epoch, true
	}
	return 0, false
}

// within are the keys of the ledger in [lower, upper).
func (s *states) within(lower, upper string) []string {
	from, _ := slices.BinarySearch(s.all, lower)
	to, _ := slices.BinarySearch(s.all, upper)
	return s.all[from:max(from, to)]
}

// verify makes all checks, and reports what is wrong.
func (l *ledger) verify() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	errs := append(l.failures, l.resolve()...)
	s := l.states()
	for _, check := range l.checks {
		if err := check(s); err != nil {
			errs = append(errs, err)
		}
	}
	l.checks, l.failures = nil, nil
	errs = append(errs, s.requestsOnce(), s.locksExclude())
	return errors.Join(errs...)
}

// requestsOnce checks that no request is applied twice, and none that was cancelled.
func (s *states) requestsOnce() error {
	of := map[mvcc.RequestID]keys.Epoch{}
	for e, c := range s.commits {
		if c.request == (mvcc.RequestID{}) {
			continue
		}
		if first, twice := of[c.request]; twice {
			return fmt.Errorf("request %x was applied at %d and %d", c.request, first, e)
		}
		of[c.request] = e
		if fence, fenced := s.fences[c.request]; fenced {
			return fmt.Errorf("request %x was cancelled at %d, and applied at %d", c.request, fence, e)
		}
	}
	return nil
}

// locksExclude checks that the epochs of locks are not those of other commits.
func (s *states) locksExclude() error {
	for token := range s.tokens {
		if s.commits[token] != nil {
			return fmt.Errorf("the token %d is the epoch of another commit", token)
		}
	}
	return nil
}

// sight is what a client saw of a key.
type sight struct {
	key     string
	at      keys.Epoch
	found   bool
	value   string
	epoch   keys.Epoch
	expires uint64
	clock   uint64        // of the store, in milliseconds, when it was seen
	elapsed time.Duration // of the leases
	shown   bool          // the answer was complete: what it shows of SYNC commits must be durable
}

// check compares what was seen with the commits.
func (g *sight) check(s *states) error {
	v := s.at(g.key, g.at)
	if g.shown && v.sync && v.epoch > s.promised {
		s.promiseLocked(v.epoch, "read of "+g.key)
	}
	switch {
	case g.found && v.deleted:
		return fmt.Errorf("%s at %d is %.30q of %d, and should not be there (%d)", g.key, g.at, g.value, g.epoch, v.epoch)
	case g.found && (g.value != v.value || g.epoch != v.epoch || g.expires != v.expires):
		return fmt.Errorf("%s at %d is %.30q of %d until %d, want %.30q of %d until %d", g.key, g.at, g.value, g.epoch, g.expires, v.value, v.epoch, v.expires)
	case g.found || v.deleted:
		return nil
	case v.expires != 0 && g.clock >= v.expires, v.lease != nil && v.lease.mayHaveEnded(g.elapsed):
		return nil
	}
	return fmt.Errorf("%s at %d is not there, want %.30q of %d; deadline %d, now %d", g.key, g.at, v.value, v.epoch, v.expires, g.clock)
}

// leaseModel is a lease of a client.
type leaseModel struct {
	id lease.ID

	mu    sync.Mutex
	until time.Duration // it lives so long at least
	asked bool          // it was revoked
}

func (m *leaseModel) prolong(until time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.until = max(m.until, until)
}

func (m *leaseModel) mayHaveEnded(now time.Duration) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.asked || now >= m.until
}

// deletes notes a range delete, whose keys are those that are there at the epoch before its own.
func (l *ledger) deletes(resolve func(*states) error, e keys.Epoch) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pending = append(l.pending, pendingDelete{e, resolve})
}

// pendingDelete is a range delete of which it is not known yet which keys it deletes.
type pendingDelete struct {
	epoch   keys.Epoch
	resolve func(*states) error
}

// resolve finds out which keys the range deletes have deleted, in the order of their epochs.
func (l *ledger) resolve() (errs []error) {
	slices.SortFunc(l.pending, func(a, b pendingDelete) int { return cmp.Compare(a.epoch, b.epoch) })
	for _, p := range l.pending {
		if err := p.resolve(l.states()); err != nil {
			errs = append(errs, err)
		}
	}
	l.pending = nil
	return errs
}

// equal compares what is stored with the state at an epoch. Keys with a deadline or a lease may be gone.
func (s *states) equal(got map[string]sight, e keys.Epoch) error {
	for key, g := range got {
		if v := s.at(key, e); v.deleted || v.epoch != g.epoch || v.value != g.value {
			return fmt.Errorf("%s is %.30q of %d, and at %d it was %.30q of %d", key, g.value, g.epoch, e, v.value, v.epoch)
		}
	}
	for _, key := range s.all {
		if v := s.at(key, e); !v.deleted && v.expires == 0 && v.lease == nil {
			if _, is := got[key]; !is {
				return fmt.Errorf("%s is not there, and at %d it was %.30q of %d", key, e, v.value, v.epoch)
			}
		}
	}
	return nil
}
