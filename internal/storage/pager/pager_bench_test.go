package pager

import (
	"context"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// benchPages is the number of pages of ten million short keys.
const benchPages = 200_000

// bigFile makes a file of live pages, of which every third is freed again.
func bigFile(b *testing.B, fs vfs.FS, size int) {
	b.Helper()
	p, err := Create(fs, toyFile, Options{PageSize: size})
	must(b, err)
	ck, err := p.Begin()
	must(b, err)
	w := ck.Writer()
	var first page.ID
	for range benchPages / 64 {
		e := ck.AllocExtent(64)
		if first == 0 {
			first = e.First
		}
		for i := range e.Count {
			id := e.First + page.ID(i)
			buf, err := w.Page(id)
			must(b, err)
			page.PutHeader(buf, page.Header{Type: page.TypeLeaf, ID: id, Checkpoint: ck.Number()})
			page.Seal(buf)
		}
	}
	must(b, w.Flush())
	must(b, ck.Commit(context.Background(), State{Root: first}))
	ck, err = p.Begin()
	must(b, err)
	for i := page.ID(3); i < benchPages; i += 3 {
		ck.Free(first + i)
	}
	must(b, ck.Commit(context.Background(), State{Root: first}))
	must(b, p.Close())
}

// BenchmarkOpen opens a file of 200,000 pages. The smallest pages make the largest map: 55 pages of it, against 4 at 8 KiB.
func BenchmarkOpen(b *testing.B) {
	mem := vfs.NewMem()
	bigFile(b, mem, 512)
	for b.Loop() {
		p, err := Open(mem, toyFile, Options{})
		must(b, err)
		must(b, p.Close())
	}
}

// BenchmarkCommit is what a checkpoint of this many pages costs in addition to writing them, in a file of
// 200,000 pages with holes.
func BenchmarkCommit(b *testing.B) {
	mem := vfs.NewMem()
	bigFile(b, mem, 512)
	for _, pages := range []int{1, 100, 10000} {
		b.Run(fmt.Sprintf("pages=%d", pages), func(b *testing.B) {
			p, err := Open(mem, toyFile, Options{})
			must(b, err)
			var old []page.ID
			for b.Loop() {
				ck, err := p.Begin()
				must(b, err)
				w := ck.Writer()
				ck.Free(old...)
				old = old[:0]
				for len(old) < pages {
					e := ck.AllocExtent(min(64, pages-len(old)))
					for i := range e.Count {
						id := e.First + page.ID(i)
						buf, err := w.Page(id)
						must(b, err)
						page.PutHeader(buf, page.Header{Type: page.TypeLeaf, ID: id, Checkpoint: ck.Number()})
						page.Seal(buf)
						old = append(old, id)
					}
				}
				must(b, w.Flush())
				must(b, ck.Commit(context.Background(), State{Root: old[0]}))
				p.ReuseAllFreed(p.Checkpoint())
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(pages), "ns/page")
			must(b, p.Close())
		})
	}
}
