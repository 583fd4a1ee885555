package storage

import (
	"context"
	"errors"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
)

// rangeInput passes on what an input has inside lost ranges, or outside of them. The two together pass on everything once.
type rangeInput struct {
	btree.Input
	repairTree *repairTree
	inside     bool
	next       int // the first range that does not end in front of the last entry
}

func newRangeInput(in btree.Input, s *repairTree, inside bool) *rangeInput {
	r := &rangeInput{Input: in, repairTree: s, inside: inside}
	r.SeekGE(nil)
	return r
}

// SeekGE implements btree.Input.
func (r *rangeInput) SeekGE(key []byte) {
	r.Input.SeekGE(key)
	r.next = r.repairTree.find(key, page.NoTrailer)
}

// Next implements btree.Input.
func (r *rangeInput) Next(e *btree.Entry) bool {
	for r.Input.Next(e) {
		for r.next < len(r.repairTree.ranges) && r.repairTree.ranges[r.next].behind(e.Key, e.Trailer) {
			r.next++
		}
		covered := r.next < len(r.repairTree.ranges) && r.repairTree.ranges[r.next].lower.Compare(e.Key, e.Trailer) <= 0
		if covered == r.inside {
			return true
		}
		if !r.jump(e) {
			return false
		}
	}
	return false
}

// jump goes to where the next entry that is wanted may be, if that is some way off. It reports false if there can be none.
func (r *rangeInput) jump(e *btree.Entry) bool {
	if r.next == len(r.repairTree.ranges) {
		return !r.inside
	}
	to := &r.repairTree.ranges[r.next].lower
	if !r.inside {
		if to = r.repairTree.ranges[r.next].upper; to == nil {
			return false
		}
	}
	if string(e.Key) < string(to.Key) {
		r.Input.SeekGE(to.Key)
	}
	return true
}

// recordInput is the records of lost pages, which come first, and then versions.
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
		if copied, ok := c.copies[page.Ref(e.Value)]; ok {
			e.Value = copied[:]
		}
	}
	return true
}

// outside is the part of a merge that concerns the tree: it leaves lost pages alone.
func (s *repairTree) outside(all *btree.MergeInput) *btree.MergeInput {
	if s == nil {
		return all
	}
	in := *all
	in.Avoid = s.avoid
	in.Input = func() btree.Input { return newRangeInput(all.Input(), s, false) }
	return &in
}

// repairTreeError is damage of the side tree or of its mirror that a merge has met.
type repairTreeError struct {
	tree  btree.Root
	cause error
}

func (d *repairTreeError) Error() string { return "beside the tree: " + d.cause.Error() }
func (d *repairTreeError) Unwrap() error { return d.cause }

// merge does the rest: it brings the records of lost pages, and the versions in their ranges, into the side tree and its mirror, and returns what follows
// them. The statistics are those of one of the two. A damaged page in one of them ends the attempt, and the next goes on without that tree; in
// the last one it ends the checkpoint.
func (s *repairTree) merge(ctx context.Context, all *btree.MergeInput, copies map[page.Ref]page.Ref, cut keys.Epoch) (*repairTree, *btree.Result, error) {
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

func (s *repairTree) mergeInto(ctx context.Context, base btree.Root, all *btree.MergeInput, cut keys.Epoch) (*btree.Result, error) {
	in, records := *all, s.records(cut)
	in.Base, in.Cuts, in.Vacuum, in.Unreadable, in.Workers = base, nil, nil, nil, 1
	in.Policy.RetainTombstones = true
	in.Input = func() btree.Input {
		return &recordInput{btree.SliceInput{Entries: records}, newRangeInput(all.Input(), s, true)}
	}
	result, err := btree.Merge(ctx, &in)
	if err != nil && IsDamage(err) {
		return nil, &repairTreeError{base, err}
	}
	return result, err
}

// skipInRepairTree gives up the side tree or its mirror, if a merge needed a damaged page of it, and reports whether the other one is left.
func (e *Engine) skipInRepairTree(err error) bool {
	found, ok := errors.AsType[*repairTreeError](err)
	if !ok {
		return false
	}
	known, ok := e.checkpoints.skippedPages.without(found.tree)
	if ok {
		e.checkpoints.skippedPages = known
		e.counters.damaged.Add(1)
	}
	return ok
}

// freeUnused frees the trees that were given up before a merge.
func (e *Engine) freeUnused(ck *pager.Checkpoint, batch blobBatch, before *repairTree) error {
	if before == nil {
		return nil
	}
	for _, root := range before.unused {
		if err := e.freeTree(ck, batch, root); err != nil {
			return err
		}
	}
	return nil
}

// freeTree frees what can be found of a tree that was given up. Pages below an inner node that cannot be read, and large values that a leaf like
// that refers to, stay in use.
func (e *Engine) freeTree(ck *pager.Checkpoint, batch blobBatch, root btree.Root) error {
	return btree.Walk(pagesource.NewDirect(e.pager), root, &btree.Visitor{
		Page: func(id page.ID, level int, p []byte) error {
			ck.Free(id)
			if level > 0 {
				return nil
			}
			view := page.Leaf(p).Layout()
			for i := range view.Count() {
				_, _, inline, large := view.At(i)
				if !large {
					continue
				}
				if err := batch.Drop(page.Ref(inline)); err != nil && !IsDamage(err) { // the walk would take it for damage of this page
					return err
				}
			}
			return nil
		},
		Damaged: func(id page.ID, _ int, _, _ *page.Separator, err error) error {
			if !IsDamage(err) {
				return err
			}
			ck.Free(id)
			return nil
		},
	})
}
