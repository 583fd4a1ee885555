package storage

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

const (
	// chunkBytesMax is how much of a load is sorted in memory at once. Larger chunks make fewer runs to merge; what is sorted
	// already goes to the end of the last run and makes none.
	chunkBytesMax = 32 << 20
	chunkBytesMin = 1 << 20
	// fanInMax is how many runs are merged at once: each takes a block of memory, and an entry a handful of comparisons.
	fanInMax = 32
)

// spool sorts what comes in with bounded memory: a chunk at a time in memory, chunks as runs in temporary files, runs into
// larger runs. Of several entries with one key the last one stays.
type spool struct {
	fs         vfs.FS
	dir        string
	inlineMax  int
	chunkBytes int
	files      int // created so far

	chunk   []byte // entries as in a run
	entries []spoolEntry
	sorted  bool // entries ascend strictly
	runs    []*run
	writer  *runWriter // of the newest run, which sorted chunks may still join; nil if there is none
	count   uint64     // entries that came in
}

// spoolEntry is an entry's place in the chunk, and bytes of its key as a number that compares as they do: the first ones, and for sorting those
// after the prefix that all keys of the chunk share.
type spoolEntry struct {
	head uint64
	at   uint32
	size uint32 // of the key
}

const spoolEntryBytes = 16

func newSpool(fs vfs.FS, dir string, pageSize, chunkBytes int) *spool {
	return &spool{fs: fs, dir: dir, inlineMax: page.InlineMax(pageSize), chunkBytes: chunkBytes, sorted: true}
}

// add takes an entry. It keeps neither slice.
func (s *spool) add(key, value []byte) error {
	if len(s.chunk) > 0 && len(s.chunk)+len(key)+len(value)+spoolEntryBytes*len(s.entries) > s.chunkBytes {
		if err := s.spill(); err != nil {
			return err
		}
	}
	if s.chunk == nil {
		s.chunk = make([]byte, 0, s.chunkBytes)
	}
	e := spoolEntry{head: keyHead(key), at: uint32(len(s.chunk)), size: uint32(len(key))}
	if n := len(s.entries); n > 0 && s.sorted {
		s.sorted = s.compare(&s.entries[n-1], e.head, key) < 0
	}
	s.chunk = appendRunEntry(s.chunk, key, value, false)
	s.entries = append(s.entries, e)
	s.count++
	return nil
}

func keyHead(key []byte) uint64 {
	if len(key) >= 8 {
		return binary.BigEndian.Uint64(key)
	}
	var padded [8]byte
	copy(padded[:], key)
	return binary.BigEndian.Uint64(padded[:])
}

// entry decodes an entry of the chunk.
func (s *spool) entry(e *spoolEntry) (key, value []byte) {
	b := s.chunk[e.at:]
	_, n := binary.Uvarint(b)
	v, m := binary.Uvarint(b[n:])
	b = b[n+m:]
	return b[:e.size:e.size], b[e.size : uint64(e.size)+v>>1]
}

func (s *spool) compare(e *spoolEntry, head uint64, key []byte) int {
	if c := cmp.Compare(e.head, head); c != 0 {
		return c
	}
	k, _ := s.entry(e)
	return bytes.Compare(k, key)
}

// spill writes the chunk out: behind the newest run if it continues that, else as a run of its own.
func (s *spool) spill() error {
	if len(s.entries) == 0 {
		return nil
	}
	if !s.sorted {
		s.sort()
	}
	first, _ := s.entry(&s.entries[0])
	if s.writer == nil || bytes.Compare(first, s.writer.last) <= 0 {
		if err := s.endRun(); err != nil {
			return err
		}
		var err error
		if s.writer, err = newRunWriter(s.fs, s.nextFile(), s.inlineMax); err != nil {
			return err
		}
	}
	if err := s.writeChunk(); err != nil {
		return err
	}
	s.chunk, s.entries, s.sorted = s.chunk[:0], s.entries[:0], true
	return nil
}

// sort sorts the chunk. Keys that are loaded together often begin alike, so that their first bytes decide nothing: the numbers that are
// compared are taken from behind what all keys of the chunk have in common.
func (s *spool) sort() {
	common := s.commonPrefix()
	for i := range s.entries {
		key, _ := s.entry(&s.entries[i])
		s.entries[i].head = keyHead(key[common:])
	}
	slices.SortFunc(s.entries, func(a, b spoolEntry) int {
		if a.head != b.head {
			return cmp.Compare(a.head, b.head)
		}
		ka, _ := s.entry(&a)
		kb, _ := s.entry(&b)
		return cmp.Or(bytes.Compare(ka, kb), cmp.Compare(a.at, b.at))
	})
}

// commonPrefix is how many bytes all keys of the chunk begin with alike.
func (s *spool) commonPrefix() int {
	prefix, _ := s.entry(&s.entries[0])
	for i := range s.entries {
		key, _ := s.entry(&s.entries[i])
		n := 0
		for n < min(len(prefix), len(key)) && prefix[n] == key[n] {
			n++
		}
		prefix = prefix[:n]
	}
	return len(prefix)
}

