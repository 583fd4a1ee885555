package storage

import (
	"context"

	"epochkv/internal/storage/btree"
	"epochkv/internal/storage/keys"
	"epochkv/internal/storage/page"
)

// rangeInput passes on what an input has inside lost ranges, or outside of them. The two together pass on everything once.
type rangeInput struct {
	btree.Input
	side   *side
	inside bool
	next   int // the first range that does not end in front of the last entry
}

func newRangeInput(in btree.Input, s *side, inside bool) *rangeInput {
	r := &rangeInput{Input: in, side: s, inside: inside}
	r.SeekGE(nil)
	return r
}

// SeekGE implements btree.Input.
func (r *rangeInput) SeekGE(key []byte) {
	r.Input.SeekGE(key)
	r.next = r.side.find(key, page.NoTrailer)
}

// Next implements btree.Input.
func (r *rangeInput) Next(e *btree.Entry) bool {
	for r.Input.Next(e) {
		for r.next < len(r.side.ranges) && r.side.ranges[r.next].behind(e.Key, e.Trailer) {
			r.next++
		}
		covered := r.next < len(r.side.ranges) && r.side.ranges[r.next].lower.Compare(e.Key, e.Trailer) <= 0
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
	if r.next == len(r.side.ranges) {
		return !r.inside
	}
	to := &r.side.ranges[r.next].lower
	if !r.inside {
		if to = r.side.ranges[r.next].upper; to == nil {
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

// outside is the part of a merge that concerns the tree: it leaves lost pages alone.
func (s *side) outside(all *btree.MergeInput) *btree.MergeInput {
	if s == nil {
		return all
	}
	in := *all
	in.Avoid = s.avoid
	in.Input = func() btree.Input { return newRangeInput(all.Input(), s, false) }
	return &in
}

// merge does the rest: it brings the records of lost pages, and the versions in their ranges, into the side tree, and returns what follows
// it. A damaged page of the side tree ends the checkpoint: there is no third tree.
func (s *side) merge(ctx context.Context, all *btree.MergeInput, cut keys.Epoch) (*side, *btree.Result, error) {
	if s == nil {
		return nil, &btree.Result{}, nil
	}
	in, records := *all, s.records(cut)
	in.Base, in.Cuts, in.Sweep, in.Unreadable, in.Workers = s.root, nil, nil, nil, 1
	in.Policy.KeepDeletes = true
	in.Input = func() btree.Input {
		return &recordInput{btree.SliceInput{Entries: records}, newRangeInput(all.Input(), s, true)}
	}
	result, err := btree.Merge(ctx, &in)
	if err != nil {
		return nil, nil, err
	}
	return s.durable(result.Root), result, nil
}
