package pager

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// history is what a scripted run did: the contents after each checkpoint that was begun, and how many were acknowledged.
type history struct {
	states []map[int]uint64
	acked  int
}

// script grows a toy, empties most of it again, moves the rest down and shrinks the file, while readers end late.
func script(fs vfs.FS) (h history, cut bool, err error) {
	p, err := Create(fs, toyFile, Options{PageSize: 1024})
	if err != nil {
		return h, false, err
	}
	y := &toy{p: p, r: &p.Reader, leaves: map[int]toyLeaf{}}
	defer func() { err = errors.Join(err, p.Close()) }()
	h.states = append(h.states, map[int]uint64{})
	rng := rand.New(rand.NewPCG(1, 2))
	slots := toySlots(p.PageSize())
	for round := range 14 {
		var set, del []int
		for slot := range slots {
			switch {
			case round < 4 && rng.IntN(3) > 0, round >= 4 && rng.IntN(20) == 0:
				set = append(set, slot)
			case round >= 4 && slot > 3 && rng.IntN(2) == 0:
				del = append(del, slot)
			}
		}
		next := y.contents()
		for _, i := range del {
			delete(next, i)
		}
		for _, i := range set {
			next[i] = uint64(round)
		}
		h.states = append(h.states, next)
		if err := y.checkpoint(uint64(round), set, del, uint64(round)); err != nil {
			return h, cut, err
		}
		h.acked = len(h.states) - 1
		p.ReuseAllFreed(p.Checkpoint() - min(p.Checkpoint(), uint64(rng.IntN(3))))
		before := p.Stats().FileBytes
		if err := p.Shrink(nothing); err != nil {
			return h, cut, err
		}
		cut = cut || p.Stats().FileBytes < before
	}
	return h, cut, nil
}

// TestCrashAtEveryOperationLosesAndLeaksNothing crashes the script at each change that it makes to the file
// system, and opens several disks that could result. Each holds an acknowledged state or the next one, whole,
// with every page accounted for, and the store can continue from there.
func TestCrashAtEveryOperationLosesAndLeaksNothing(t *testing.T) {
	base := testseed.Base(t)
	whole := vfs.NewMem()
	_, cut, err := script(whole)
	must(t, err)
	if !cut {
		t.Fatal("the script never cut the file")
	}
	for n := int64(1); n <= whole.Mutations(); n++ {
		mem := vfs.NewMem()
		mem.CrashAt(n)
		h, _, err := script(mem)
		if !errors.Is(err, vfs.ErrCrashed) {
			t.Fatalf("crash at %d: script ended with %v", n, err)
		}
		for seed := range uint64(5) {
			keep := vfs.SurviveSome
			if seed < 2 {
				keep = [...]vfs.Survival{vfs.SurviveNone, vfs.SurviveAll}[seed]
			}
			if err := afterCrash(mem.Crash(base+uint64(n)<<8+seed, keep), h); err != nil {
				t.Fatalf("crash at operation %d, disk %d: %v", n, seed, err)
			}
		}
	}
}

func afterCrash(disk *vfs.Mem, h history) error {
	y, err := openToy(disk)
	if len(h.states) == 0 {
		h.states = []map[int]uint64{{}}
		if err != nil {
			y, err = recreate(disk)
		}
	}
	if err != nil {
		return err
	}
	got := y.contents()
	if !maps.Equal(got, h.states[h.acked]) && !maps.Equal(got, h.states[len(h.states)-1]) {
		return fmt.Errorf("holds %v, which is neither the acknowledged %v nor the one on its way", got, h.states[h.acked])
	}
	if pending := y.p.Stats().Pending; pending != 0 {
		return fmt.Errorf("%d pages pending after open", pending)
	}
	if err := errors.Join(y.checkpoint(99, []int{3, 4, 5}, []int{0, 1}, 99), y.audit()); err != nil {
		return fmt.Errorf("going on: %w", err)
	}
	want := y.contents()
	if err := y.p.Close(); err != nil {
		return err
	}
	if y, err = openToy(disk); err != nil {
		return fmt.Errorf("opening again: %w", err)
	}
	if !maps.Equal(y.contents(), want) {
		return fmt.Errorf("holds %v after going on, want %v", y.contents(), want)
	}
	return y.p.Close()
}

// recreate is what an engine does when Create did not return: the name may not exist.
func recreate(disk *vfs.Mem) (*toy, error) {
	p, err := Create(disk, toyFile, Options{PageSize: 1024})
	if err != nil {
		return nil, err
	}
	return &toy{p: p, r: &p.Reader, leaves: map[int]toyLeaf{}}, nil
}

