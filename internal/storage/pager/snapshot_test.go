package pager

import (
	"encoding/binary"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestFrozenStateHoldsItsOwnPagesOnly: everything is overwritten again and again while somebody looks at a state, at two of them for a while. They
// stay as they were, and cost their own pages and no more.
func TestFrozenStateHoldsItsOwnPagesOnly(t *testing.T) {
	const slots = 12
	y := createToy(t, vfs.NewMem(), 512)
	var all []int
	for i := range slots {
		all = append(all, i)
	}
	value := uint64(1)
	var frozen []uint64
	rewrite := func(times int) {
		t.Helper()
		for range times {
			value++
			must(t, y.checkpoint(value, all, nil, value))
			y.p.ReuseFreed(y.p.Checkpoint(), slices.Clone(frozen)) // nobody but who looks at frozen states
			must(t, y.audit())
		}
	}
	look := func(p *Pager, want map[int]uint64) {
		t.Helper()
		state := &toy{p: p, leaves: map[int]toyLeaf{}, root: p.State().Root}
		must(t, state.load())
		if got := state.contents(); !maps.Equal(got, want) {
			t.Fatalf("a frozen state holds %v, it was %v", got, want)
		}
	}
	freeze := func() (*Pager, map[int]uint64) {
		t.Helper()
		p, err := y.p.Snapshot()
		must(t, err)
		frozen = append(frozen, p.Checkpoint())
		y.p.ReuseFreed(y.p.Checkpoint(), slices.Clone(frozen))
		return p, y.contents()
	}

	rewrite(3)
	first, was := freeze()
	rewrite(20)
	look(first, was)
	own := uint64(slots + 1 + 4) // leaves and root, and a few of the map
	if n := y.p.Stats().Pending; n > 2*own {
		t.Errorf("%d pages wait for a state of %d", n, own)
	}
	second, then := freeze()
	rewrite(20)
	look(first, was)
	look(second, then)
	if n := y.p.Stats().Pending; n > 4*own {
		t.Errorf("%d pages wait for two states of %d", n, own)
	}
	size := y.p.Stats().FileBytes
	rewrite(200)
	look(first, was)
	look(second, then)
	if after := y.p.Stats().FileBytes; after > size {
		t.Errorf("the file grew from %d to %d bytes", size, after)
	}
	for range 20 { // short looks beside long ones
		freeze()
		rewrite(1)
		frozen = frozen[:2]
	}
	look(first, was)
	look(second, then)
	if after := y.p.Stats().FileBytes; after > size+int64(2*own)*512 {
		t.Errorf("beside short looks, the file grew from %d to %d bytes", size, after)
	}
	frozen = frozen[1:]
	y.p.ReuseAllFreed(first.Checkpoint())
	rewrite(1)
	look(second, then)
	frozen = nil
	y.p.ReuseAllFreed(y.p.Checkpoint())
	rewrite(2)
	if n := y.p.Stats().Pending; n > own {
		t.Errorf("%d pages wait for nobody", n)
	}
	if n := len(y.p.space.pageGenerations); n > 1 {
		t.Errorf("%d cohorts are kept apart for nobody", n)
	}
}

// TestFrozenModel: states are frozen and given up, readers of roots come and go, checkpoints succeed, fail and are given up, in any order. Everybody
// finds what was there, the accounts are right at every step, and so is what is found when the file is opened again.
func TestFrozenModel(t *testing.T) {
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 5))
		mem := vfs.NewMem()
		faults := vfs.NewFaulty(mem)
		y := createToy(t, faults, 512)
		type pinned struct {
			p    *Pager
			want map[int]uint64
			at   uint64
			leaf map[int]toyLeaf // of a reader, who is in a slot and has no frozen state
		}
		var pins, readers []pinned
		value := uint64(0)
		look := func(p pinned) {
			state := &toy{p: p.p, leaves: map[int]toyLeaf{}, root: p.p.State().Root}
			must(t, state.load())
			if got := state.contents(); !maps.Equal(got, p.want) {
				t.Fatalf("seed %d: frozen %d holds %v, was %v", seed, p.at, got, p.want)
			}
			q := newSnapshot(p.p.file, *p.p.current(), p.p.fileSize.Load())
			must(t, q.ReadMap())
			must(t, (&toy{p: q, leaves: state.leaves, root: state.root}).audit())
		}
		for range 150 {
			switch n := r.IntN(12); {
			case n < 5:
				value++
				var set, del []int
				for i := range 12 {
					switch r.IntN(4) {
					case 0, 1:
						set = append(set, i)
					case 2:
						del = append(del, i)
					}
				}
				del = del[:min(len(del), 3)]
				var rule *vfs.Injected
				if r.IntN(4) == 0 {
					rule = faults.Inject(vfs.Rule{Op: vfs.OpPreallocate | vfs.OpWrite, Nth: 1 + r.IntN(20), Err: vfs.ErrNoSpace})
				}
				err := y.checkpoint(value, set, del, value)
				if rule != nil {
					rule.Remove()
				}
				if err != nil && y.p.Err() != nil {
					goto done
				}
			case n == 5: // given up
				ck, err := y.p.Begin()
				must(t, err)
				_, _, err = y.build(ck, []int{r.IntN(12), 12, 13}, nil, 99)
				must(t, err)
				if r.IntN(2) == 0 {
					must(t, ck.applyToSpace())
					_, err = ck.allocateMap()
					must(t, err)
				}
				ck.Abort()
			case n < 8:
				p, err := y.p.Snapshot()
				must(t, err)
				pins = append(pins, pinned{p: p, want: y.contents(), at: p.Checkpoint()})
			case n == 8 && len(pins) > 0:
				i := r.IntN(len(pins))
				look(pins[i])
				pins = append(pins[:i], pins[i+1:]...)
			case n == 9:
				readers = append(readers, pinned{leaf: maps.Clone(y.leaves), at: y.p.Checkpoint()})
			case n == 10 && len(readers) > 0:
				i := r.IntN(len(readers))
				readers = append(readers[:i], readers[i+1:]...)
			case n == 11:
				must(t, y.p.Shrink())
			}
			wanted := y.p.Checkpoint()
			for _, x := range readers {
				wanted = min(wanted, x.at)
			}
			through := wanted
			for _, x := range pins {
				through = min(through, x.at)
			}
			y.p.ReuseAllFreed(through)
			var frozen []uint64
			for _, x := range pins {
				frozen = append(frozen, x.at)
			}
			y.p.ReuseFreed(wanted, frozen)
			must(t, y.audit())
			for _, x := range pins {
				look(x)
			}
			for _, x := range readers {
				for _, l := range x.leaf {
					buf := make([]byte, 512)
					must(t, y.p.ReadPage(l.id, buf))
					if got := binary.LittleEndian.Uint64(buf[page.HeaderSize:]); got != l.value {
						t.Fatalf("seed %d: a reader at %d finds %d, want %d", seed, x.at, got, l.value)
					}
				}
			}
		}
	done:
		must(t, y.p.Close())
		z, err := openToy(mem)
		must(t, err)
		if y.p.Err() == nil && !maps.Equal(z.contents(), y.contents()) {
			t.Fatalf("seed %d: reopened %v, was %v", seed, z.contents(), y.contents())
		}
		must(t, z.p.Close())
	}
}
