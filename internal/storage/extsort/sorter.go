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
// There are two chunks: while one is filled, a goroutine sorts the other and writes it.
//
// Memory is bounded: two chunks, and one block and a few index pages for each run of a merge. Temporary files are never synced
// and mean nothing after a restart; the owner of the directory removes what a crash left.
//
// The package knows bytes and files, nothing of versions or pages.
package extsort

import (
	"bytes"
	"context"
	"errors"

	"github.com/epochkv/epochkv/internal/vfs"
)

// fanInMax is the largest number of runs that are merged at once. Each takes a block of memory, and each
// entry about log2(fanInMax) comparisons.
const fanInMax = 32

// Options of a Sorter. All fields are required.
type Options struct {
	FS         vfs.FS
	FileName   func(number int) string // path of the temporary file with this number; numbers begin at 1
	ChunkBytes int                     // size of each of the two chunks
	InlineMax  int                     // length of the longest value, in bytes, that is not large (see Run.ReplaceLarge)
}

// Sorter takes entries in any order and returns them as one run. It is for one goroutine.
type Sorter struct {
	options Options
	filling *chunk     // takes entries
	spare   *chunk     // the other one; the goroutine has it while spilled is not nil
	spilled chan error // gets the result of the goroutine; nil without one
	err     error      // of a chunk that could not be written: final
	ctx     context.Context
	cancel  context.CancelFunc // of ctx: ends the merge of the goroutine

	// Belong to the goroutine while there is one.
	files  int // created so far
	runs   []*Run
	writer *runWriter // of the newest run, while sorted chunks may still continue it; nil otherwise
}

// New returns a Sorter without entries. Close removes its temporary files.
func New(o Options) *Sorter {
	s := &Sorter{options: o, filling: &chunk{}, spare: &chunk{}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// Cancel ends the merge of runs that is under way, which may take minutes, and all later ones: Add and
// Finish return context.Canceled. It may be called by any goroutine, also while another one is in Add.
func (s *Sorter) Cancel() { s.cancel() }

// Add takes an entry. It keeps neither slice. An error is one of the file system, perhaps of an entry that
// was added before.
func (s *Sorter) Add(key, value []byte) error {
	if s.filling.bytesWith(key, value) > s.options.ChunkBytes && len(s.filling.entries) > 0 {
		if err := s.spillAside(); err != nil {
			return err
		}
	}
	s.filling.add(key, value, s.options.ChunkBytes)
	return nil
}

// spillAside lets a goroutine spill the chunk that was filled, and begins to fill the other one.
func (s *Sorter) spillAside() error {
	if err := s.wait(); err != nil {
		return err
	}
	full, done := s.filling, make(chan error, 1)
	s.filling, s.spare, s.spilled = s.spare, full, done
	go func() { done <- s.spill(s.ctx, full) }()
	return nil
}

// wait waits until no goroutine spills.
func (s *Sorter) wait() error {
	if s.spilled != nil {
		s.err = <-s.spilled
		s.spilled = nil
	}
	return s.err
}

// Finish sorts what was added and returns it as one run, or nil if nothing was added. The run belongs to
// the Sorter. If ctx ends the merge of runs, the error is its cause.
func (s *Sorter) Finish(ctx context.Context) (*Run, error) {
	defer context.AfterFunc(ctx, s.cancel)()
	err := s.wait()
	if err == nil {
		err = s.spill(ctx, s.filling)
	}
	if err == nil {
		err = s.endRun(ctx)
	}
	s.filling, s.spare = &chunk{}, &chunk{}
	for err == nil && len(s.runs) > 1 {
		n := min(len(s.runs), s.fanIn())
		err = s.mergeRuns(ctx, s.smallest(n), n)
	}
	if errors.Is(err, context.Canceled) && ctx.Err() != nil { // the goroutine knows only that it was cancelled
		err = context.Cause(ctx)
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
	s.cancel()
	_ = s.wait() // Add or Finish returned its error, or nothing is made of the entries
	var err error
	if s.writer != nil {
		err = s.writer.run.remove()
	}
	for _, r := range s.runs {
		err = errors.Join(err, r.remove())
	}
	s.writer, s.runs, s.filling, s.spare = nil, nil, nil, nil
	return err
}

// spill writes the chunk to the newest run if it continues that, else to a run of its own.
func (s *Sorter) spill(ctx context.Context, c *chunk) error {
	if len(c.entries) == 0 {
		return nil
	}
	if !c.ascending {
		c.sort()
	}
	first, _ := c.entry(&c.entries[0])
	if s.writer == nil || bytes.Compare(first, s.writer.lastKey) <= 0 {
		if err := s.endRun(ctx); err != nil {
			return err
		}
		var err error
		if s.writer, err = s.newWriter(); err != nil {
			return err
		}
	}
	if err := s.writeChunk(c); err != nil {
		return err
	}
	c.reset()
	return nil
}

// writeChunk appends the sorted entries to the newest run: of equal keys only the last one.
func (s *Sorter) writeChunk(c *chunk) error {
	if c.ascending {
		return s.writer.addChunk(c)
	}
	for i := range c.entries {
		key, value := c.entry(&c.entries[i])
		if i+1 < len(c.entries) && c.entries[i+1].head == c.entries[i].head {
			if next, _ := c.entry(&c.entries[i+1]); bytes.Equal(next, key) {
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
func (s *Sorter) endRun(ctx context.Context) error {
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
		if err := s.mergeRuns(ctx, n-fanIn, fanIn); err != nil {
			return err
		}
	}
}

func (s *Sorter) newWriter() (*runWriter, error) {
	s.files++
	return newRunWriter(s.options.FS, s.options.FileName(s.files), s.options.InlineMax)
}
