package pager

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// copied is a state of which a copy was made, and the checksums of its pages.
type copied struct {
	name       string
	checkpoint uint64
	pages      map[page.ID]uint32
}

// TestChangedSinceHasEveryPageThatDiffers: between copies, checkpoints succeed, fail and are aborted, pages are reused and moved, and the file
// shrinks. A page that an older copy does not have in this form is among those that changed since, and its header says so, too.
func TestChangedSinceHasEveryPageThatDiffers(t *testing.T) {
	known, unread := 0, 0
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 7))
		faults := vfs.NewFaulty(vfs.NewMem())
		y := createToy(t, faults, 512)
		var copies []copied
		for step := range uint64(300) {
			if y.p.Err() != nil {
				break
			}
			switch n := r.IntN(12); {
			case n < 6:
				var rule *vfs.Injected
				if r.IntN(4) == 0 {
					rule = faults.Inject(vfs.Rule{Op: vfs.OpPreallocate | vfs.OpWrite, Nth: 1 + r.IntN(20), Err: vfs.ErrNoSpace})
				}
				set, del := []int{r.IntN(12)}, []int{}
				for r.IntN(3) > 0 {
					set, del = append(set, r.IntN(12)), append(del, r.IntN(12))
				}
				err := y.checkpoint(step, set, del, step)
				if rule != nil {
					rule.Remove()
				}
				if err != nil && y.p.Err() == nil && !errors.Is(err, vfs.ErrNoSpace) {
					t.Fatalf("seed %d: %v", seed, err)
				}
			case n == 6: // aborted
				ck, err := y.p.Begin()
				must(t, err)
				_, _, err = y.build(ck, []int{r.IntN(12), 12, 13}, nil, 99)
				must(t, err)
				ck.Abort()
			case n < 9:
				y.p.ReuseAllFreed(y.p.Checkpoint())
			case n == 9:
				must(t, y.p.Shrink(nothing))
			default:
				s, err := y.p.CopySnapshot()
				must(t, err)
				c := copied{fmt.Sprint(step), s.Checkpoint(), pagesOf(t, s)}
				for i := range copies {
					if checkChanged(t, seed, s, &copies[i], c.pages, &unread) {
						known++
					}
				}
				if n == 10 || len(copies) == 0 { // otherwise the copy has failed
					s.SetCopyName(c.name)
					copies = append(copies, c)
				}
			}
		}
		if n := len(y.p.changes.periods); n > periodsMax {
			t.Fatalf("seed %d: %d periods", seed, n)
		}
		must(t, y.p.Close())
	}
	if known < 1000 || unread < 2000 {
		t.Fatalf("%d copies were known, %d pages need not be read", known, unread)
	}
}

// checkChanged compares what changed since a copy with its pages and those of a later state.
func checkChanged(t *testing.T, seed uint64, s *Snapshot, old *copied, now map[page.ID]uint32, unread *int) bool {
	t.Helper()
	changed, known := s.ChangedSince(old.name)
	if !known {
		return false
	}
	buf := make([]byte, 512)
	for id, sum := range now {
		was, had := old.pages[id]
		must(t, s.ReadPage(id, buf))
		newer := page.ReadHeader(buf).Checkpoint > old.checkpoint
		differs := !had || was != sum
		if differs && !changed.Has(int(id)) {
			t.Fatalf("seed %d: page %d has changed between checkpoints %d and %d, which is not known", seed, id, old.checkpoint, s.Checkpoint())
		}
		if differs != newer {
			t.Fatalf("seed %d: page %d differs from checkpoint %d: %v, its header says %v", seed, id, old.checkpoint, differs, newer)
		}
		if !changed.Has(int(id)) {
			*unread++
		}
	}
	return true
}

// pagesOf are the checksums of the pages that a copy has.
func pagesOf(t *testing.T, s *Snapshot) map[page.ID]uint32 {
	t.Helper()
	must(t, s.ReadMap())
	all, buf := map[page.ID]uint32{}, make([]byte, 512)
	for id := s.NextCopied(0); id < s.PageCount(); id = s.NextCopied(id + 1) {
		must(t, s.ReadPage(id, buf))
		all[id] = binary.LittleEndian.Uint32(buf)
	}
	return all
}

// TestPeriodsOfCopiesAreBounded: few periods are kept however many copies are made, the newest copy stays exact, and what no copy needs is
// forgotten.
func TestPeriodsOfCopiesAreBounded(t *testing.T) {
	c := new(changes)
	through := uint64(0)
	cut := func(pages int) {
		for i := range pages {
			c.noteLive(page.ID(int(through)*100 + i))
		}
		through++
		c.cut(through)
	}
	for range 5 { // copies that fail
		cut(10)
	}
	if len(c.periods) != 0 {
		t.Fatalf("%d periods that no copy needs", len(c.periods))
	}
	c.name(through, "full")
	for range 100 {
		cut(10)
		c.name(through, fmt.Sprint(through))
	}
	if len(c.periods) > periodsMax || len(c.copies) > copiesMax {
		t.Fatalf("%d periods, %d copies", len(c.periods), len(c.copies))
	}
	if _, known := c.since("full", through); known {
		t.Fatal("the oldest copy is remembered beyond the bound")
	}
	newest := fmt.Sprint(through)
	cut(3)
	for range 20 { // copies that fail
		cut(3)
	}
	for name, n := range map[string]int{newest: 63, fmt.Sprint(through - 31): 163} {
		pages, known := c.since(name, through)
		if !known || pages.Count() < n || name == newest && pages.Count() > n {
			t.Fatalf("%d pages since %s, %v", pages.Count(), name, known)
		}
	}
	if _, known := c.since(newest, through-22); known {
		t.Fatal("a copy that is newer than the state is its base")
	}
	if len(c.periods) > 0 && c.periods[0].through <= c.copies[0].checkpoint {
		t.Fatal("a period of before the oldest copy is kept")
	}
	c.name(1, "too late")
	if _, known := c.since("too late", through); known {
		t.Fatal("a copy whose period was dropped is known")
	}
}
