package enginetest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

var turmoilSeeds = flag.Int("turmoil.seeds", 12, "runs of TestTurmoil")

// TestTurmoil combines at random what other tests do one at a time: writes of every kind and size, bulk loads and checkpoints
// that are cancelled at any operation, snapshots that are read much later, a disk that becomes full and empty again, reads
// that fail for a while, or pages that are damaged, caches of other sizes, writes and syncs that fail, crashes at any operation,
// and restarts, in which operations fail, too. One goroutine does it, so a map tells what each read must find, and the log must
// have every commit from its oldest epoch on. Of a write that a crash ended, all or nothing is there. A write with a request id
// that is sent again is known until the cut-off has passed it.
func TestTurmoil(t *testing.T) {
	base := testseed.Base(t)
	total := map[string]int{}
	for run := range uint64(max(1, *turmoilSeeds/exhaustiveStep)) {
		if !t.Run(fmt.Sprint("seed ", base+run), func(t *testing.T) { turmoil(t, base+run, total) }) {
			t.FailNow()
		}
	}
	t.Log(total)
	for _, what := range []string{"put", "bulk load", "bulk load ended", "refused", "crash", "restart", "checkpoint ended", "shortage", "read fault"} {
		if total[what] == 0 && *turmoilSeeds >= 200*exhaustiveStep {
			t.Errorf("no %s: this tests nothing", what)
		}
	}
}

const (
	turmoilKeys = 300
	traceLength = 40 // steps that are printed after a failure
)

// uproar is one run.
type uproar struct {
	t            *testing.T
	rng          *rand.Rand
	mem          *vfs.Mem
	faulty       *vfs.Faulty
	o            mvcc.Options
	s            *mvcc.Store // nil when a damaged page has kept it from starting
	x            *session
	want         map[string]string
	pinned       []*pinnedState
	faults       bool          // reads failed: DATA_LOSS is possible
	failing      bool          // operations that change something fail
	rule         *vfs.Injected // a write that fails, or nil
	total        map[string]int
	flips        int
	trace        []string
	acknowledged []keys.Epoch      // of puts
	requests     []madeRequest     // those of puts that had an id
	maybe        map[string]string // the state if what was under way happened; nil if nothing was
}

// pinnedState is a snapshot and what it must show.
type pinnedState struct {
	x    *session
	want map[string]string
}

func turmoil(t *testing.T, seed uint64, total map[string]int) {
	u := &uproar{t: t, rng: rand.New(rand.NewPCG(seed, 77)), mem: vfs.NewMem(), want: map[string]string{}, total: total}
	t.Cleanup(u.printTrace)
	u.o = modelOptions(nil)
	u.o.Storage.PageSize = []int{512, 512, 1024, 8192}[u.rng.IntN(4)]
	u.o.Storage.DiskReserve = storage.DiskReserveDerived
	u.o.Storage.MemoryBytes, u.o.Storage.StallMax = 8<<20, 200*time.Millisecond
	u.o.Storage.FeatureLevel = keys.FeatureLevel(1 + u.rng.IntN(2))
	if u.rng.IntN(2) == 0 {
		u.o.Storage.ChangeLog = storage.ChangeLog{Age: time.Hour, Bytes: 200 << 10}
	}
	if u.rng.IntN(2) == 0 {
		u.o.RequestWindow = time.Duration(1+u.rng.IntN(100)) * time.Millisecond
	}
	u.mem.SetCapacity(256 << 20)
	u.start()
	u.failing = u.rng.IntN(2) == 0
	withFaults := u.rng.IntN(3) == 0
	for step := range 120 {
		u.step(withFaults)
		if u.s == nil {
			return
		}
		if t.Failed() {
			t.Fatalf("step %d", step)
		}
	}
	u.mem.SetCapacity(256 << 20)
	if u.rule != nil {
		u.rule.Remove()
		u.crash() // its failure may be final
	}
	if u.s != nil {
		u.check()
		u.goesOn()
		u.stop()
		u.checkFiles()
	}
}

