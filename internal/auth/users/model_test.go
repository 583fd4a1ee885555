package users

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestUsersAgainstAModel: whole lives of stores, in which users, roles, tokens and passwords change, one change at a time or two at once,
// while requests end early, rights are taken away, clocks go on, disks are full, syncs fail, and the machine crashes, also during a
// start. After each step, and after each start, users, rights, limits, tokens and passwords are those of the model.
func TestUsersAgainstAModel(t *testing.T) {
	seed := testseed.Base(t)
	for i := range uint64(chains) {
		if !t.Run(fmt.Sprint(seed+i), func(t *testing.T) { newLife(t, seed+i).live(lifeRuns) }) {
			return
		}
	}
}

const (
	chains   = 3
	lifeRuns = 8 // starts of the store
	runSteps = 14
)

// life is a store with its model.
type life struct {
	t       *testing.T
	rng     *rand.Rand
	disk    *vfs.Mem
	faults  *vfs.Faulty
	now     time.Time
	may     []*world // what the store may have; one of them, unless the store has failed
	h       *harness
	labels  int
	history []string

	mu      sync.Mutex
	secrets map[string]string // tokens by label
}

func newLife(t *testing.T, seed uint64) *life {
	return &life{
		t: t, rng: rand.New(rand.NewPCG(seed, 65)), disk: vfs.NewMem(), now: time.Unix(1_800_000_000, 0), may: []*world{newWorld()},
		secrets: map[string]string{},
	}
}

func (l *life) note(format string, args ...any) {
	l.history = append(l.history, fmt.Sprintf(format, args...))
}

func (l *life) fail(format string, args ...any) {
	l.t.Helper()
	from := max(0, len(l.history)-40)
	for _, line := range l.history[from:] {
		l.t.Log(line)
	}
	l.t.Fatalf(format, args...)
}

func (l *life) live(runs int) {
	for range runs {
		if !l.start() {
			continue
		}
		for range l.rng.IntN(runSteps) {
			if !l.step() {
				break
			}
		}
		l.end()
	}
}

// start opens the store, and reports false if the machine crashes meanwhile.
func (l *life) start() bool {
	if l.rng.IntN(6) == 0 {
		l.disk.CrashAt(l.disk.Mutations() + 1 + l.rng.Int64N(40))
	}
	l.faults = vfs.NewFaulty(l.disk)
	h, err := tryOpen(l.t, l.faults)
	if err != nil {
		if !l.disk.Crashed() {
			l.fail("the store does not start: %v", err)
		}
		l.note("crash during a start")
		l.crash()
		return false
	}
	l.h = h
	h.now = l.now
	if len(h.bad) > 0 {
		l.fail("cannot be read: %q", h.bad)
	}
	l.recognize("after a start")
	return true
}

// recognize finds out what the store has, of what it may have.
func (l *life) recognize(when string) {
	l.t.Helper()
	var why []string
	for _, w := range l.may {
		differs := l.differs(w)
		if differs == "" {
			l.may = []*world{w}
			return
		}
		why = append(why, differs)
	}
	l.fail("%s the store has none of %d states: %q\n%v", when, len(l.may), why, l.may)
}

// end ends the process: cleanly, by a kill, or with the machine.
func (l *life) end() {
	broken := l.disk.Crashed() || l.h.store.Err() != nil
	if !broken && l.rng.IntN(3) == 0 {
		if err := l.h.end(); err != nil {
			if !l.disk.Crashed() {
				l.fail("the end: %v", err)
			}
			l.crash()
			return
		}
		if l.disk.Crashed() { // with nothing left to write
			l.crash()
			return
		}
		l.note("end")
		return
	}
	old := l.h
	l.crash()
	_ = old.end()
}

func (l *life) crash() {
	survival := []vfs.Survival{vfs.SurviveSome, vfs.SurviveNone, vfs.SurviveAll, vfs.SurviveProcess}[l.rng.IntN(4)]
	l.note("crash %d", survival)
	l.disk = l.disk.Crash(l.rng.Uint64(), survival)
}

// change is a request, and what it does to the model.
type change struct {
	name  string
	by    string // label of the token of its administrator; empty: it needs none
	first func(*world) error
	model func(*world) error
	do    func(context.Context) error
}

// apply is what a change does to a world, which stays as it is.
func (l *life) apply(w *world, c *change) (*world, error) {
	if c.first != nil {
		if err := c.first(w); err != nil {
			return w, err
		}
	}
	if c.by != "" {
		if err := w.permit(c.by, l.now); err != nil {
			return w, err
		}
	}
	next := w.clone()
	if err := c.model(next); err != nil {
		return w, err
	}
	if next.enabled && !next.hasAdministrator() {
		return w, ErrLastAdministrator
	}
	return next, nil
}

