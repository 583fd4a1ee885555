package sim

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/lease"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

var commotionSeeds = flag.Int("commotion.seeds", 6, "runs of TestCommotion")

// TestCommotion lets several clients do at once everything that a store offers: writes of both durabilities, operations that
// compute, deletions of ranges, transactions of both levels with savepoints, requests with ids that are repeated at once and
// later, deadlines, leases and locks, snapshots, reads of the past, holds, bulk loads and checkpoints that are cancelled. Contexts
// end at any moment, the wall clock jumps, operations of the file system fail, and the machine crashes at any of them. The ledger
// says what each client must have seen.
func TestCommotion(t *testing.T) {
	base, total := testseed.Base(t), &tally{counts: map[string]int{}}
	for run := range uint64(*commotionSeeds) {
		if !t.Run(fmt.Sprint("seed ", base+run), func(t *testing.T) { commotionOf(t, base+run, total) }) {
			t.FailNow()
		}
	}
	t.Log(total.counts)
}

// tally counts what happened.
type tally struct {
	mu     sync.Mutex
	counts map[string]int
}

func (c *tally) add(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts[what]++
}

// commotion is one run.
type commotion struct {
	t      *testing.T
	rng    *rand.Rand // of the goroutine of the test
	total  *tally
	mem    *vfs.Mem
	faulty *vfs.Faulty
	o      mvcc.Options
	s      *mvcc.Store
	leases *lease.Manager
	ledger *ledger

	opened   keys.Epoch // what was visible when the store was opened
	jumps    bool
	failing  bool
	reads    bool // reads of the data file fail, too
	wall     atomic.Int64
	rule     *vfs.Injected // a fault of this run of the store, or nil
	leaseRun sync.WaitGroup
	leaseEnd context.CancelFunc

	mu    sync.Mutex
	trace []string
}

func commotionOf(t *testing.T, seed uint64, total *tally) {
	c := &commotion{t: t, rng: rand.New(rand.NewPCG(seed, 99)), total: total, mem: vfs.NewMem(), ledger: newLedger()}
	c.o = tiny(nil)
	c.o.Storage.PageSize = []int{512, 1024, 8192}[c.rng.IntN(3)]
	c.o.Storage.MemoryBytes, c.o.Storage.StallMax = 8<<20, 300*time.Millisecond
	c.o.Storage.FeatureLevel = keys.FeatureLevel(1 + c.rng.IntN(2))
	if c.rng.IntN(2) == 0 {
		c.o.Storage.DiskReserve = storage.DiskReserveDerived
	}
	c.o.SyncInterval = []time.Duration{time.Millisecond, 20 * time.Millisecond, time.Hour}[c.rng.IntN(3)]
	c.o.Retention = []time.Duration{0, 0, 30 * time.Millisecond, time.Hour}[c.rng.IntN(4)]
	c.o.RequestWindow = []time.Duration{0, 200 * time.Millisecond}[c.rng.IntN(2)]
	c.o.CheckpointInterval = []time.Duration{0, 20 * time.Millisecond}[c.rng.IntN(2)]
	c.o.WallClock = func() time.Time { return time.Now().Add(time.Duration(c.wall.Load())) }
	c.jumps, c.failing, c.reads = c.rng.IntN(3) == 0, c.rng.IntN(2) == 0, c.rng.IntN(4) == 0
	c.mem.SetCapacity(256 << 20)
	c.tracef("level %d, jumps %v, retention %v, sync %v, window %v", c.o.Storage.FeatureLevel, c.jumps, c.o.Retention, c.o.SyncInterval, c.o.RequestWindow)
	defer c.printTrace()
	c.start()
	for range 4 {
		c.round()
		if t.Failed() {
			return
		}
	}
	c.stop()
}

// elapsed is the time of leases, which runs faster, so that they end.
func (c *commotion) elapsed() time.Duration { return 20 * time.Since(c.ledger.started) }

func (c *commotion) tracef(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.trace = append(c.trace, fmt.Sprintf(format, args...))
}

func (c *commotion) printTrace() {
	if c.t.Failed() {
		c.t.Logf("last steps:\n%s", strings.Join(c.trace[max(0, len(c.trace)-60):], "\n"))
	}
}

