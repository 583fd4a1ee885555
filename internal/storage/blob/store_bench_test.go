package blob

import (
	"context"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

var benchLengths = []int{2100, 3000, 5000, 9000, 20_000, 1 << 20}

// BenchmarkStore writes values of one length in checkpoints of 4 MiB, and reports the part of blob pages that
// they fill.
func BenchmarkStore(b *testing.B) {
	for _, n := range benchLengths {
		b.Run(fmt.Sprintf("value=%d", n), func(b *testing.B) {
			p, s := benchStore(b)
			v := value(1, 1, n)
			perBatch := max(1, 4<<20/n)
			b.SetBytes(int64(n))
			b.ReportAllocs()
			for done := 0; done < b.N; done += perBatch {
				ck, err := p.Begin()
				must(b, err)
				batch := s.Begin(ck)
				for range min(perBatch, b.N-done) {
					_, err := batch.Store(v)
					must(b, err)
				}
				must(b, batch.Finish(b.Context(), 0))
				must(b, ck.Commit(context.Background(), pager.State{}))
				if done > 256<<20/n { // bound the memory of the file system: begin again
					b.StopTimer()
					p, s = benchStore(b)
					b.StartTimer()
				}
			}
			b.ReportMetric(s.Stats().FillFactor, "fill")
		})
	}
}

// BenchmarkAppend reads values through a source that has every page in memory.
func BenchmarkAppend(b *testing.B) {
	for _, n := range benchLengths {
		b.Run(fmt.Sprintf("value=%d", n), func(b *testing.B) {
			p, s := benchStore(b)
			ck, err := p.Begin()
			must(b, err)
			batch := s.Begin(ck)
			refs := make([]page.Ref, max(2, 4<<20/n))
			for i := range refs {
				refs[i], err = batch.Store(value(i, 1, n))
				must(b, err)
			}
			must(b, batch.Finish(b.Context(), 0))
			must(b, ck.Commit(context.Background(), pager.State{}))
			src := benchSource{s.Direct(), map[page.ID][]byte{}}
			buf := make([]byte, 0, n)
			b.SetBytes(int64(n))
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				_, err := s.Append(buf, refs[i%len(refs)], &src)
				must(b, err)
			}
		})
	}
}

// benchSource keeps every blob page that was read.
type benchSource struct {
	direct *Direct
	pages  map[page.ID][]byte
}

func (s *benchSource) BlobPage(id page.ID) ([]byte, error) {
	if p, ok := s.pages[id]; ok {
		return p, nil
	}
	p, err := s.direct.BlobPage(id)
	s.pages[id] = append([]byte(nil), p...)
	return s.pages[id], err
}

func benchStore(b *testing.B) (*pager.Pager, *Store) {
	b.Helper()
	p, err := pager.Create(vfs.NewMem(), bagFile, pager.Options{PageSize: 8192})
	must(b, err)
	s, err := Open(&p.Reader)
	must(b, err)
	return p, s
}
