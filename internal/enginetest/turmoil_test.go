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
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

var turmoilSeeds = flag.Int("turmoil.seeds", 12, "runs of TestTurmoil")

// TestTurmoil combines at random what other tests do one at a time: writes of every kind and size, bulk loads and checkpoints
// that are cancelled at any operation, snapshots that are read much later, a disk that becomes full and empty again, reads
// that fail for a while, caches of other sizes, crashes at any operation, and restarts. One goroutine does it, so a map tells
// what each read must find. Of a write that a crash ended, all or nothing is there.
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
		if total[what] == 0 && *turmoilSeeds >= 12*exhaustiveStep {
			t.Errorf("no %s: this tests nothing", what)
		}
	}
}

const turmoilKeys = 300

// uproar is one run.
type uproar struct {
	t      *testing.T
	rng    *rand.Rand
	mem    *vfs.Mem
	faulty *vfs.Faulty
	o      mvcc.Options
	s      *mvcc.Store
	x      *session
	want   map[string]string
	pinned []*pinnedState
	faults bool // reads failed: DATA_LOSS is possible
	total  map[string]int
	maybe  map[string]string // the state if what was under way happened; nil if nothing was
}

// pinnedState is a snapshot and what it must show.
type pinnedState struct {
	x    *session
	want map[string]string
}

func turmoil(t *testing.T, seed uint64, total map[string]int) {
	u := &uproar{t: t, rng: rand.New(rand.NewPCG(seed, 77)), mem: vfs.NewMem(), want: map[string]string{}, total: total}
	u.mem.SetCapacity(256 << 20)
	u.start()
	withFaults := u.rng.IntN(3) == 0
	for step := range 120 {
		u.step(withFaults)
		if t.Failed() {
			t.Fatalf("step %d", step)
		}
	}
	u.mem.SetCapacity(256 << 20)
	u.check()
	u.stop()
	if u.faults {
		got, _ := mustSalvage(t, u.mem)
		if err := equalMaps(u.want, got); err != nil {
			t.Errorf("salvage: %v", err)
		}
		return
	}
	verifyFiles(t, u.o)
}

func (u *uproar) start() {
	u.t.Helper()
	u.faulty = vfs.NewFaulty(u.mem)
	u.o = modelOptions(u.faulty)
	u.o.Storage.DiskReserve = storage.DiskReserveDerived
	u.o.Storage.MemoryBytes = 8 << 20
	s, err := mvcc.Open(u.o)
	if err != nil {
		u.t.Fatalf("open: %v", err)
	}
	u.s, u.x = s, mustSession(u.t, s)
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
	if err := u.s.Close(); err != nil {
		u.t.Fatalf("close: %v", err)
	}
}

// crash goes on with what a crash of the machine, or the end of the process, left.
func (u *uproar) crash() {
	u.t.Helper()
	u.total["crash"]++
	left := u.mem.Crash(u.rng.Uint64(), []vfs.Survival{vfs.SurviveSome, vfs.SurviveSome, vfs.SurviveNone, vfs.SurviveAll, vfs.SurviveProcess}[u.rng.IntN(5)])
	u.endSessions()
	_ = u.s.Close() // it has crashed
	u.mem = left
	u.mem.SetCapacity(256 << 20)
	u.start()
	if u.maybe != nil && u.happened(u.maybe) {
		u.want = u.maybe
	}
	u.maybe = nil
	u.check()
}

// happened reports whether a key that next changes has its new value. Keys that cannot be read do not tell.
func (u *uproar) happened(next map[string]string) bool {
	for i := range turmoilKeys {
		key := u.keyOf(i)
		before, was := u.want[key]
		after, is := next[key]
		if was == is && before == after {
			continue
		}
		if v, err := u.x.Get(nil, []byte(key), 0); err == nil {
			return v.Found == is && string(v.Data) == after
		}
	}
	return false
}

func (u *uproar) keyOf(i int) string { return fmt.Sprintf("key-%03d", i) }

func (u *uproar) value() string {
	sizes := []int{0, 1, 40, 100, 118, 119, 120, 121, 470, 512, 1000, 2500, 9000}
	return fmt.Sprintf("%016x", u.rng.Uint64()) + strings.Repeat("v", sizes[u.rng.IntN(len(sizes))]+u.rng.IntN(4))
}

