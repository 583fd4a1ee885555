package auth

import (
	"bytes"
	"slices"
)

// Grant gives rights to the keys from Lower up to but not including Upper, which is no bound if it is empty, and to actions.
type Grant struct {
	Lower, Upper       []byte
	Read, Write, Lease bool
	Actions            Actions
}

// Rights are what a user may do. They are not changed once they are compiled.
type Rights struct {
	ranges    [keyRights]rangeSet
	actions   Actions
	heapBytes int64
}

// rangeSet is ranges in key order that neither overlap nor touch. The last upper bound may be nil, which is no bound.
type rangeSet struct{ lower, upper [][]byte }

// Compile makes the rights of a user from the grants of all its roles.
func Compile(grants []Grant) *Rights {
	r := new(Rights)
	for right := range r.ranges {
		r.ranges[right] = mergeRanges(grants, Right(right))
		r.heapBytes += r.ranges[right].heapBytes()
	}
	for i := range grants {
		r.actions |= grants[i].Actions
	}
	return r
}

// HeapBytes is about what the rights take of the heap. It is counted when they are compiled: each change of users adds up those of all.
func (r *Rights) HeapBytes() int64 { return r.heapBytes }

func (s *rangeSet) heapBytes() (sum int64) {
	for i := range s.lower {
		sum += rangeHeapBytes + int64(len(s.lower[i])+len(s.upper[i]))
	}
	return sum
}

// rangeHeapBytes are two slices, and what the allocator rounds up.
const rangeHeapBytes = 128

func (g *Grant) gives(right Right) bool {
	switch right {
	case RightRead:
		return g.Read
	case RightWrite:
		return g.Write
	case RightLease:
		return g.Lease
	case RightAdmin:
	}
	return false
}

// empty reports whether the range of a grant has no key.
func (g *Grant) empty() bool { return len(g.Upper) > 0 && bytes.Compare(g.Lower, g.Upper) >= 0 }

func mergeRanges(grants []Grant, right Right) (s rangeSet) {
	var sorted []Grant
	for i := range grants {
		if grants[i].gives(right) && !grants[i].empty() {
			sorted = append(sorted, grants[i])
		}
	}
	slices.SortFunc(sorted, func(a, b Grant) int { return bytes.Compare(a.Lower, b.Lower) })
	for i := range sorted {
		s.add(sorted[i].Lower, sorted[i].Upper)
	}
	return s
}

// add adds a range of which the lower bound is not less than those before.
func (s *rangeSet) add(lower, upper []byte) {
	last := len(s.lower) - 1
	if last < 0 || len(s.upper[last]) > 0 && bytes.Compare(lower, s.upper[last]) > 0 {
		s.lower, s.upper = append(s.lower, bytes.Clone(lower)), append(s.upper, bytes.Clone(upper))
		return
	}
	if len(s.upper[last]) > 0 && (len(upper) == 0 || bytes.Compare(upper, s.upper[last]) > 0) {
		s.upper[last] = bytes.Clone(upper)
	}
}

// last is the number of the last range with a lower bound at or before a key; -1 if there is none. No other one could contain
// the key.
func (s *rangeSet) last(key []byte) int {
	from, to := 0, len(s.lower)
	for from < to {
		if middle := int(uint(from+to) / 2); bytes.Compare(s.lower[middle], key) <= 0 {
			from = middle + 1
		} else {
			to = middle
		}
	}
	return from - 1
}

// contains reports whether all keys of a range are in one range of the set.
func (s *rangeSet) contains(r *Range) bool {
	last := s.last(r.Lower)
	if last < 0 {
		return false
	}
	upper := s.upper[last]
	switch {
	case len(upper) == 0:
		return true
	case r.Single:
		return bytes.Compare(r.Lower, upper) < 0
	}
	return len(r.Upper) > 0 && bytes.Compare(r.Upper, upper) <= 0 && bytes.Compare(r.Lower, upper) < 0
}

// Check is nil if the rights contain the footprint, and else a *DeniedError for the first thing that is missing.
func (r *Rights) Check(f *Footprint) error {
	for right := range r.ranges {
		of := f.ranges[right]
		for i := range of {
			if !r.ranges[right].contains(&of[i]) {
				return deniedRange(Right(right), &of[i])
			}
		}
	}
	if missing := f.actions &^ r.actions; missing != 0 {
		return &DeniedError{Right: RightAdmin, Action: missing}
	}
	if f.anyLease && len(r.ranges[RightLease].lower) == 0 {
		return &DeniedError{Right: RightLease, Any: true}
	}
	return nil
}

// RangeOf is the number of the range that gives a right to a key, in key order; -1 if none does.
func (r *Rights) RangeOf(right Right, key []byte) int {
	s := &r.ranges[right]
	if !s.contains(&Range{Lower: key, Single: true}) {
		return -1
	}
	return s.last(key)
}

// deniedRange is the refusal of a range. The error outlives the request, whose bounds are reused.
func deniedRange(right Right, r *Range) error {
	e := &DeniedError{Right: right, Range: Range{Hidden: true}}
	if !r.Hidden {
		e.Range = Range{Lower: bytes.Clone(r.Lower), Upper: bytes.Clone(r.Upper), Single: r.Single}
	}
	return e
}

// Everything reports whether the rights are all that exist.
func (r *Rights) Everything() bool {
	var all Footprint
	all.Everything()
	return r.Check(&all) == nil
}

// Grants are the rights as the fewest grants, in key order, and the actions.
func (r *Rights) Grants() (grants []Grant, actions Actions) {
	for right := range r.ranges {
		s := &r.ranges[right]
		for i := range s.lower {
			grants = append(grants, Grant{
				Lower: s.lower[i], Upper: s.upper[i],
				Read: Right(right) == RightRead, Write: Right(right) == RightWrite, Lease: Right(right) == RightLease,
			})
		}
	}
	return joinGrants(grants), r.actions
}

// joinGrants makes one grant of those with equal ranges.
func joinGrants(grants []Grant) []Grant {
	slices.SortStableFunc(grants, func(a, b Grant) int {
		if c := bytes.Compare(a.Lower, b.Lower); c != 0 {
			return c
		}
		return bytes.Compare(a.Upper, b.Upper)
	})
	out := grants[:0]
	for _, g := range grants {
		if n := len(out) - 1; n >= 0 && bytes.Equal(out[n].Lower, g.Lower) && bytes.Equal(out[n].Upper, g.Upper) {
			out[n].Read, out[n].Write, out[n].Lease = out[n].Read || g.Read, out[n].Write || g.Write, out[n].Lease || g.Lease
		} else {
			out = append(out, g)
		}
	}
	return out
}
