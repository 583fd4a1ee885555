package btree

import (
	"bytes"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// Entry is one version on its way into the tree. The value of a Large entry is a page.Ref to a
// value that is already stored.
type Entry struct {
	Key     []byte
	Value   []byte
	Trailer keys.Trailer
	Large   bool
}

// Input is a sorted stream of versions: key ascending, newest first. Every worker of a merge has
// its own.
//
// Key and value of an entry need to stay valid only until the following Next, except values longer
// than page.InlineMax: these must stay valid until Merge returns, because they are stored when
// their leaf gets its id. An input that cannot promise this stores them itself and returns Large
// entries.
type Input interface {
	// SeekGE moves to just before the first entry whose key is not less than key.
	SeekGE(key []byte)
	// Next fills e with the next entry. False means the end, or an error.
	Next(e *Entry) bool
	// Err is what ended the stream early, or nil.
	Err() error
}

// SliceInput is an Input over sorted entries in memory.
type SliceInput struct {
	Entries []Entry
	next    int
}

// SeekGE implements Input.
func (s *SliceInput) SeekGE(key []byte) {
	s.next, _ = slices.BinarySearchFunc(s.Entries, key, func(e Entry, k []byte) int { return bytes.Compare(e.Key, k) })
}

// Next implements Input.
func (s *SliceInput) Next(e *Entry) bool {
	if s.next == len(s.Entries) {
		return false
	}
	*e = s.Entries[s.next]
	s.next++
	return true
}

// Err implements Input.
func (s *SliceInput) Err() error { return nil }

// peeker is an Input whose next entry is read in advance. It is used in key order.
type peeker struct {
	in    Input
	entry Entry
	ok    bool
	begun bool // it is at an entry, or at the end
}

// seek makes the first entry at or after s the current one. Both the versions of one key in the input and the leaves with older ones may be
// many: it does not pass over the former again for each of the latter.
func (p *peeker) seek(s page.Separator) {
	if p.begun && (!p.ok || s.Compare(p.entry.Key, p.entry.Trailer) <= 0) {
		return
	}
	if !p.begun || !bytes.Equal(p.entry.Key, s.Key) {
		p.in.SeekGE(s.Key)
		p.next()
	}
	for p.begun = true; p.ok && s.Compare(p.entry.Key, p.entry.Trailer) > 0; {
		p.next()
	}
}

// skip skips all entries before bound.
func (p *peeker) skip(bound *page.Separator) {
	if bound != nil {
		p.seek(*bound)
	} else {
		p.ok = false
	}
}

func (p *peeker) next() { p.ok = p.in.Next(&p.entry) }

// before reports whether there is an entry before bound.
func (p *peeker) before(bound *page.Separator) bool {
	return p.ok && (bound == nil || bound.Compare(p.entry.Key, p.entry.Trailer) > 0)
}
