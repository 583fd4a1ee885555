package blob

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// churn is a scripted history: values of all forms come, change and go. Most leave in the end, and the file
// shrinks.
func churn(seed uint64, rounds, names, longest int) []change {
	rng := rand.New(rand.NewPCG(seed, 7))
	var script []change
	for round := range rounds {
		c := change{}
		for name := range names {
			switch {
			case round < rounds/2 && rng.IntN(3) == 0, rng.IntN(12) == 0:
				n := rng.IntN(longest / 8)
				if rng.IntN(5) == 0 {
					n = rng.IntN(longest)
				}
				c[name] = value(name, round, n)
			case round >= rounds/2 && name > 1 && rng.IntN(2) == 0:
				c[name] = nil
			}
		}
		script = append(script, c)
	}
	return script
}

// play runs a script and returns the states that it went through, and how many of them were acknowledged.
func play(fs vfs.FS, script []change) (states []map[int]string, acked int, cut bool, err error) {
	b, err := createBag(fs, 512)
	if err != nil {
		return nil, 0, false, err
	}
	defer func() { err = errors.Join(err, b.p.Close()) }()
	states = append(states, map[int]string{})
	for i, c := range script {
		states = append(states, c.apply(states[i]))
		if err := b.checkpoint(c); err != nil {
			return states, i, cut, err
		}
		b.p.ReuseAllFreed(b.p.Checkpoint() - uint64(i%3))
		before := b.p.Stats().FileBytes
		if err := b.p.Shrink(nothing); err != nil {
			return states, i + 1, cut, err
		}
		cut = cut || b.p.Stats().FileBytes < before
	}
	return states, len(script), cut, nil
}

// TestCrashAtEveryOperationKeepsBlobsWhole crashes a history with blobs of all forms, moves and truncations at
// every change that it makes to the file system. Afterwards the store holds an acknowledged state or the next
// one, every value whole, every page and blob accounted for.
func TestCrashAtEveryOperationKeepsBlobsWhole(t *testing.T) {
	script := churn(3, 14, 24, 6000)
	whole := vfs.NewMem()
	_, _, cut, err := play(whole, script)
	must(t, err)
	if !cut {
		t.Fatal("the history never cut the file")
	}
	for n := int64(1); n <= whole.Mutations(); n++ {
		mem := vfs.NewMem()
		mem.CrashAt(n)
		states, acked, _, err := play(mem, script)
		if !errors.Is(err, vfs.ErrCrashed) {
			t.Fatalf("crash at %d: %v", n, err)
		}
		if len(states) == 0 {
			continue // Create did not return; a test of the pager checks that
		}
		for i, keep := range []vfs.Survival{vfs.SurviveNone, vfs.SurviveAll, vfs.SurviveSome, vfs.SurviveSome} {
			if err := afterCrash(mem.Crash(uint64(n)<<8+uint64(i), keep), states, acked); err != nil {
				t.Fatalf("crash at operation %d, disk %d: %v", n, i, err)
			}
		}
	}
}

func afterCrash(disk *vfs.Mem, states []map[int]string, acked int) error {
	b, err := openBag(disk)
	if err != nil {
		return err
	}
	got, err := b.contents()
	if err != nil {
		return err
	}
	if !maps.Equal(got, states[acked]) && !maps.Equal(got, states[len(states)-1]) {
		return fmt.Errorf("%d values, neither the acknowledged state of %d nor the next", len(got), len(states[acked]))
	}
	if s := b.s.Stats(); s.Dropped != 0 {
		return fmt.Errorf("%d dropped blobs outlived the process", s.Dropped)
	}
	next := change{0: value(0, 99, 3000), 1: value(1, 99, 200), 2: nil}
	if err := errors.Join(b.checkpoint(next), b.audit()); err != nil {
		return fmt.Errorf("going on: %w", err)
	}
	return errors.Join(checkContents(b, next.apply(got)), b.p.Close())
}

// TestFullDiskKeepsBlobs: a batch that does not fit is aborted, blobs and accounts are as before, and the store
// continues.
func TestFullDiskKeepsBlobs(t *testing.T) {
	met := 0
	for blocks := int64(3); blocks < 30; blocks++ {
		mem := vfs.NewMem()
		b := mustCreate(t, mem, 512)
		first := change{0: value(0, 0, 700), 1: value(1, 0, 90), 2: value(2, 0, 200)}
		must(t, b.checkpoint(first))
		want := first.apply(nil)
		mem.SetCapacity(blocks * 4096)
		for round, c := range churn(uint64(blocks), 8, 12, 5000) {
			err := b.checkpoint(c)
			if err == nil {
				want = c.apply(want)
				continue
			}
			met++
			if !errors.Is(err, vfs.ErrNoSpace) || errors.Is(err, pager.ErrFailed) {
				t.Fatalf("%d blocks, round %d: %v", blocks, round, err)
			}
			must(t, b.audit())
			must(t, checkContents(b, want))
			b.p.ReuseAllFreed(b.p.Checkpoint())
		}
		mem.SetCapacity(0)
		must(t, b.checkpoint(change{50: value(50, 1, 4000)}))
		must(t, b.audit())
		must(t, b.p.Close())
	}
	if met == 0 {
		t.Fatal("no disk was too small")
	}
}
