package blob

import (
	"errors"
	"math/rand/v2"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestTablesAreNotRebuiltFromWhatAFailedSyncHasLeft: the sync of a checkpoint that has moved values fails, and the process ends. The kernel shows what
// the checkpoint has written to the next processes, and no later sync writes it. One of them makes a checkpoint of the same number; another one can
// read neither map nor table. Then the machine crashes.
func TestTablesAreNotRebuiltFromWhatAFailedSyncHasLeft(t *testing.T) {
	moved := 0
	for seed := range uint64(30) {
		fs := vfs.NewMem()
		b := mustCreate(t, fs, 512)
		want := map[int]string{}
		rng := rand.New(rand.NewPCG(seed, 3)) //nolint:gosec // repeatable
		random := func(n int) change { return randomChange(rng, n) }
		for range 12 {
			c := random(1 + rng.IntN(20))
			must(t, b.checkpoint(c))
			want = c.apply(want)
			b.p.ReuseAllFreed(b.p.Checkpoint())
		}
		must(t, b.p.Close())
		faulty := vfs.NewFaulty(fs)
		failing, err := start(faulty, b, false)
		must(t, err)
		must(t, failing.sameState()) // which syncs for a start, too
		faulty.Inject(vfs.Rule{Op: vfs.OpAnySync, Name: bagFile, Fault: vfs.DiscardDirty, Err: syscall.EIO})
		if err := failing.checkpoint(random(5 + rng.IntN(40))); !errors.Is(err, syscall.EIO) {
			t.Fatal(err)
		}
		_ = failing.p.Close()

		kept := fs.Crash(1, vfs.SurviveProcess)
		before, err := start(kept, b, false)
		must(t, err)
		must(t, before.sameState())
		must(t, before.p.Close())
		rebuilt, err := start(kept, b, true)
		must(t, err)
		must(t, checkContents(rebuilt, want))
		for id := range before.s.state.Slots {
			if at := before.s.table.locationOf(id); at.live() && at != rebuilt.s.table.locationOf(id) {
				moved++
			}
		}
		must(t, rebuilt.sameState())
		must(t, rebuilt.p.Close())

		after, err := start(kept.Crash(1, vfs.SurviveAll), b, false)
		must(t, err)
		if err := errors.Join(checkContents(after, want), after.audit()); err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
		must(t, after.p.Close())
	}
	t.Logf("%d values were found in another copy", moved)
}