// start opens the store, sometimes after attempts during which an operation fails or the machine crashes.
func (c *commotion) start() {
	c.t.Helper()
	newest := keys.MaxEpoch
	for attempt := c.rng.IntN(4); ; attempt++ {
		c.faulty = vfs.NewFaulty(c.mem)
		c.o.Storage.FS = c.faulty
		switch {
		case attempt == 0 && c.failing:
			c.faulty.Inject(c.failure(vfs.OpMutating))
		case attempt <= 1:
			c.mem.CrashAt(c.mem.Mutations() + 1 + c.rng.Int64N(40))
		}
		s, err := mvcc.Open(c.o)
		if err == nil {
			newest = min(newest, c.recovered(s))
		}
		if err == nil && s.Err() == nil && attempt > 1 {
			c.begin(s, newest)
			return
		}
		c.tracef("an attempt to start: %v", err)
		if err == nil {
			_ = s.Close()
		} else if attempt > 1 {
			c.t.Fatalf("open: %v", err)
		}
		c.crashDisk()
	}
}

// recovered is the newest commit of the run before that is there: an attempt to start that failed may have recovered less than all, and
// then its epochs are skipped, too.
func (c *commotion) recovered(s *mvcc.Store) keys.Epoch {
	newest := s.Recovery().Epoch
	for _, r := range s.Recovery().Skipped {
		if r.Last > c.opened {
			newest = min(newest, r.First-1)
		}
	}
	return newest
}

func (c *commotion) crashDisk() {
	c.mem = c.mem.Crash(c.rng.Uint64(), []vfs.Survival{vfs.SurviveSome, vfs.SurviveSome, vfs.SurviveNone, vfs.SurviveAll, vfs.SurviveProcess}[c.rng.IntN(5)])
	c.mem.SetCapacity(256 << 20)
}

// failure lets one of the next operations fail.
func (c *commotion) failure(every vfs.Op) vfs.Rule {
	ops := []vfs.Op{vfs.OpWrite, vfs.OpSync | vfs.OpSyncData, vfs.OpPreallocate, vfs.OpCreate | vfs.OpOpen, vfs.OpTruncate | vfs.OpRename | vfs.OpRemove | vfs.OpSyncDir, every}
	names := []string{"*.log", "data.ekv", "bulk-*", "*"}
	rule := vfs.Rule{
		Op: ops[c.rng.IntN(len(ops))], Name: names[c.rng.IntN(len(names))], Nth: 1 + c.rng.IntN(150),
		Err: vfs.Errnos()[c.rng.IntN(len(vfs.Errnos()))], Bytes: c.rng.IntN(5000),
	}
	switch rule.Op {
	case vfs.OpWrite:
		rule.Fault = []vfs.Fault{vfs.Fail, vfs.Short, vfs.Torn}[c.rng.IntN(3)]
	case vfs.OpSync | vfs.OpSyncData:
		rule.Fault = []vfs.Fault{vfs.Fail, vfs.DiscardDirty}[c.rng.IntN(2)]
	}
	return rule
}

// begin serves with a store that was opened: it checks what the start has recovered.
func (c *commotion) begin(s *mvcc.Store, newest keys.Epoch) {
	c.t.Helper()
	c.s = s
	defer func() { c.opened = s.Visible() }()
	c.tracef("open: recovered %d, next %d, visible %d", s.Recovery().Epoch, s.Recovery().Next, s.Visible())
	c.ledger.crash(c.survived(newest))
	if c.o.Retention == time.Hour && c.rng.IntN(2) == 0 {
		s.HoldBulkLoads(true)
	}
	manager, err := lease.Open(context.Background(), s, lease.Options{Elapsed: c.elapsed, Grace: time.Millisecond, Keys: 40})
	if err != nil {
		c.t.Fatal(err)
	}
	c.leases = manager
	ctx, cancel := context.WithCancel(context.Background())
	c.leaseEnd = cancel
	c.leaseRun.Go(func() { manager.Run(ctx) })
	c.compareAll()
	if err := c.ledger.verify(); err != nil {
		c.t.Fatal(err)
	}
}

