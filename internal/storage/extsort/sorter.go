// Package extsort sorts more entries than fit in memory, with temporary files: an external merge sort.
//
// Terms: a chunk is a part of the input that is sorted in memory. A run is a temporary file of sorted
// entries. A run of tier 0 comes from chunks, a run of tier n+1 from the merge of runs of tier n.
//
//	Add ──► chunk ──sort──► run (tier 0) ──merge──► run (tier 1) ──merge──► ... ──► one run
//
// Sorted input needs no merge: a chunk that continues the newest run is appended to it. Of several
// entries with the same key, the one that was added last remains.
//
// Memory is bounded: a chunk, and one block for each run of a merge. Temporary files are never synced
// and mean nothing after a restart; the owner of the directory removes what a crash left.
//
// The package knows bytes and files, nothing of versions or pages.
package extsort

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// fanInMax is the largest number of runs that are merged at once. Each takes a block of memory, and each
// entry about log2(fanInMax) comparisons.
const fanInMax = 32

// Options of a Sorter. All fields are required.
type Options struct {
	FS         vfs.FS
	FileName   func(number int) string // path of the temporary file with this number; numbers begin at 1
	ChunkBytes int                     // size of the chunks that are sorted in memory
	InlineMax  int                     // length of the longest value, in bytes, that is not large (see Run.ReplaceLarge)
}

// Sorter takes entries in any order and returns them as one run. It is for one goroutine.
type Sorter struct {
	options Options
	files   int // created so far

	chunk   []byte // entries, encoded as in a run
	entries []chunkEntry
	sorted  bool // the entries of the chunk ascend strictly
	runs    []*Run
	writer  *runWriter // of the newest run, while sorted chunks may still continue it; nil otherwise
}

// chunkEntry is the offset of an entry in the chunk, with eight bytes of its key as a number that compares
// like them: the first ones, and while a chunk is sorted those after its common prefix.
type chunkEntry struct {
	head    uint64
	offset  uint32
	keySize uint32
}

const chunkEntryBytes = 16

// New returns a Sorter without entries. Close removes its temporary files.
func New(o Options) *Sorter { return &Sorter{options: o, sorted: true} }

// Add takes an entry. It keeps neither slice. An error is one of the file system.
func (s *Sorter) Add(key, value []byte) error {
	if len(s.chunk) > 0 && len(s.chunk)+len(key)+len(value)+chunkEntryBytes*len(s.entries) > s.options.ChunkBytes {
		if err := s.spill(); err != nil {
			return err
		}
	}
	if s.chunk == nil {
		s.chunk = make([]byte, 0, s.options.ChunkBytes)
	}
	e := chunkEntry{head: keys.WordAfter(key, 0), offset: uint32(len(s.chunk)), keySize: uint32(len(key))}
	if n := len(s.entries); n > 0 && s.sorted {
		s.sorted = s.compare(&s.entries[n-1], e.head, key) < 0
	}
	s.chunk = appendEntry(s.chunk, key, value, false)
	s.entries = append(s.entries, e)
	return nil
}

// Finish sorts what was added and returns it as one run, or nil if nothing was added. The run belongs to
// the Sorter.
func (s *Sorter) Finish(ctx context.Context) (*Run, error) {
	err := s.spill()
	if err == nil {
		err = s.endRun()
	}
	s.chunk, s.entries = nil, nil
	for err == nil && len(s.runs) > 1 {
		err = s.mergeNewest(ctx, min(len(s.runs), s.fanIn()))
	}
	if err != nil || len(s.runs) == 0 {
		return nil, err
	}
	return s.runs[0], nil
}

// ReplaceLarge replaces each large value of the finished run by what replace appends to dst for it. It
// returns the run that takes the place of the finished one.
func (s *Sorter) ReplaceLarge(ctx context.Context, replace func(dst, key, value []byte) ([]byte, error)) (*Run, error) {
	if s.runs[0].Large == 0 {
		return s.runs[0], nil
	}
	replaced, err := s.merge(ctx, s.runs, replace)
	if err != nil {
		return nil, err
	}
	err = s.runs[0].remove()
	s.runs[0] = replaced
	return replaced, err
}

