package pager

import (
	"maps"
	"testing"

	"epochkv/internal/vfs"
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
	rewrite := func(times int) {
		t.Helper()
		for range times {
			value++
			must(t, y.checkpoint(value, all, nil, value))
			y.p.ReleaseYoung(y.p.Checkpoint()) // nobody but who looks at frozen states
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
		p, err := y.p.Freeze()
		must(t, err)
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
	y.p.ReleaseThrough(first.Checkpoint())
	rewrite(1)
	look(second, then)
	y.p.ReleaseThrough(y.p.Checkpoint())
	rewrite(2)
	if n := y.p.Stats().Pending; n > own {
		t.Errorf("%d pages wait for nobody", n)
	}
}
