package enginetest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAnEpochThatWasSeenIsNeverGivenOutAgain: asynchronous commits are seen, and lost in a crash,
// several times in a row and at random operations, during recovery too. No epoch names two commits;
// a snapshot of a lost epoch is refused, and a compare-and-set that was read before the crash
// fails.
func TestAnEpochThatWasSeenIsNeverGivenOutAgain(t *testing.T) {
	testseed.SkipUnderRace(t)
	seed := crashTestSeed(t)
	for round := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, round))
		fs, seen, armed := vfs.NewMem(), map[keys.Epoch]int{}, false
		for run := range 6 {
			s, err := mvcc.Open(tiny(fs))
			if errors.Is(err, vfs.ErrCrashed) { // while it recovered
				fs, armed = fs.Crash(rng.Uint64(), vfs.Survival(rng.IntN(3))), false
				continue
			}
			if err != nil {
				t.Fatalf("round %d, run %d: %v", round, run, err)
			}
			epochsOfRun(t, s, rng, run, seen)
			if !armed && rng.IntN(4) == 0 {
				last := s.Visible()
				mustClose(t, s)
				s = mustOpen(t, tiny(fs))
				if next := mustPut(t, s, "key", "after a clean end"); next != last+1 {
					t.Fatalf("after a clean end at %d the next commit is %d", last, next)
				} else if seen[next] = run; next == 0 {
					t.Fatal("no epoch")
				}
			}
			left := fs.Crash(rng.Uint64(), vfs.Survival(rng.IntN(3)))
			_ = s.Close()
			fs, armed = left, rng.IntN(2) == 0
			if armed {
				fs.CrashAt(1 + rng.Int64N(30))
			}
		}
	}
}

// epochsOfRun looks at what may be left of earlier runs, and commits.
func epochsOfRun(t *testing.T, s *mvcc.Store, rng *rand.Rand, run int, seen map[keys.Epoch]int) {
	t.Helper()
	x, err := openSession(s)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	recovered := s.Recovery().Epoch
	for e := range seen {
		if e <= recovered {
			continue // it survived, or is older than what did
		}
		var gone *mvcc.SnapshotGoneError
		if _, err := x.OpenSnapshot(e); !errors.As(err, &gone) {
			t.Fatalf("run %d: a snapshot at epoch %d, which a crash has removed after epoch %d: %v", run, e, recovered, err)
		}
	}
	x.CloseSnapshot()
	for i := range rng.IntN(12) {
		w := mvcc.Write{Durability: []mvcc.Durability{mvcc.DurabilitySync, mvcc.DurabilityAsync, mvcc.DurabilityAsync}[rng.IntN(3)]}
		w.Set([]byte("key"), fmt.Appendf(nil, "%d of run %d", i, run))
		e, err := commitAndWait(x, &w)
		if err != nil {
			return // the crash that was asked for
		}
		if before, ok := seen[e]; ok {
			t.Fatalf("epoch %d was assigned in run %d, and again in run %d", e, before, run)
		}
		seen[e] = run
	}
	for e := range seen { // one of them is the newest, and the others are of the past or lost
		w := mvcc.Write{Conditions: []mvcc.Condition{{Kind: mvcc.EpochEquals, Key: []byte("key"), Epoch: e}}}
		v, err := x.Get(nil, []byte("key"), 0)
		if err != nil || v.Epoch == e {
			continue
		}
		w.Set([]byte("key"), []byte("swapped"))
		var refused *mvcc.PreconditionError
		if e, err := commitAndWait(x, &w); err == nil {
			t.Fatalf("run %d: compare-and-set by epoch succeeded as %d on another commit", run, e)
		} else if !errors.As(err, &refused) {
			return
		}
	}
}
