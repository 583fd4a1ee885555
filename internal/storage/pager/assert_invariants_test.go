//go:build invariants

package pager

import (
	"context"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestExpensiveAssertionsPanic plants a bug for each assertion that only builds with the tag have.
func TestExpensiveAssertionsPanic(t *testing.T) {
	for want, plant := range map[string]func(y *toy, ck *Checkpoint){
		"in no set or in a wrong one": func(y *toy, ck *Checkpoint) {
			y.p.space.busy.Add(300)
			must(t, ck.Commit(context.Background(), y.p.State()))
		},
		"are in two sets": func(y *toy, ck *Checkpoint) {
			y.p.space.pending = append(y.p.space.pending, pendingPages{pages: []page.ID{y.root}})
			must(t, ck.Commit(context.Background(), y.p.State()))
		},
		"are taken and no checkpoint is open": func(y *toy, ck *Checkpoint) {
			ck.AllocExtent(3)
			ck.taken = nil
			must(t, ck.Commit(context.Background(), y.p.State()))
		},
		"reads back different": func(y *toy, ck *Checkpoint) {
			id := ck.AllocExtent(1).First
			buf := vfs.AlignedBuffer(512)
			page.PutHeader(buf, page.Header{Type: page.TypeLeaf, ID: id, Checkpoint: ck.Number()})
			page.Seal(buf)
			y.p.file = lostWrites{y.p.file}
			w := ck.Writer()
			must(t, w.Write(id, buf))
			must(t, w.Flush())
		},
	} {
		t.Run(want, func(t *testing.T) {
			y := createToy(t, vfs.NewMem(), 512)
			must(t, y.checkpoint(7, []int{0}, nil, 1))
			ck, err := y.p.Begin()
			must(t, err)
			defer func() {
				if got, _ := recover().(string); !strings.Contains(got, want) {
					t.Fatalf("panic %q, want %q in it", got, want)
				}
			}()
			plant(y, ck)
		})
	}
}

// lostWrites acknowledges writes and does nothing.
type lostWrites struct{ vfs.File }

func (lostWrites) WriteBatch([]vfs.Request) error { return nil }