// start opens the store, sometimes after an attempt during which an operation fails, or the machine crashes.
func (u *uproar) start() {
	u.t.Helper()
	u.rule = nil
	for attempt := u.rng.IntN(4); ; attempt++ {
		u.faulty = vfs.NewFaulty(u.mem)
		u.o.Storage.FS = u.faulty
		switch {
		case attempt == 0 && u.failing:
			rule := u.failure()
			u.tracef("start with %+v", rule)
			u.faulty.Inject(rule)
		case attempt <= 1:
			u.mem.CrashAt(u.mem.Mutations() + 1 + u.rng.Int64N(40))
		}
		s, err := mvcc.Open(u.o)
		if err == nil && s.Err() == nil && attempt > 1 {
			u.s, u.x = s, mustSession(u.t, s)
			return
		}
		if err == nil {
			_ = s.Close()
		} else if attempt > 1 && u.flips > 0 && asDamage(err) {
			u.total["refused to start"]++
			u.tracef("%v", err)
			u.s = nil
			return
		} else if attempt > 1 {
			u.t.Fatalf("open: %v", err)
		}
		u.total["start again"]++
		u.tracef("start again after %v", err)
		u.mem = u.mem.Crash(u.rng.Uint64(), u.survival())
		u.mem.SetCapacity(256 << 20)
	}
}

// survival is which of the unsynced changes is left.
func (u *uproar) survival() vfs.Survival {
	return []vfs.Survival{vfs.SurviveSome, vfs.SurviveSome, vfs.SurviveNone, vfs.SurviveAll, vfs.SurviveProcess}[u.rng.IntN(5)]
}

// failure lets one of the next operations that change something fail.
func (u *uproar) failure() vfs.Rule {
	ops := []vfs.Op{vfs.OpWrite, vfs.OpSync | vfs.OpSyncData, vfs.OpPreallocate, vfs.OpCreate | vfs.OpOpen, vfs.OpTruncate | vfs.OpRename | vfs.OpRemove | vfs.OpSyncDir, vfs.OpMutating}
	names := []string{"*.log", "data.ekv", "bulk-*", "reserve-*", "*"}
	rule := vfs.Rule{
		Op: ops[u.rng.IntN(len(ops))], Name: names[u.rng.IntN(len(names))], Nth: 1 + u.rng.IntN(25),
		Err: vfs.Errnos()[u.rng.IntN(len(vfs.Errnos()))], Bytes: u.rng.IntN(5000),
	}
	switch rule.Op {
	case vfs.OpWrite:
		rule.Fault = []vfs.Fault{vfs.Fail, vfs.Short, vfs.Torn}[u.rng.IntN(3)]
	case vfs.OpSync | vfs.OpSyncData:
		rule.Fault = []vfs.Fault{vfs.Fail, vfs.DiscardDirty}[u.rng.IntN(2)]
	}
	return rule
}

// tracef notes what happened: a seed does not quite repeat its run, because the store has goroutines of its own.
func (u *uproar) tracef(format string, args ...any) {
	u.trace = append(u.trace, fmt.Sprintf(format, args...))
}

func (u *uproar) printTrace() {
	if u.t.Failed() {
		u.t.Logf("last steps:\n%s", strings.Join(u.trace[max(0, len(u.trace)-traceLength):], "\n"))
	}
}

// flip damages a page.
func (u *uproar) flip() {
	pages := len(readFile(u.t, u.mem, dataFile)) / u.o.Storage.PageSize
	if pages < 4 {
		return
	}
	u.flips++
	u.total["flip"]++
	u.faults = true
	at := int64((2+u.rng.IntN(pages-2))*u.o.Storage.PageSize + u.rng.IntN(u.o.Storage.PageSize))
	flip(u.t, u.mem, at)
	u.tracef("flip at page %d", at/int64(u.o.Storage.PageSize))
}

func (u *uproar) endSessions() {
	for _, p := range u.pinned {
		p.x.Close()
	}
	u.pinned = nil
	u.x.Close()
}

func (u *uproar) stop() {
	u.t.Helper()
	u.endSessions()
	if err := u.s.Close(); err != nil && !(u.flips > 0 && asDamage(err)) {
		u.t.Fatalf("close: %v", err)
	}
}

// crash goes on with what a crash of the machine, or the end of the process, left.
func (u *uproar) crash() {
	u.t.Helper()
	u.total["crash"]++
	u.tracef("crash, the store says %v", u.s.Err())
	left := u.mem.Crash(u.rng.Uint64(), u.survival())
	u.endSessions()
	_ = u.s.Close() // it has crashed
	u.mem = left
	u.mem.SetCapacity(256 << 20)
	if u.start(); u.s == nil {
		return
	}
	if u.maybe != nil && u.happened(u.maybe) {
		u.want = u.maybe
	}
	u.maybe = nil
	u.check()
	u.checkLog()
}

func (u *uproar) keyOf(i int) string { return fmt.Sprintf("key-%03d", i) }

