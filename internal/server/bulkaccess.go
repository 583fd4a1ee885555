package server

import (
	"bytes"
	"context"

	"github.com/epochkv/epochkv/internal/auth"
)

// bulkAccess is the permission of a bulk load as a whole. Each message is checked when it comes. The keys of a load are too many
// to be kept: of each range that the caller could write when the load began, the first and the last key of the load in it are.
// If the users have changed since, the caller must have the right to all keys between these. So a change that leaves the caller
// its rights, as a login does, ends no load.
type bulkAccess struct {
	whole  access
	rights *auth.Rights        // of the caller when the load began; nil if users were not checked
	spans  map[int]*loadedSpan // by the number of the range in rights; otherSpan for keys in none of them
}

// loadedSpan has the first and the last key of a load in a range.
type loadedSpan struct{ first, last []byte }

const (
	// otherSpan has the keys that the caller could not write when the load began, and those beyond loadedSpansMax.
	otherSpan = -1
	// loadedSpansMax bounds what a load keeps: two keys for each.
	loadedSpansMax = 256
)

func newBulkAccess(ctx context.Context, s *Server) *bulkAccess {
	b := &bulkAccess{spans: map[int]*loadedSpan{}}
	if a := accessOf(ctx); a != nil {
		t := s.gate.table.Load()
		b.whole = access{gate: a.gate, conn: a.conn, header: a.header, table: numberOf(t), row: &rowOfBulkLoad, request: b}
		if t != nil {
			b.whole.caller = s.gate.callerOf(a.conn, a.header, t)
		}
		if u := b.whole.user(); u != nil {
			b.rights = u.Rights
		}
	}
	return b
}

// rowOfBulkLoad is what the commit of a bulk load needs.
var rowOfBulkLoad = rpcRow{footprint: of(footprintOfBulk)}

func footprintOfBulk(f *footprint, b *bulkAccess) {
	for _, s := range b.spans {
		f.add(auth.RightWrite, auth.Range{Lower: s.first, Upper: append(bytes.Clone(s.last), 0)})
	}
}

// note notes a key of the load.
func (b *bulkAccess) note(key []byte) {
	span := otherSpan
	if b.rights != nil {
		span = b.rights.RangeOf(auth.RightWrite, key)
	}
	s := b.spans[span]
	if s == nil && span != otherSpan && len(b.spans) >= loadedSpansMax {
		span = otherSpan
		s = b.spans[span]
	}
	if s == nil {
		b.spans[span] = &loadedSpan{first: bytes.Clone(key), last: bytes.Clone(key)}
		return
	}
	if bytes.Compare(key, s.first) < 0 {
		s.first = append(s.first[:0], key...)
	}
	if bytes.Compare(key, s.last) > 0 {
		s.last = append(s.last[:0], key...)
	}
}

// commit is nil if the load may be committed.
func (b *bulkAccess) commit() error { return b.whole.again() }