// Close removes all temporary files.
func (s *Sorter) Close() error {
	var err error
	if s.writer != nil {
		err = s.writer.run.remove()
	}
	for _, r := range s.runs {
		err = errors.Join(err, r.remove())
	}
	s.writer, s.runs, s.chunk, s.entries = nil, nil, nil, nil
	return err
}

// entry decodes an entry of the chunk.
func (s *Sorter) entry(e *chunkEntry) (key, value []byte) {
	b := s.chunk[e.offset:]
	_, n := binary.Uvarint(b)
	v, m := binary.Uvarint(b[n:])
	b = b[n+m:]
	return b[:e.keySize:e.keySize], b[e.keySize : uint64(e.keySize)+v>>1]
}

func (s *Sorter) compare(e *chunkEntry, head uint64, key []byte) int {
	if c := cmp.Compare(e.head, head); c != 0 {
		return c
	}
	k, _ := s.entry(e)
	return bytes.Compare(k, key)
}

// sortChunk sorts the entries by key; entries with the same key keep the order in which they were added.
// The keys of one load often begin alike, so the numbers that are compared come from the bytes after the
// prefix that all keys of the chunk share.
func (s *Sorter) sortChunk() {
	key := func(i int) []byte {
		k, _ := s.entry(&s.entries[i])
		return k
	}
	common := keys.CommonPrefix(len(s.entries), key)
	for i := range s.entries {
		s.entries[i].head = keys.WordAfter(key(i), common)
	}
	slices.SortFunc(s.entries, func(a, b chunkEntry) int {
		if a.head != b.head {
			return cmp.Compare(a.head, b.head)
		}
		ka, _ := s.entry(&a)
		kb, _ := s.entry(&b)
		return cmp.Or(bytes.Compare(ka, kb), cmp.Compare(a.offset, b.offset))
	})
}

// spill writes the chunk to the newest run if it continues that, else to a run of its own.
func (s *Sorter) spill() error {
	if len(s.entries) == 0 {
		return nil
	}
	if !s.sorted {
		s.sortChunk()
	}
	first, _ := s.entry(&s.entries[0])
	if s.writer == nil || bytes.Compare(first, s.writer.lastKey) <= 0 {
		if err := s.endRun(); err != nil {
			return err
		}
		var err error
		if s.writer, err = s.newWriter(); err != nil {
			return err
		}
	}
	if err := s.writeChunk(); err != nil {
		return err
	}
	s.chunk, s.entries, s.sorted = s.chunk[:0], s.entries[:0], true
	return nil
}

// writeChunk appends the sorted entries to the newest run: of equal keys only the last one.
func (s *Sorter) writeChunk() error {
	if s.sorted {
		return s.writer.addChunk(s.chunk, s.entries, s.entry)
	}
	for i := range s.entries {
		key, value := s.entry(&s.entries[i])
		if i+1 < len(s.entries) && s.entries[i+1].head == s.entries[i].head {
			if next, _ := s.entry(&s.entries[i+1]); bytes.Equal(next, key) {
				continue
			}
		}
		if err := s.writer.add(key, value, false); err != nil {
			return err
		}
	}
	return nil
}

// endRun completes the newest run, and merges runs while there are enough of one tier.
func (s *Sorter) endRun() error {
	if s.writer == nil {
		return nil
	}
	r, err := s.writer.finish()
	s.writer = nil
	s.runs = append(s.runs, r)
	if err != nil {
		return err
	}
	for {
		n, fanIn := len(s.runs), s.fanIn()
		if n < fanIn || s.runs[n-fanIn].tier != s.runs[n-1].tier {
			return nil
		}
		if err := s.mergeNewest(context.Background(), fanIn); err != nil {
			return err
		}
	}
}

func (s *Sorter) newWriter() (*runWriter, error) {
	s.files++
	return newRunWriter(s.options.FS, s.options.FileName(s.files), s.options.InlineMax)
}
