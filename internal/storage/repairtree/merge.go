package repairtree

import (
	"context"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
)

// rangeInput passes on the entries of an input that are inside skipped ranges, or those that are outside. The two kinds
// together pass on every entry once.
type rangeInput struct {
	btree.Input
	tree   *Tree
	inside bool
	next   int // the first range that does not end before the last entry
}

func newRangeInput(in btree.Input, s *Tree, inside bool) *rangeInput {
	r := &rangeInput{Input: in, tree: s, inside: inside}
	r.SeekGE(nil)
	return r
}

// SeekGE implements btree.Input.
func (r *rangeInput) SeekGE(key []byte) {
	r.Input.SeekGE(key)
	r.next = r.tree.find(key, page.NoTrailer)
}

// Next implements btree.Input.
func (r *rangeInput) Next(e *btree.Entry) bool {
	for r.Input.Next(e) {
		for r.next < len(r.tree.ranges) && r.tree.ranges[r.next].endsBefore(e.Key, e.Trailer) {
			r.next++
		}
		covered := r.next < len(r.tree.ranges) && r.tree.ranges[r.next].lower.Compare(e.Key, e.Trailer) <= 0
		if covered == r.inside {
			return true
		}
		if !r.jump(e) {
			return false
		}
	}
	return false
}

// jump moves the input to where the next entry to pass on may be. It reports false if there can be none.
func (r *rangeInput) jump(e *btree.Entry) bool {
	if r.next == len(r.tree.ranges) {
		return !r.inside
	}
	to := &r.tree.ranges[r.next].lower
	if !r.inside {
		if to = r.tree.ranges[r.next].upper; to == nil {
			return false
		}
	}
	if string(e.Key) < string(to.Key) {
		r.Input.SeekGE(to.Key)
	}
	return true
}

// recordInput is the records of skipped pages, which come first, and then versions.
type recordInput struct {
	records btree.SliceInput
	btree.Input
}

// SeekGE implements btree.Input.
func (r *recordInput) SeekGE(key []byte) {
	r.records.SeekGE(key)
	r.Input.SeekGE(key)
}

// Next implements btree.Input.
func (r *recordInput) Next(e *btree.Entry) bool { return r.records.Next(e) || r.Input.Next(e) }

// copiesInput replaces references to large values by those to their copies.
type copiesInput struct {
	btree.Input
	copies map[page.Ref]page.Ref
}

// Next implements btree.Input.
func (c copiesInput) Next(e *btree.Entry) bool {
	if !c.Input.Next(e) {
		return false
	}
	if e.Large {
		if copied, ok := c.copies[page.RefOf(e.Value)]; ok {
			e.Value = append(e.Value[:len(e.Value)-page.RefSize:len(e.Value)-page.RefSize], copied[:]...)
		}
	}
	return true
}

// Outside is the part of a merge that concerns the tree: it does not read skipped pages, and has no entries for them.
func (s *Tree) Outside(all *btree.MergeInput) *btree.MergeInput {
	if s == nil {
		return all
	}
	in := *all
	in.Avoid = s.avoid
	in.Input = func() btree.Input { return newRangeInput(all.Input(), s, false) }
	return &in
}

// DamageError is damage in the repair tree or in its mirror.
type DamageError struct {
	Tree  btree.Root
	cause error
}

func (d *DamageError) Error() string { return "the repair tree: " + d.cause.Error() }
func (d *DamageError) Unwrap() error { return d.cause }

// Merge is the other part: it merges the records of skipped pages, and the versions in their ranges, into the repair tree
// and its mirror, and returns the trees that replace them. The statistics are those of one of the two. copies has, for each
// blob of the input that is in a skipped range, its copy for the mirror. The error is a *DamageError if a page of one of
// the two trees is damaged. The caller then tries again without that tree, or fails if no other is left.
func (s *Tree) Merge(ctx context.Context, all *btree.MergeInput, copies map[page.Ref]page.Ref, cut keys.Epoch) (*Tree, *btree.Result, error) {
	if s == nil {
		return nil, &btree.Result{}, nil
	}
	result, err := s.mergeInto(ctx, s.root, all, cut)
	if err != nil {
		return nil, nil, err
	}
	var mirror btree.Root
	if s.mirrored() {
		again := *all
		again.Progress = nil // it was counted with the first
		if len(copies) > 0 {
			again.Input = func() btree.Input { return copiesInput{all.Input(), copies} }
		}
		second, err := s.mergeInto(ctx, s.mirror, &again, cut)
		if err != nil {
			return nil, nil, err
		}
		mirror, result.Freed = second.Root, append(result.Freed, second.Freed...)
	}
	return s.durable(result.Root, mirror), result, nil
}

func (s *Tree) mergeInto(ctx context.Context, base btree.Root, all *btree.MergeInput, cut keys.Epoch) (*btree.Result, error) {
	in, records := *all, s.records(cut)
	in.Base, in.Cuts, in.Vacuum, in.Unreadable, in.Workers = base, btree.Cuts{}, nil, nil, nil
	in.Policy.RetainTombstones = true
	in.Input = func() btree.Input {
		return &recordInput{btree.SliceInput{Entries: records}, newRangeInput(all.Input(), s, true)}
	}
	result, err := btree.Merge(ctx, &in)
	if err != nil && pagesource.IsDamage(err) {
		return nil, &DamageError{base, err}
	}
	return result, err
}
