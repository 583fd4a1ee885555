package btree

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// ErrInvariant is wrapped by the error of a merge that was about to write a tree that breaks an
// invariant of this package. The base is unchanged. The error is not about a page or an input, so a
// checkpoint that gets it stops the store: a second attempt would do the same.
var ErrInvariant = errors.New("btree: broken invariant")

// broken is the error of a broken invariant. In builds with the tag `invariants` it panics.
func broken(format string, args ...any) error {
	err := fmt.Errorf("%w: %s", ErrInvariant, fmt.Sprintf(format, args...))
	if invariants.Enabled {
		panic(err)
	}
	return err
}

// balance counts the entries of one partition on both sides of the merge. Invariant at the end of a
// partition: every entry that was read, from an old leaf or from the input, is in a new leaf,
// dropped, or skipped.
type balance struct {
	read    int // entries of old leaves and of the input
	skipped int // refused, or replaced by the same version of the input
	packed  int // entries of new leaves
}

// checkBalance compares the partition's counts. It costs one comparison for each partition.
func (w *worker) checkBalance() error {
	b := w.balance
	b.packed = w.pack.packed
	if dropped := int(w.stats.VersionsDropped); b.read != b.packed+dropped+b.skipped {
		return broken("%d entries were read; %d are in leaves, %d dropped, %d skipped", b.read, b.packed, dropped, b.skipped)
	}
	return nil
}

// checkNext checks that e may come after last in a run. The comparison of keys is too expensive for
// release builds: pages of the old tree are verified when they are read, and the input by enter.
func checkNext(last, e *page.Entry) error {
	if e.Same {
		if last.Trailer <= e.Trailer {
			return broken("version %d of %.40q comes after its version %d", e.Trailer.Epoch(), e.Key, last.Trailer.Epoch())
		}
		return nil
	}
	if invariants.Enabled && bytes.Compare(last.Key, e.Key) >= 0 {
		return broken("key %.40q comes after %.40q", e.Key, last.Key)
	}
	return nil
}

// checkLeaf checks a new leaf against the entries that it was built from. Release builds check only
// that its lower bound is not after its first entry.
func checkLeaf(p page.Leaf, r *leafRegion) error {
	if first, t := r.draft.First(); r.bound.Compare(first, t) > 0 {
		return broken("the first entry %.40q of a leaf is before its lower bound %v", first, r.bound)
	}
	if !invariants.Enabled {
		return nil
	}
	if err := page.Verify(p); err != nil {
		return broken("a new leaf does not verify: %v", err)
	}
	entries, _ := r.draft.Entries(nil, nil)
	layout := p.Layout()
	if layout.Count() != len(entries) {
		return broken("a leaf of %d entries decodes as %d", len(entries), layout.Count())
	}
	var key []byte
	for i := range entries {
		suffix, trailer, value, large := layout.At(i)
		if i == 0 || !layout.Same(i) {
			key = append(append(key[:0], layout.Prefix()...), suffix...)
		}
		e := &entries[i]
		if !bytes.Equal(key, e.Key) || trailer != e.Trailer || !bytes.Equal(value, e.Value) || large != e.Large {
			return broken("entry %d of a leaf, %.40q at %d, decodes as %.40q at %d", i, e.Key, e.Trailer.Epoch(), key, trailer.Epoch())
		}
	}
	return nil
}

// checkCut checks a separator between two neighbours: it is after the left and not after the right. The
// message has a copy of the separator: the pointer would let the separators of all leaves escape to the heap.
func checkCut(left *page.Entry, s *page.Separator, right *page.Entry) error {
	if s.Compare(left.Key, left.Trailer) <= 0 || s.Compare(right.Key, right.Trailer) > 0 {
		return broken("separator %v is not between %.40q and %.40q", *s, left.Key, right.Key)
	}
	return nil
}

// checkChild checks that c may be the next child of a node.
func (r *nodeRegion) checkChild(level int, c *page.Child) error {
	if n := len(r.children); n > 0 && r.children[n-1].Compare(c.Key, c.Trailer) >= 0 {
		return broken("child %d (%v) of a node of level %d comes after %v", c.ID, c.Separator, level, r.children[n-1].Separator)
	}
	return nil
}

// checkNode checks that a new inner node decodes as the children that it was built from. Release
// builds do not.
func checkNode(p []byte, children []page.Child) error {
	if !invariants.Enabled {
		return nil
	}
	if err := page.Verify(p); err != nil {
		return broken("a new node does not verify: %v", err)
	}
	node := page.Inner(p)
	if node.Count() != len(children) {
		return broken("a node of %d children decodes as %d", len(children), node.Count())
	}
	for i := range children {
		if node.Child(i) != children[i].ID || node.Newest(i) < children[i].Newest {
			return broken("child %d of a node, page %d, decodes as page %d", i, children[i].ID, node.Child(i))
		}
	}
	return nil
}

// checkExtent checks what the sink allocated.
func checkExtent(first page.ID, count, asked int) error {
	if first == 0 || count < 1 || count > asked {
		return broken("the sink allocated %d pages from %d; expected 1 to %d", count, first, asked)
	}
	return nil
}

// checkFreed checks that a merge frees each page of its base once, and not its new root.
func checkFreed(r *Result) error {
	if !invariants.Enabled {
		return nil
	}
	freed := slices.Sorted(slices.Values(r.Freed))
	for i, id := range freed {
		if id == r.Root.ID || i > 0 && freed[i-1] == id {
			return broken("page %d is freed twice, or it is the new root", id)
		}
	}
	return nil
}