// survived is the newest commit that is there, which the state tells, too: it is that after some commit.
func (c *commotion) survived(newest keys.Epoch) keys.Epoch {
	c.t.Helper()
	x, err := c.s.Session()
	if err != nil {
		c.t.Fatal(err)
	}
	defer x.Close()
	got := map[string]sight{}
	if _, err := x.OpenSnapshot(0); err != nil {
		c.t.Fatal(err)
	}
	cur, err := x.Scan(mvcc.ScanOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	defer cur.Close()
	for cur.Next() {
		got[string(cur.Key())] = sight{value: string(cur.Value()), epoch: cur.Epoch()}
	}
	if cur.Err() != nil {
		c.t.Fatal(cur.Err())
	}
	c.ledger.mu.Lock()
	defer c.ledger.mu.Unlock()
	s := c.ledger.states()
	all := slices.Sorted(maps.Keys(c.ledger.commits))
	var why error
	all = append(append([]keys.Epoch{0}, all...), keys.MaxEpoch)
	for i := len(all) - 2; i >= 0; i-- {
		e := all[i]
		if e > newest {
			continue
		}
		err := s.equal(got, e)
		if err == nil {
			return min(newest, all[i+1]-1)
		}
		if why == nil {
			why = err
		}
		if e < c.ledger.promised {
			break
		}
	}
	c.t.Fatalf("the state after the start is that of no epoch from %d (%s) to %d: %v", c.ledger.promised, c.ledger.promiser, newest, why)
	return 0
}

// compareAll compares the newest state and the outcomes of all requests.
func (c *commotion) compareAll() {
	c.t.Helper()
	w := &actor{commotion: c, rng: c.rng, ctx: context.Background()}
	defer w.endSessions()
	w.open()
	if w.x == nil {
		c.t.Fatal("no session")
	}
	w.scanAll(0)
	for _, r := range maps.Clone(c.ledger.requests) {
		w.outcome(r)
	}
}

// round is one run of the store: it ends by a crash or not.
func (c *commotion) round() {
	c.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	crashes := c.rng.IntN(3) > 0
	if c.rule = nil; c.failing && c.rng.IntN(2) == 0 {
		every := vfs.OpMutating
		if c.reads {
			every = vfs.OpRead
		}
		rule := c.failure(every)
		c.tracef("%+v", rule)
		c.rule = c.faulty.Inject(rule)
	}
	if crashes && c.rng.IntN(3) > 0 {
		c.mem.CrashAt(c.mem.Mutations() + 1 + c.rng.Int64N(600))
	}
	var clients sync.WaitGroup
	for n := range 4 {
		w := &actor{commotion: c, rng: rand.New(rand.NewPCG(c.rng.Uint64(), uint64(n))), ctx: ctx, n: n}
		clients.Go(func() {
			defer w.endSessions()
			for range 60 {
				if !w.step() {
					return
				}
			}
		})
	}
	var operator sync.WaitGroup
	operator.Go(func() {
		w := &actor{commotion: c, rng: rand.New(rand.NewPCG(c.rng.Uint64(), 100)), ctx: ctx}
		defer w.endSessions()
		for w.operate() && ctx.Err() == nil {
			time.Sleep(time.Duration(w.rng.IntN(3000)) * time.Microsecond)
		}
	})
	clients.Wait()
	cancel()
	operator.Wait()
	c.leaseEnd()
	c.leaseRun.Wait()
	if err := c.ledger.verify(); err != nil {
		c.t.Fatal(err)
	}
	c.end(crashes)
	if !c.t.Failed() {
		c.start()
	}
}

// end ends the store. A store that has failed cannot go on.
func (c *commotion) end(crashes bool) {
	c.t.Helper()
	if crashes || c.mem.Crashed() || c.s.Err() != nil {
		c.total.add("crash")
		c.tracef("crash; the store says %v", c.s.Err())
		s := c.s
		c.crashDisk()
		_ = s.Close()
		return
	}
	c.total.add("restart")
	e := c.s.Visible()
	if err := c.s.Close(); err != nil && c.rule == nil {
		c.t.Fatalf("close: %v", err)
	} else if err == nil {
		c.ledger.promise(min(e, c.newest()), "close")
		return
	}
	c.crashDisk()
}

// newest is the newest commit of a client.
func (c *commotion) newest() keys.Epoch {
	c.ledger.mu.Lock()
	defer c.ledger.mu.Unlock()
	if len(c.ledger.commits) == 0 {
		return 0
	}
	return slices.Max(slices.Collect(maps.Keys(c.ledger.commits)))
}

func (c *commotion) stop() {
	c.leaseEnd()
	c.leaseRun.Wait()
	if err := c.s.Close(); err != nil && c.rule == nil {
		c.t.Error(err)
	}
}

// over reports whether the store, or its disk, has ended.
func (c *commotion) over() bool { return c.mem.Crashed() || c.s.Err() != nil }

// expected reports whether an operation may have failed so.
func (c *commotion) expected(err error) bool {
	var short *storage.ShortageError
	switch {
	case c.over():
		return true
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return true
	case errors.Is(err, storage.ErrMemoryFull), errors.Is(err, storage.ErrNoSegment), errors.Is(err, storage.ErrReserveUnchecked), errors.As(err, &short):
		return true
	case errors.Is(err, storage.ErrDamaged):
		return c.reads && c.rule != nil && c.rule.Fired() > 0
	}
	var errno syscall.Errno
	return errors.As(err, &errno) && c.rule != nil && c.rule.Fired() > 0
}