// writeChunk appends the sorted entries. Of equal keys, which stand in the order in which they came, the last one counts.
func (s *spool) writeChunk() error {
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

// endRun completes the newest run, and merges runs when there are enough of one size.
func (s *spool) endRun() error {
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

// fanIn is how many runs are merged at once, so that their blocks, each of which holds at least one value, take no more memory than two chunks.
func (s *spool) fanIn() int {
	longest := runBlockBytes
	for _, r := range s.runs {
		longest = max(longest, r.block)
	}
	return max(2, min(fanInMax, max(2*s.chunkBytes, fanInMax*runBlockBytes)/longest))
}

// mergeNewest replaces the newest n runs by one.
func (s *spool) mergeNewest(ctx context.Context, n int) error {
	from := s.runs[len(s.runs)-n:]
	merged, err := s.merge(ctx, from, nil)
	if err != nil {
		return err
	}
	merged.tier = from[0].tier + 1
	for _, r := range from {
		err = errors.Join(err, r.remove())
	}
	s.runs = append(s.runs[:len(s.runs)-n], merged)
	return err
}

// finish returns all that came in as one run, or nil if nothing did. The run belongs to the spool.
func (s *spool) finish(ctx context.Context) (*run, error) {
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

// place replaces the large values of the only run by references.
func (s *spool) place(ctx context.Context, place func(value []byte) (page.Ref, error)) (*run, error) {
	if s.runs[0].large == 0 {
		return s.runs[0], nil
	}
	placed, err := s.merge(ctx, s.runs, place)
	if err != nil {
		return nil, err
	}
	err = s.runs[0].remove()
	s.runs[0] = placed
	return placed, err
}

// merge writes the entries of runs, which are older first, as one run.
func (s *spool) merge(ctx context.Context, runs []*run, place func(value []byte) (page.Ref, error)) (*run, error) {
	w, err := newRunWriter(s.fs, s.nextFile(), s.inlineMax)
	if err != nil {
		return nil, err
	}
	m := newRunMerger(runs)
	for n := 0; err == nil && m.next(); n++ {
		c := m.at
		switch {
		case (place != nil || n%1024 == 0) && ctx.Err() != nil: // placed values may be large
			err = ctx.Err()
		case place != nil && !c.placed && len(c.value) > s.inlineMax:
			var ref page.Ref
			if ref, err = place(c.value); err == nil {
				err = w.add(c.key, ref[:], true)
			}
		default:
			err = w.add(c.key, c.value, c.placed)
		}
	}
	r, flushed := w.finish()
	if err = cmp.Or(err, m.err, flushed); err != nil {
		return nil, errors.Join(err, r.remove())
	}
	return r, nil
}

func (s *spool) nextFile() string {
	s.files++
	return path.Join(s.dir, fmt.Sprintf("%s%06d%s", spoolPrefix, s.files, spoolSuffix))
}

// close removes everything.
func (s *spool) close() error {
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

// removeSpools removes what a load that a crash ended has left.
func removeSpools(fs vfs.FS, dir string) error {
	names, err := fs.List(dir)
	for _, name := range names {
		if strings.HasPrefix(name, spoolPrefix) && strings.HasSuffix(name, spoolSuffix) {
			err = errors.Join(err, fs.Remove(path.Join(dir, name)))
		}
	}
	return err
}

// runMerger merges runs with a heap of their cursors.
type runMerger struct {
	heap []*mergeCursor // by key, then newest first
	at   *runCursor     // the entry at hand
	last []byte         // its key
	err  error
}

type mergeCursor struct {
	*runCursor
	age int // 0 for the newest run
}

func newRunMerger(runs []*run) *runMerger {
	m := &runMerger{}
	for i, r := range runs {
		c := &mergeCursor{runCursor: r.cursor(), age: len(runs) - 1 - i}
		if c.next() {
			m.heap = append(m.heap, c)
		}
		m.err = cmp.Or(m.err, c.err)
	}
	for i := len(m.heap)/2 - 1; i >= 0; i-- {
		m.down(i)
	}
	return m
}

// next moves to the next key. Of several entries with one key it takes the newest run's.
func (m *runMerger) next() bool {
	for m.err == nil {
		if m.at != nil {
			m.advance()
		}
		if len(m.heap) == 0 {
			return false
		}
		older := m.at != nil && bytes.Equal(m.heap[0].key, m.last)
		m.at = m.heap[0].runCursor
		if !older {
			m.last = append(m.last[:0], m.at.key...)
			return true
		}
	}
	return false
}

// advance moves the top cursor, whose entry was used.
func (m *runMerger) advance() {
	top := m.heap[0]
	if !top.next() {
		m.err = cmp.Or(m.err, top.err)
		n := len(m.heap) - 1
		m.heap[0] = m.heap[n]
		m.heap = m.heap[:n]
	}
	m.down(0)
}

func (m *runMerger) down(i int) {
	for {
		child := 2*i + 1
		if child >= len(m.heap) {
			return
		}
		if child+1 < len(m.heap) && m.less(child+1, child) {
			child++
		}
		if !m.less(child, i) {
			return
		}
		m.heap[i], m.heap[child] = m.heap[child], m.heap[i]
		i = child
	}
}

func (m *runMerger) less(i, j int) bool {
	a, b := m.heap[i], m.heap[j]
	if c := bytes.Compare(a.key, b.key); c != 0 {
		return c < 0
	}
	return a.age < b.age
}