// TestFailedWriteOrSyncIsFinal fails each write and sync of a checkpoint in turn.
func TestFailedWriteOrSyncIsFinal(t *testing.T) {
	for _, op := range []vfs.Op{vfs.OpWrite, vfs.OpSyncData, vfs.OpPreallocate} {
		for nth := 1; ; nth++ {
			mem := vfs.NewMem()
			faulty := vfs.NewFaulty(mem)
			y := createToy(t, faulty, 512)
			must(t, y.checkpoint(1, []int{0, 1}, nil, 1))
			rule := faulty.Inject(vfs.Rule{Op: op, Nth: nth})
			err := y.checkpoint(2, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, nil, 2)
			if rule.Fired() == 0 {
				if nth == 1 {
					t.Fatalf("%v was never met", op)
				}
				break
			}
			if !errors.Is(err, ErrFailed) || !errors.Is(err, syscall.EIO) {
				t.Fatalf("%v %d failed, checkpoint: %v", op, nth, err)
			}
			rule.Remove()
			if err := y.checkpoint(3, []int{0}, nil, 3); !errors.Is(err, ErrFailed) {
				t.Fatalf("%v %d: checkpoint afterwards: %v", op, nth, err)
			}
			buf := make([]byte, 512)
			must(t, y.p.ReadPage(y.root, buf)) // readers go on
		}
	}
}

// TestFullDiskCostsNothing runs the script's growth on disks of every size. A checkpoint that does not fit
// is aborted, acknowledged states stay, and once there is room the store continues.
func TestFullDiskCostsNothing(t *testing.T) {
	met := 0
	for blocks := int64(2); blocks < 40; blocks++ {
		mem := vfs.NewMem()
		y := createToy(t, mem, 512)
		must(t, y.checkpoint(1, []int{0}, nil, 1))
		mem.SetCapacity(blocks * 4096)
		for round := uint64(2); round < 12; round++ {
			want := y.contents()
			err := y.checkpoint(round, []int{1, 2, 3, int(round), 19}, nil, round)
			if err == nil {
				continue
			}
			met++
			if !errors.Is(err, vfs.ErrNoSpace) || errors.Is(err, ErrFailed) {
				t.Fatalf("%d blocks: %v", blocks, err)
			}
			must(t, y.audit())
			mem.SetCapacity(0)
			again, err := openToy(mem)
			must(t, err)
			if !maps.Equal(again.contents(), want) {
				t.Fatalf("%d blocks: holds %v, want %v", blocks, again.contents(), want)
			}
			must(t, again.p.Close())
			must(t, y.checkpoint(round, []int{5}, nil, round))
			mem.SetCapacity(blocks * 4096)
			y.p.ReuseAllFreed(y.p.Checkpoint())
		}
		must(t, y.p.Close())
	}
	if met == 0 {
		t.Fatal("no disk was too small")
	}
}

// TestSameInputTakesSamePages: the pages that a checkpoint takes do not depend on when readers end during it.
func TestSameInputTakesSamePages(t *testing.T) {
	take := func(releaseAt int) (taken []Extent) {
		y := createToy(t, vfs.NewMem(), 512)
		must(t, y.checkpoint(1, []int{0, 1, 2, 3, 4, 5, 6, 7, 8}, nil, 1))
		must(t, y.checkpoint(2, nil, []int{1, 3, 5, 6}, 1))
		y.p.ReuseAllFreed(y.p.Checkpoint())
		must(t, y.checkpoint(3, nil, []int{0, 8}, 1))
		ck, err := y.p.Begin()
		must(t, err)
		for i := range 20 {
			if i == releaseAt {
				y.p.ReuseAllFreed(y.p.Checkpoint())
			}
			taken = append(taken, ck.AllocExtent(1+i%5))
		}
		ck.Abort()
		must(t, y.audit())
		return taken
	}
	want := take(-1)
	for at := range 20 {
		if got := take(at); !slices.Equal(got, want) {
			t.Fatalf("released at %d: took\n%v, want\n%v", at, got, want)
		}
	}
}

// TestCrashBetweenCommitsFreesPages: pages that a checkpoint took and wrote are free again after a crash
// before Commit.
func TestCrashBetweenCommitsFreesPages(t *testing.T) {
	mem := vfs.NewMem()
	y := createToy(t, mem, 512)
	must(t, y.checkpoint(1, []int{0}, nil, 1))
	live := y.p.Stats().Live
	ck, err := y.p.Begin()
	must(t, err)
	_, _, err = y.build(ck, []int{0, 1, 2, 3}, nil, 2)
	must(t, err)
	disk := mem.Crash(0, vfs.SurviveAll)
	y, err = openToy(disk)
	must(t, err)
	if got := y.p.Stats().Live; got != live {
		t.Fatalf("%d live pages, want %d", got, live)
	}
}
