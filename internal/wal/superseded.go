package wal

import (
	"fmt"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
)

// A later segment of version 2 that begins at epoch e supersedes all records from e on in the segments before it: they are
// not part of the history any more. So a tail of the log is removed by an append. The header of the new segment, one
// sector, decides: before it is durable the log has the old tail, and afterwards the new one.
//
// The new records have another term than the old ones. If a part of the old segment is still read, an overlap without
// a change of term is damage. A segment that is superseded as a whole is not read, and its terms are not compared.

// setLimits finds out, from the newest segment to the oldest, where later segments supersede the records of each. Only
// version 2 supersedes: in older logs an overlap is damage.
func setLimits(files []SegmentInfo) {
	limit, by := keys.Epoch(0), keys.Term(0)
	for i := len(files) - 1; i >= 0; i-- {
		s := &files[i]
		s.Limit, s.limitTerm = limit, by
		if s.Damage == nil && s.version >= version2 && (limit == 0 || s.First < limit) {
			limit, by = s.First, s.term
		}
	}
}

// live are the segments that have records of the history, in ascending order of their first epochs.
func live(files []SegmentInfo) []SegmentInfo {
	if !slices.ContainsFunc(files, func(s SegmentInfo) bool { return s.Superseded() }) {
		return files
	}
	return slices.DeleteFunc(slices.Clone(files), func(s SegmentInfo) bool { return s.Superseded() })
}

// Superseded reports whether later segments supersede all records of the segment.
func (s *SegmentInfo) Superseded() bool { return s.Damage == nil && s.limited(s.First) }

// LineagePrefix is the beginning of the lineage in the segment's header; false if it has none.
func (s *SegmentInfo) LineagePrefix() (prefix []byte, ok bool) {
	return s.lineage[:], s.Damage == nil && s.version >= version2
}

// limited reports whether later segments supersede the segment's record of an epoch.
func (s *SegmentInfo) limited(e keys.Epoch) bool { return s.Limit != 0 && e >= s.Limit }

// checkSuperseded refuses an overlap of two segments without a change of term.
func checkSuperseded(s *SegmentInfo, at int64, r *record, term keys.Term) error {
	if !holdsEpoch(r.flags) || term != s.limitTerm {
		return nil
	}
	return corruption(s.File, at, r.epoch, fmt.Sprintf("a later segment begins at epoch %d, too, and in the same term %d", s.Limit, term))
}

// terms say from which epoch on the log has which term, in ascending order.
type terms []termStart

type termStart struct {
	from keys.Epoch
	term keys.Term
}

// of is the term of an epoch, zero before the first one that is known.
func (t terms) of(e keys.Epoch) keys.Term {
	for i := len(t) - 1; i >= 0; i-- {
		if t[i].from <= e {
			return t[i].term
		}
	}
	return 0
}

// last is the term of the newest epoch.
func (t terms) last() keys.Term {
	if len(t) == 0 {
		return 0
	}
	return t[len(t)-1].term
}

// begin records that epochs from e on have a term, whatever was known of them.
func (t *terms) begin(e keys.Epoch, term keys.Term) {
	for len(*t) > 0 && (*t)[len(*t)-1].from >= e {
		*t = (*t)[:len(*t)-1]
	}
	if len(*t) == 0 || t.last() != term {
		*t = append(*t, termStart{e, term})
	}
}

// dropBefore removes what only concerns epochs before e.
func (t *terms) dropBefore(e keys.Epoch) {
	for len(*t) > 1 && (*t)[1].from <= e {
		*t = (*t)[1:]
	}
}
