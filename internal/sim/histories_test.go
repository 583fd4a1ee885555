package sim

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

var (
	simSeed = flag.Uint64("sim.seed", 0, "seed of the histories; 0: a new one")
	simRuns = flag.Int("sim.runs", 1, "how many histories each test makes")
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// runs gives a test its seeds, one after another, and prints the one that fails.
func runs(t *testing.T, body func(t *testing.T, rng *rand.Rand)) {
	t.Helper()
	for n := range *simRuns {
		seed := *simSeed
		if seed == 0 {
			seed = rand.Uint64()
		}
		seed += uint64(n)
		body(t, rand.New(rand.NewPCG(seed, 0)))
		if t.Failed() {
			t.Fatalf("seed %d: go test ./internal/sim -run '^%s$' -sim.seed=%d", seed, t.Name(), seed)
		}
	}
}

// tiny makes generations, pages and checkpoints change all the time.
func tiny(fs vfs.FS) mvcc.Options {
	return mvcc.Options{
		Storage: storage.Options{
			Dir: "db", FS: fs, PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 32 << 10, SegmentBytes: 32 << 10,
			CheckpointBytes: 64 << 10, CheckpointWorkers: 2,
		},
		SyncInterval: time.Millisecond, GCInterval: time.Millisecond,
	}
}

func mustOpen(t testing.TB, fs vfs.FS) *mvcc.Store {
	t.Helper()
	s, err := mvcc.Open(tiny(fs))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// mustClose closes a store whose disk may have lost its power.
func mustClose(t testing.TB, s *mvcc.Store) {
	t.Helper()
	if err := s.Close(); err != nil && !errors.Is(err, vfs.ErrCrashed) && !errors.Is(err, mvcc.ErrFailed) {
		t.Error(err)
	}
}

// workload says what clients do.
type workload struct {
	level   Level
	clients int
	keys    int // at a time
	opsMax  int
	rounds  int // transactions of a client between two crashes
	crashes int
	numbers atomic.Int64
	turn    atomic.Int64 // transactions so far: keys change with it, so that lists stay short
	perKeys int64        // transactions for which keys stay the same
}

// ops makes up a transaction.
func (w *workload) ops(rng *rand.Rand) []Op {
	generation := int64(0)
	if w.perKeys > 0 {
		generation = w.turn.Add(1) / w.perKeys
	}
	ops := make([]Op, 1+rng.IntN(w.opsMax))
	for i := range ops {
		o := Op{Kind: OpKind(rng.IntN(2)), Key: fmt.Sprintf("g%04d/%d", generation, rng.IntN(w.keys))}
		if rng.IntN(8) == 0 {
			o = Op{Kind: Scan, Key: fmt.Sprintf("g%04d/", generation)}
		}
		if o.Kind == Append {
			o.Number = int(w.numbers.Add(1))
		}
		ops[i] = o
	}
	return ops
}

// store runs the workload on a store in this process, with checkpoints and a collector running, and
// cuts the power between the rounds.
func (w *workload) store(t *testing.T, rng *rand.Rand) *History {
	t.Helper()
	h, disk := NewHistory(), vfs.NewMem()
	for round := range w.crashes + 1 {
		s := mustOpen(t, disk)
		if round < w.crashes {
			disk.CrashAt(disk.Mutations() + 20 + rng.Int64N(int64(w.rounds*w.clients)/2))
		}
		w.clientsAt(t, h, rng.Uint64(), func() (Session, error) { return NewStoreSession(s) }, func(ctx context.Context) {
			for ctx.Err() == nil {
				_ = s.Checkpoint(ctx) // fails when the power goes
				time.Sleep(time.Millisecond)
			}
		})
		if round == w.crashes {
			w.readAll(t, h, func() (Session, error) { return NewStoreSession(s) })
		}
		mustClose(t, s)
		if round < w.crashes {
			disk = disk.Crash(rng.Uint64(), vfs.Survival(rng.IntN(3)))
		}
	}
	return h
}

// clientsAt runs all clients until each has done its rounds or the system has gone, and another
// function at the same time.
func (w *workload) clientsAt(t *testing.T, h *History, seed uint64, open func() (Session, error), beside func(context.Context)) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	var clients, others sync.WaitGroup
	others.Go(func() { beside(ctx) })
	for n := range w.clients {
		clients.Go(func() {
			s, err := open()
			if err != nil {
				return // the power went before
			}
			defer s.Close()
			rng := rand.New(rand.NewPCG(seed, uint64(n)))
			for range w.rounds {
				if _, err := Run(h, s, n, w.level, w.ops(rng)); err != nil && !errors.Is(err, ErrConflict) {
					return
				}
			}
		})
	}
	clients.Wait()
	stop()
	others.Wait()
}

// readAll is the read of every key that ends a history.
func (w *workload) readAll(t *testing.T, h *History, open func() (Session, error)) {
	t.Helper()
	s, err := open()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := Run(h, s, -1, w.level, []Op{{Kind: Scan, Key: "g"}}); err != nil {
		t.Fatal(err)
	}
}

func (w *workload) check(t *testing.T, h *History) {
	t.Helper()
	if err := CheckLists(h.Transactions(), w.level); err != nil {
		t.Error(err)
	}
	t.Logf("%d committed, %d aborted, %d unknown", h.Count(Committed), h.Count(Aborted), h.Count(Unknown))
	if h.Count(Committed) < w.clients {
		t.Error("hardly anything was committed; the history shows nothing")
	}
}

func TestSerializableHistoriesHaveNoCycle(t *testing.T) {
	runs(t, func(t *testing.T, rng *rand.Rand) {
		w := &workload{level: Strict, clients: 8, keys: 6, opsMax: 4, rounds: 150, perKeys: 100}
		w.check(t, w.store(t, rng))
	})
}

func TestSnapshotHistoriesHaveNoForbiddenCycle(t *testing.T) {
	runs(t, func(t *testing.T, rng *rand.Rand) {
		w := &workload{level: Snapshot, clients: 8, keys: 6, opsMax: 4, rounds: 150, perKeys: 100}
		w.check(t, w.store(t, rng))
	})
}

func TestSerializableHistoriesSurviveCrashes(t *testing.T) {
	runs(t, func(t *testing.T, rng *rand.Rand) {
		w := &workload{level: Strict, clients: 8, keys: 6, opsMax: 4, rounds: 100, perKeys: 100, crashes: 6}
		w.check(t, w.store(t, rng))
	})
}

func TestSnapshotHistoriesSurviveCrashes(t *testing.T) {
	runs(t, func(t *testing.T, rng *rand.Rand) {
		w := &workload{level: Snapshot, clients: 8, keys: 6, opsMax: 4, rounds: 100, perKeys: 100, crashes: 6}
		w.check(t, w.store(t, rng))
	})
}

// Short histories, judged by an independent checker: registers first, then small transactions, with
// a crash in the middle.
func TestShortHistoriesAreLinearizable(t *testing.T) {
	for _, opsMax := range []int{1, 3} {
		t.Run(fmt.Sprintf("ops=%d", opsMax), func(t *testing.T) {
			runs(t, func(t *testing.T, rng *rand.Rand) {
				for range 12 {
					w := &workload{level: Strict, clients: 4, keys: 2, opsMax: opsMax, rounds: 12, crashes: 1}
					h := w.store(t, rng)
					if err := CheckLinear(h.Transactions(), 20*time.Second); err != nil {
						t.Fatal(err)
					}
				}
			})
		})
	}
}
