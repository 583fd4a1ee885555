package blob

import (
	"errors"
	"maps"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// countingFS counts the submissions of reads.
type countingFS struct {
	vfs.FS
	reads int
}

type countingFile struct {
	vfs.File
	fs *countingFS
}

func (c *countingFS) Open(name string, mode vfs.Mode) (vfs.File, error) {
	f, err := c.FS.Open(name, mode)
	return countingFile{f, c}, err
}

func (f countingFile) ReadAt(p []byte, off int64) (int, error) {
	f.fs.reads++
	return f.File.ReadAt(p, off)
}

func (f countingFile) ReadBatch(reqs []vfs.Request) error {
	f.fs.reads++
	return f.File.ReadBatch(reqs)
}

// TestDropsReadInFewSubmissions: a value that has overflow pages, or is cut, is known by what its pages have, and a device may take a
// millisecond for each submission.
func TestDropsReadInFewSubmissions(t *testing.T) {
	const values, ahead = 640, 32
	for _, pageSize := range []int{512, 8192} {
		fs := &countingFS{FS: vfs.NewMem()}
		b := mustCreate(t, fs, pageSize)
		all := change{}
		for i := range values {
			all[i] = value(i, 0, pageSize*(1+i%5)/2+i)
		}
		must(t, b.checkpoint(all))
		ck, err := b.p.Begin()
		must(t, err)
		batch := b.s.Begin(ck)
		fs.reads = 0
		for names := range slices.Chunk(slices.Sorted(maps.Keys(b.refs)), ahead) {
			var refs []page.Ref
			for _, name := range names {
				refs = append(refs, b.refs[name])
			}
			batch.ReadAhead(refs)
			for _, r := range refs {
				must(t, batch.Drop(r))
			}
		}
		if limit := 3 * values / ahead; fs.reads > limit {
			t.Errorf("%d values on pages of %d bytes were dropped with %d submissions of reads, at most %d", values, pageSize, fs.reads, limit)
		}
		must(t, errors.Join(batch.Finish(t.Context(), 0), ck.Commit(t.Context(), pager.State{Epoch: 1})))
		b.refs = map[int]page.Ref{}
		must(t, b.audit())
		if st := b.p.Stats(); b.s.state.Blobs+b.s.state.OverflowPages+b.s.state.BlobPages != 0 {
			t.Errorf("left: %+v, %+v", b.s.state, st)
		}
		must(t, b.p.Close())
	}
}