// step executes one change, or two at once, with or without a fault. It reports false if the store does not work any more.
func (l *life) step() bool {
	l.now = l.now.Add([]time.Duration{time.Minute, time.Minute, time.Minute, time.Hour, 30 * time.Hour}[l.rng.IntN(5)])
	l.h.now = l.now
	changes := []*change{l.change()}
	if l.rng.IntN(3) == 0 {
		changes = append(changes, l.change())
	}
	ctx, ends, heal := l.fault()
	errs := make([]error, len(changes))
	var all sync.WaitGroup
	for i, c := range changes {
		all.Go(func() {
			ctx := ctx
			if c.by != "" {
				ctx = WithPermit(ctx, l.permit(c.by))
			}
			errs[i] = c.do(ctx)
		})
	}
	all.Wait()
	heal()
	broken := l.disk.Crashed() || l.h.store.Err() != nil
	for i, c := range changes {
		l.note("  %s (by %q): %v (broken: %v)", c.name, c.by, errs[i], broken)
	}
	after := l.outcomes(changes, errs, broken || ends)
	if len(after) == 0 {
		l.fail("no order of the changes has these results, from\n%v", l.may[0])
	}
	l.may = after
	if broken {
		return false
	}
	l.recognize("after a step")
	l.tryPassword()
	if l.rng.IntN(12) == 0 {
		l.write()
	}
	return !l.disk.Crashed() && l.h.store.Err() == nil
}

// outcomes are the worlds that the changes lead to, in any order, with these results. A change that failed, for a reason that the model
// does not know, has not happened; if unknown it may have.
func (l *life) outcomes(changes []*change, errs []error, unknown bool) (all []*world) {
	var follow func(w *world, rest []int)
	follow = func(w *world, rest []int) {
		if len(rest) == 0 {
			all = append(all, w)
			return
		}
		for at, i := range rest {
			others := slices.Delete(slices.Clone(rest), at, at+1)
			next, err := l.apply(w, changes[i])
			switch kind := kindOf(errs[i]); {
			case kind == kindOf(err):
				follow(next, others)
			case kind == auth.ErrUnauthenticated.Error() && err == nil && changes[i].first != nil && len(changes) > 1:
				follow(w, others) // the password was replaced meanwhile, by itself: it has another hash
			case kind == failed:
				follow(w, others)
				if unknown && err == nil {
					follow(next, others)
				}
			}
		}
	}
	for _, w := range l.may {
		indexes := []int{0, 1}
		follow(w, indexes[:len(changes)])
	}
	return all
}

// fault makes something go wrong, until heal. ends says that the context of the changes ends early.
func (l *life) fault() (ctx context.Context, ends bool, heal func()) {
	ctx = context.Background()
	inject := func(r vfs.Rule) func() {
		r.Nth, r.Sticky = 1+l.rng.IntN(3), true
		l.note("fault of %v", r.Op)
		return l.faults.Inject(r).Remove
	}
	switch l.rng.IntN(16) {
	case 0:
		ctx, cancel := context.WithCancel(ctx)
		left := atomic.Int64{}
		left.Store(l.rng.Int64N(4))
		l.note("ends at operation %d", left.Load())
		if left.Load() == 0 {
			cancel()
		}
		l.disk.SetHook(func(vfs.Op, string) {
			if left.Add(-1) == 0 {
				cancel()
			}
		})
		return ctx, true, func() { l.disk.SetHook(nil); cancel() }
	case 1:
		ctx, cancel := context.WithTimeout(ctx, time.Duration(l.rng.IntN(300))*time.Microsecond)
		l.note("ends after a while")
		return ctx, true, cancel
	case 2:
		l.note("full")
		l.disk.SetCapacity(1)
		return ctx, false, func() { l.disk.SetCapacity(0) }
	case 3:
		return ctx, false, inject(vfs.Rule{Op: vfs.OpSyncData, Err: syscall.EIO, Fault: vfs.DiscardDirty})
	case 4:
		return ctx, false, inject(vfs.Rule{Op: vfs.OpWrite, Err: syscall.ENOSPC})
	case 5:
		l.note("crash soon")
		l.disk.CrashAt(l.disk.Mutations() + 1 + l.rng.Int64N(8))
	}
	return ctx, false, func() {}
}

// write writes data of clients, and merges the log.
func (l *life) write() {
	x, w := l.h.store.OwnSession(), &mvcc.Write{}
	for i := range 3 {
		w.Reset()
		w.Set([]byte{'k', byte(i)}, make([]byte, 60<<10))
		if _, err := x.Commit(context.Background(), w); err != nil {
			l.note("a write: %v", err)
		}
	}
	l.note("checkpoint: %v", l.h.store.Checkpoint(context.Background()))
}

func (l *life) identity(label string) auth.Identity {
	return auth.Identity{User: l.may[0].tokens[label].user, Method: auth.MethodToken, Token: hashToken(l.secret(label))}
}

func (l *life) secret(label string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.secrets[label]
}

func (l *life) permit(label string) func(*auth.Table) error {
	id := l.identity(label)
	return func(t *auth.Table) error {
		u, err := t.Verify(&id, l.now)
		if err != nil {
			return err
		}
		var f auth.Footprint
		f.Action(auth.ActionUsers)
		return u.Check(&f)
	}
}