func (u *uproar) value() string {
	sizes := []int{0, 1, 40, 100, 118, 119, 120, 121, 470, 512, 1000, 2500, 9000}
	return fmt.Sprintf("%016x", u.rng.Uint64()) + strings.Repeat("v", sizes[u.rng.IntN(len(sizes))]+u.rng.IntN(4))
}

// step does one thing, sometimes up to an operation at which the machine crashes.
func (u *uproar) step(withFaults bool) {
	crashes := u.rng.IntN(12) == 0
	if u.rule != nil && u.rng.IntN(3) == 0 {
		u.rule.Remove()
		u.rule = nil
	}
	if crashes {
		u.mem.CrashAt(u.mem.Mutations() + 1 + u.rng.Int64N(60))
	}
	switch n := u.rng.IntN(100); {
	case n < 38:
		u.write()
		u.repeat()
	case n < 46:
		u.deleteRange()
	case n < 56:
		u.bulkLoad()
	case n < 70:
		u.checkpoint()
	case n < 76:
		u.pin()
	case n < 78:
		u.resize()
	case n < 79:
		u.upgrade()
	case n < 88:
		u.squeeze()
	case n < 90 && withFaults && !crashes:
		u.failReads()
	case n < 94 && !crashes && u.rule == nil:
		u.total["restart"]++
		u.stop()
		if withFaults && u.rng.IntN(2) == 0 {
			u.flip()
		}
		if u.start(); u.s != nil {
			u.checkLog()
		}
	case u.rule == nil && u.failing:
		rule := u.failure()
		u.tracef("%+v", rule)
		u.rule = u.faulty.Inject(rule)
	}
	if u.s == nil {
		return
	}
	if crashes || u.mem.Crashed() || u.s.Err() != nil {
		u.crash()
		return
	}
	if u.rng.IntN(4) == 0 {
		u.check()
	}
}

// ended records the outcome of a write: it happened, was refused, or a crash ended it.
func (u *uproar) ended(what string, err error, next map[string]string) {
	u.t.Helper()
	u.tracef("%s at %d: %v", what, u.s.Visible(), err)
	switch {
	case err == nil:
		u.total[what]++
		u.want = next
	case u.mem.Crashed(), u.s.Err() != nil:
		u.maybe = next
	case u.rule != nil && u.rule.Fired() > 0:
		u.total["faulted"]++
	case errors.Is(err, vfs.ErrNoSpace), errors.Is(err, storage.ErrMemoryFull), errors.Is(err, storage.ErrNoSegment), errors.Is(err, storage.ErrReserveUnchecked):
		u.total["refused"]++
	case errors.Is(err, context.Canceled):
		u.total[what+" ended"]++
	case u.faults && asDamage(err):
		u.total["damaged"]++
	case errors.As(err, new(*mvcc.RequestExpiredError)): // it waited longer than the window
		u.total["refused"]++
	default:
		u.t.Fatalf("%s: %v", what, err)
	}
}

func (u *uproar) write() {
	u.t.Helper()
	for range 1 + u.rng.IntN(12) {
		next, w := maps.Clone(u.want), mvcc.Write{Durability: mvcc.DurabilitySync}
		for k := range 1 + u.rng.IntN(1+u.rng.IntN(20)) {
			key := u.keyOf((u.rng.IntN(turmoilKeys)/20 + k) % turmoilKeys)
			if u.rng.IntN(2) == 0 {
				key = u.keyOf(u.rng.IntN(turmoilKeys))
			}
			if _, twice := next["+"+key]; twice {
				continue
			}
			next["+"+key] = ""
			if u.rng.IntN(4) == 0 {
				w.Delete([]byte(key))
				delete(next, key)
			} else {
				v := u.value()
				w.Set([]byte(key), []byte(v))
				next[key] = v
			}
		}
		maps.DeleteFunc(next, func(k, _ string) bool { return k[0] == '+' })
		id := u.identify(&w)
		epoch, err := commitAndWait(u.x, &w)
		if u.ended("put", err, next); err == nil {
			u.acknowledged = append(u.acknowledged, epoch)
			if id != nil {
				u.requests = append(u.requests, madeRequest{*id, epoch})
			}
		}
		if err != nil {
			return
		}
	}
}

