package feed

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// Range are the keys from Lower up to but not including Upper; nil for no bound.
type Range struct{ Lower, Upper []byte }

func (r *Range) isPoint() bool {
	n := len(r.Lower)
	return len(r.Upper) == n+1 && r.Upper[n] == 0 && bytes.Equal(r.Upper[:n], r.Lower)
}

// compare orders ranges by their lower bounds, and then by their upper bounds.
func (r *Range) compare(other *Range) int {
	if order := bytes.Compare(r.Lower, other.Lower); order != 0 {
		return order
	}
	return bytes.Compare(r.Upper, other.Upper)
}

// RangeError is a range that has no key.
type RangeError struct{ Range Range }

func (e *RangeError) Error() string {
	return fmt.Sprintf("feed: the range from %q up to %q has no key", e.Range.Lower, e.Range.Upper)
}

// Kinds is a set of kinds of changes.
type Kinds uint8

// Kinds of changes. The empty set stands for all.
const (
	KindSets Kinds = 1 << iota
	KindDeletes
	KindLoads

	kindOperations = KindSets | KindDeletes
	kindsAll       = kindOperations | KindLoads
)

func kindsOf(k keys.Kind) Kinds {
	if k == keys.KindDelete {
		return KindDeletes
	}
	return KindSets
}

// Origins is a set of origins of commits. The empty set stands for all.
type Origins uint32

// OriginsOf is the set of some origins.
func OriginsOf(list ...batch.Origin) (s Origins) {
	for _, o := range list {
		s |= 1 << o
	}
	return s
}

// filter says which operations a watch wants. It does not change.
type filter struct {
	ranges []Range // of internal keys, ascending and apart
	class
}

// class is what a watch wants whatever its ranges are.
type class struct {
	kinds   Kinds
	origins Origins
}

// wants reports whether something of a commit with an origin and such kinds is wanted.
func (c *class) wants(o batch.Origin, kinds Kinds) bool {
	return c.kinds&kinds != 0 && c.wantsOrigin(o)
}

func (c *class) wantsOrigin(o batch.Origin) bool { return c.origins == 0 || c.origins&(1<<o) != 0 }

// newFilter makes internal ranges of those of a client: sorted, and united where they meet.
func newFilter(s keys.Space, ranges []Range, kinds Kinds, origins Origins) (filter, error) {
	f := filter{class: class{kinds, origins}}
	if kinds == 0 {
		f.kinds = kindsAll
	}
	if len(ranges) == 0 {
		ranges = []Range{{}}
	}
	for _, r := range ranges {
		if r.Upper != nil && bytes.Compare(r.Lower, r.Upper) >= 0 {
			return f, &RangeError{r}
		}
	}
	for _, r := range United(slices.Clone(ranges)) {
		internal := Range{keys.Append(nil, s, r.Lower), []byte{byte(s) + 1}}
		if r.Upper != nil {
			internal.Upper = keys.Append(nil, s, r.Upper)
		}
		f.ranges = append(f.ranges, internal)
	}
	f.ranges = slices.Clip(f.ranges)
	return f, nil
}

// United sorts ranges, of which there is at least one, and unites them where they meet, in their place.
func United(ranges []Range) []Range {
	slices.SortFunc(ranges, func(a, b Range) int { return bytes.Compare(a.Lower, b.Lower) })
	out := ranges[:1]
	for _, r := range ranges[1:] {
		last := &out[len(out)-1]
		switch {
		case last.Upper == nil: // it has all that follow
		case bytes.Compare(r.Lower, last.Upper) > 0:
			out = append(out, r)
		case r.Upper == nil || bytes.Compare(r.Upper, last.Upper) > 0:
			last.Upper = r.Upper
		}
	}
	return out
}

// match appends the runs of a commit that the filter wants, of the operations from one on.
func (f *filter) match(runs []run, c *Commit, from uint32) []run {
	if !f.wantsOrigin(c.Origin) {
		return runs
	}
	if c.Loaded != nil {
		return f.matchLoad(runs, c.Loaded)
	}
	at := int(from)
	for i := range f.ranges {
		if at == c.Count() {
			break
		}
		lower := c.search(at, f.ranges[i].Lower)
		at = c.search(lower, f.ranges[i].Upper)
		if lower < at {
			runs = f.matchKinds(runs, c, uint32(lower), uint32(at))
		}
	}
	return runs
}

func (f *filter) matchLoad(runs []run, l *keys.LoadedRange) []run {
	for i := range f.ranges {
		r := &f.ranges[i]
		if f.kinds&KindLoads != 0 && bytes.Compare(l.Lower, r.Upper) < 0 && (l.Upper == nil || bytes.Compare(r.Lower, l.Upper) < 0) {
			return append(runs, run{})
		}
	}
	return runs
}

// matchKinds appends a run from its first operation of a kind that is wanted on. Later ones that are not are left out when it is taken: it
// may have very many, and very many watches may want it.
func (f *filter) matchKinds(runs []run, c *Commit, from, to uint32) []run {
	if from = f.nextWanted(c, from, to); from < to {
		runs = append(runs, run{from, to})
	}
	return runs
}

// nextWanted is the first operation of a kind that is wanted, from one on and before another.
func (f *filter) nextWanted(c *Commit, from, to uint32) uint32 {
	switch {
	case f.kinds&kindOperations == 0:
		return to
	case from < to && kindsOf(c.spans[from].kind)&f.kinds == 0:
		return min(c.spans[from].alike, to)
	}
	return from
}

// endWanted is the end of the operations of kinds that are wanted, from one of them on and before another.
func (f *filter) endWanted(c *Commit, from, to uint32) uint32 {
	if from == to || f.kinds&kindOperations == kindOperations {
		return to
	}
	return min(c.spans[from].alike, to)
}
