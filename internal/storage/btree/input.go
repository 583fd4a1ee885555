package btree

import (
	"bytes"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// Entry is one version on its way into the tree. A Large entry's value is a page.Ref that was placed already.
type Entry struct {
	Key     []byte
	Value   []byte
	Trailer keys.Trailer
	Large   bool
}

// Input is a sorted stream of versions: key ascending, newest first. Every worker of a merge has its own.
//
// Key and value of an entry need live only until the following Next, except for values longer than page.InlineMax, which must
// stay until Merge returns: they are placed when their leaf gets its id. A source that cannot promise that places
// them itself and delivers Large entries.
type Input interface {
	// SeekGE moves in front of the first entry whose key is not less than key.
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

// peeker is an Input with its next entry in sight.
type peeker struct {
	in    Input
	entry Entry
	ok    bool
}

// seek makes the first entry at or behind s the current one.
func (p *peeker) seek(s page.Separator) {
	p.in.SeekGE(s.Key)
	for p.next(); p.ok && s.Compare(p.entry.Key, p.entry.Trailer) > 0; {
		p.next()
	}
}

// skip passes all entries in front of bound.
func (p *peeker) skip(bound *page.Separator) {
	if bound != nil {
		p.seek(*bound)
	} else {
		p.ok = false
	}
}

func (p *peeker) next() { p.ok = p.in.Next(&p.entry) }

// before reports whether there is an entry in front of bound.
func (p *peeker) before(bound *page.Separator) bool {
	return p.ok && (bound == nil || bound.Compare(p.entry.Key, p.entry.Trailer) > 0)
}