// step does one thing, sometimes up to an operation at which the machine crashes.
func (u *uproar) step(withFaults bool) {
	crashes := u.rng.IntN(12) == 0
	if crashes {
		u.mem.CrashAt(u.mem.Mutations() + 1 + u.rng.Int64N(60))
	}
	switch n := u.rng.IntN(100); {
	case n < 45:
		u.write()
	case n < 55:
		u.deleteRange()
	case n < 65:
		u.bulkLoad()
	case n < 80:
		u.checkpoint()
	case n < 86:
		u.pin()
	case n < 89:
		u.resize()
	case n < 94:
		u.squeeze()
	case n < 96 && withFaults && !crashes:
		u.failReads()
	case n < 98 && !crashes:
		u.total["restart"]++
		u.stop()
		u.start()
	default:
	}
	if crashes || u.mem.Crashed() {
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
	switch {
	case err == nil:
		u.total[what]++
		u.want = next
	case u.mem.Crashed():
		u.maybe = next
	case errors.Is(err, vfs.ErrNoSpace), errors.Is(err, storage.ErrMemoryFull), errors.Is(err, storage.ErrNoSegment), errors.Is(err, storage.ErrReserveUnchecked):
		u.total["refused"]++
	case errors.Is(err, context.Canceled):
		u.total[what+" ended"]++
	case u.faults && asDamage(err):
		u.total["damaged"]++
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
		_, err := commitAndWait(u.x, &w)
		u.ended("put", err, next)
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
	left := 1 + u.rng.IntN(80)
	u.mem.SetHook(func(_ vfs.Op, name string) {
		if strings.HasSuffix(name, ".ekv") || strings.Contains(name, "bulk-") {
			if left--; left == 0 {
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
	if failed := l.Close(); failed != nil && !u.mem.Crashed() {
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
	if _, err := u.s.ResizeCache(int64(16+u.rng.IntN(3000)) * 512); err != nil {
		u.t.Fatal(err)
	}
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

// check compares the store and its snapshots with what they must show.
func (u *uproar) check() {
	u.t.Helper()
	for _, p := range append(slices.Clone(u.pinned), &pinnedState{u.x, u.want}) {
		got, err := u.state(p.x, u.rng.IntN(2) == 0)
		if err == nil {
			err = equalMaps(p.want, got)
		}
		if err != nil && !(u.faults && asDamage(err)) {
			u.t.Fatalf("snapshot at %d: %v", p.x.at, err)
		}
		if u.faults && p.x != u.x {
			u.checkGets(p)
		}
	}
	if u.faults {
		if _, err := u.x.OpenSnapshot(0); err != nil {
			u.t.Fatal(err)
		}
		u.checkGets(&pinnedState{u.x, u.want})
		u.x.CloseSnapshot()
		return
	}
	if u.rng.IntN(3) > 0 {
		return
	}
	report, err := u.s.Verify(context.Background(), inspect.VerifyOptions{})
	if err != nil {
		u.t.Fatal(err)
	}
	mustBeSound(u.t, report)
}

// checkGets reads each key alone: other keys may be on pages that could not be read.
func (u *uproar) checkGets(p *pinnedState) {
	u.t.Helper()
	for i := range turmoilKeys {
		key := u.keyOf(i)
		want, is := p.want[key]
		err := p.x.ReadAll(context.Background(), [][]byte{[]byte(key)}, func(_ int, v mvcc.Value) error {
			if v.Found != is || string(v.Data) != want {
				return fmt.Errorf("%v %.30q, want %v %.30q", v.Found, v.Data, is, want)
			}
			return nil
		})
		if err != nil && !asDamage(err) {
			u.t.Fatalf("%s at %d: %v", key, p.x.at, err)
		}
	}
}

// state reads everything.
func (u *uproar) state(x *session, reverse bool) (map[string]string, error) {
	if x == u.x {
		if _, err := x.OpenSnapshot(0); err != nil {
			return nil, err
		}
		defer func() { x.CloseSnapshot(); x.at = 0 }()
	}
	c, err := x.Scan(mvcc.ScanOptions{Reverse: reverse})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	all := map[string]string{}
	for c.Next() {
		if _, twice := all[string(c.Key())]; twice {
			return nil, fmt.Errorf("%q comes twice", c.Key())
		}
		all[string(c.Key())] = string(c.Value())
	}
	return all, c.Err()
}
