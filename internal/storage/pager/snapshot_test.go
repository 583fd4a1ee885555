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

// TestPinnedCheckpointHoldsItsOwnPagesOnly: everything is overwritten again and again while one or two
// checkpoints are pinned. They stay as they were, and keep only their own pages from reuse.
func TestPinnedCheckpointHoldsItsOwnPagesOnly(t *testing.T) {
	const slots = 12
	y := createToy(t, vfs.NewMem(), 512)
	var all []int
	for i := range slots {
		all = append(all, i)
	}
	value := uint64(1)
	var pinned []uint64
	rewrite := func(times int) {
		t.Helper()
		for range times {
			value++
			must(t, y.checkpoint(value, all, nil, value))
			y.p.ReuseFreed(y.p.Checkpoint(), slices.Clone(pinned)) // the pinned checkpoints are the only readers
			must(t, y.audit())
		}
	}
	check := func(s *Snapshot, want map[int]uint64) {
		t.Helper()
		state := toyOf(s)
		must(t, state.load())
		if got := state.contents(); !maps.Equal(got, want) {
			t.Fatalf("a pinned state holds %v, it was %v", got, want)
		}
	}
	pin := func() (*Snapshot, map[int]uint64) {
		t.Helper()
		p, err := y.p.Snapshot()
		must(t, err)
		pinned = append(pinned, p.Checkpoint())
		y.p.ReuseFreed(y.p.Checkpoint(), slices.Clone(pinned))
		return p, y.contents()
	}

	rewrite(3)
	first, was := pin()
	rewrite(20)
	check(first, was)
	own := uint64(slots + 1 + 4) // leaves and root, and a few of the map
	if n := y.p.Stats().Pending; n > 2*own {
		t.Errorf("%d pages wait for a state of %d", n, own)
	}
	second, then := pin()
	rewrite(20)
	check(first, was)
	check(second, then)
	if n := y.p.Stats().Pending; n > 4*own {
		t.Errorf("%d pages wait for two states of %d", n, own)
	}
	size := y.p.Stats().FileBytes
	rewrite(200)
	check(first, was)
	check(second, then)
	if after := y.p.Stats().FileBytes; after > size {
		t.Errorf("the file grew from %d to %d bytes", size, after)
	}
	for range 20 { // short pins besides long ones
		pin()
		rewrite(1)
		pinned = pinned[:2]
	}
	check(first, was)
	check(second, then)
	if after := y.p.Stats().FileBytes; after > size+int64(2*own)*512 {
		t.Errorf("beside short looks, the file grew from %d to %d bytes", size, after)
	}
	pinned = pinned[1:]
	y.p.ReuseAllFreed(first.Checkpoint())
	rewrite(1)
	check(second, then)
	pinned = nil
	y.p.ReuseAllFreed(y.p.Checkpoint())
	rewrite(2)
	if n := y.p.Stats().Pending; n > own {
		t.Errorf("%d pages wait for nobody", n)
	}
	if n := len(y.p.space.pageGenerations); n > 1 {
		t.Errorf("%d cohorts are kept apart for nobody", n)
	}
}

// TestPinnedCheckpointModel: checkpoints are pinned and released, readers of roots come and go, and
// checkpoints succeed, fail and are aborted, in any order. Every reader finds its contents, and the accounts
// are right after every step and after the file is opened again.
func TestPinnedCheckpointModel(t *testing.T) {
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 5))
		mem := vfs.NewMem()
		faults := vfs.NewFaulty(mem)
		y := createToy(t, faults, 512)
		type pinned struct {
			p    *Snapshot
			want map[int]uint64
			at   uint64
			leaf map[int]toyLeaf // of a reader with a slot, without a pinned checkpoint
		}
		var pins, readers []pinned
		value := uint64(0)
		check := func(p pinned) {
			state := toyOf(p.p)
			must(t, state.load())
			if got := state.contents(); !maps.Equal(got, p.want) {
				t.Fatalf("seed %d: pinned %d holds %v, was %v", seed, p.at, got, p.want)
			}
			q := newSnapshot(p.p.file, *p.p.current(), p.p.size)
			must(t, q.ReadMap())
			must(t, q.Audit(state.reachable))
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
			case n == 5: // aborted
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
				check(pins[i])
				pins = append(pins[:i], pins[i+1:]...)
			case n == 9:
				readers = append(readers, pinned{leaf: maps.Clone(y.leaves), at: y.p.Checkpoint()})
			case n == 10 && len(readers) > 0:
				i := r.IntN(len(readers))
				readers = append(readers[:i], readers[i+1:]...)
			case n == 11:
				must(t, y.p.Shrink(nothing))
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
			var pinned []uint64
			for _, x := range pins {
				pinned = append(pinned, x.at)
			}
			y.p.ReuseFreed(wanted, pinned)
			must(t, y.audit())
			for _, x := range pins {
				check(x)
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

// toyOf is the toy in a snapshot.
func toyOf(s *Snapshot) *toy {
	return &toy{r: &s.Reader, leaves: map[int]toyLeaf{}, root: s.State().Root}
}