func (u *uproar) deleteRange() {
	u.t.Helper()
	lower := u.keyOf(u.rng.IntN(turmoilKeys))
	upper := lower + "z"
	if u.rng.IntN(3) > 0 {
		upper = u.keyOf(u.rng.IntN(turmoilKeys))
	}
	if upper <= lower {
		lower, upper = upper, lower+"a"
	}
	next := maps.Clone(u.want)
	maps.DeleteFunc(next, func(k, _ string) bool { return k >= lower && k < upper })
	out, err := u.x.DeleteRange(context.Background(), mvcc.RangeDelete{Lower: []byte(lower), Upper: []byte(upper), Durability: mvcc.DurabilitySync})
	if err == nil {
		err = u.s.Wait(context.Background(), out.Epoch, mvcc.DurabilitySync)
	}
	u.ended("range delete", err, next)
}

// cancelling returns a context that ends, one time in three, at one of the next operations of the file system.
func (u *uproar) cancelling() (ctx context.Context, done func()) {
	ctx, cancel := context.WithCancel(context.Background())
	if u.rng.IntN(3) > 0 {
		return ctx, cancel
	}
	var left atomic.Int64
	left.Store(1 + u.rng.Int64N(80))
	u.mem.SetHook(func(_ vfs.Op, name string) {
		if strings.HasSuffix(name, ".ekv") || strings.Contains(name, "bulk-") {
			if left.Add(-1) == 0 {
				cancel()
			}
		}
	})
	return ctx, func() {
		u.mem.SetHook(nil)
		cancel()
	}
}

func (u *uproar) bulkLoad() {
	u.t.Helper()
	ctx, done := u.cancelling()
	defer done()
	next, from, step := maps.Clone(u.want), u.rng.IntN(turmoilKeys), 1+u.rng.IntN(5)
	l, err := u.s.BeginBulkLoad()
	if err != nil {
		u.ended("bulk load", err, nil)
		return
	}
	for range 1 + u.rng.IntN(1+u.rng.IntN(150)) {
		if err == nil {
			key, value := u.keyOf(from%turmoilKeys), u.value()
			next[key] = value
			err = l.Add([]byte(key), []byte(value))
		}
		from += step
	}
	if err == nil {
		_, err = l.Commit(ctx)
	}
	if failed := l.Close(); failed != nil && !u.mem.Crashed() && u.rule == nil {
		u.t.Errorf("the bulk load does not close: %v", failed)
	}
	u.ended("bulk load", err, next)
}

func (u *uproar) checkpoint() {
	u.t.Helper()
	ctx, done := u.cancelling()
	defer done()
	u.ended("checkpoint", u.s.Checkpoint(ctx), u.want)
}

// pin opens a snapshot, or ends one.
func (u *uproar) pin() {
	u.t.Helper()
	if len(u.pinned) > 2 || len(u.pinned) > 0 && u.rng.IntN(3) == 0 {
		i := u.rng.IntN(len(u.pinned))
		u.pinned[i].x.Close()
		u.pinned = slices.Delete(u.pinned, i, i+1)
		return
	}
	p := &pinnedState{mustSession(u.t, u.s), u.want}
	if _, err := p.x.OpenSnapshot(0); err != nil {
		u.t.Fatal(err)
	}
	u.pinned = append(u.pinned, p)
}

func (u *uproar) resize() {
	if _, err := u.s.ResizeCache(int64(16*u.o.Storage.PageSize + u.rng.IntN(1500<<10))); err != nil {
		u.t.Fatal(err)
	}
}

// upgrade raises the feature level of a store that was made at the oldest one.
func (u *uproar) upgrade() {
	u.t.Helper()
	ctx, done := u.cancelling()
	defer done()
	_, err := u.s.FinalizeUpgrade(ctx)
	u.ended("upgrade", err, u.want)
}

// squeeze lets other programs take the disk, or give it back.
func (u *uproar) squeeze() {
	if u.s.Shortage() != nil {
		u.total["shortage"]++
	}
	if u.rng.IntN(3) == 0 {
		u.mem.SetCapacity(256 << 20)
		return
	}
	u.mem.SetCapacity(256 << 20)
	free, err := u.mem.Free("db")
	if err == nil {
		u.mem.SetCapacity(256<<20 - free + u.rng.Int64N(300<<10))
	}
}

// failReads lets the data file be unreadable for one checkpoint.
func (u *uproar) failReads() {
	u.faults = true
	u.total["read fault"]++
	rule := u.faulty.Inject(vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Nth: 1 + u.rng.IntN(20), Sticky: true, Err: syscall.EIO})
	err := u.s.Checkpoint(context.Background())
	rule.Remove()
	u.ended("checkpoint", err, u.want)
}
