package pager

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestBrokenInvariantStopsThePager plants a bug for each assertion that is in all builds: the pager takes no checkpoint after it,
// and the file holds the state before or the one that was being written.
func TestBrokenInvariantStopsThePager(t *testing.T) {
	writePage := func(ck *Checkpoint, id, as page.ID, checkpoint uint64) {
		w := ck.Writer()
		buf, err := w.compose(id)
		if err != nil {
			return
		}
		page.PutHeader(buf, page.Header{Type: page.TypeLeaf, ID: as, Checkpoint: checkpoint})
		page.Seal(buf)
		_ = w.Flush()
	}
	for want, plant := range map[string]func(y *toy, ck *Checkpoint, state *State){
		"is taken but was not free": func(y *toy, ck *Checkpoint, _ *State) {
			y.p.space.busy.Remove(int(y.root))
			y.p.space.from = [runPreferred + 1]int{}
			for range y.root {
				ck.AllocExtent(1)
			}
		},
		"becomes free but was free or live": func(y *toy, ck *Checkpoint, _ *State) {
			y.p.space.busy.Remove(int(ck.AllocExtent(1).First))
		},
		"becomes pending but was free or live": func(y *toy, ck *Checkpoint, _ *State) {
			ck.freedLive = append(ck.freedLive, y.root)
		},
		"epoch 6 would follow epoch 7": func(_ *toy, _ *Checkpoint, state *State) { state.Epoch = 6 },
		"checkpoint 4 would follow checkpoint 2": func(_ *toy, ck *Checkpoint, _ *State) {
			ck.number++
		},
		"superblock 3 would overwrite superblock 2 on page": func(y *toy, _ *Checkpoint, _ *State) {
			sb := *y.p.current()
			sb.nextCopy = sb.copy
			y.p.newest.Store(&sb)
		},
		"page 99, which the superblock names, is not live": func(_ *toy, ck *Checkpoint, _ *State) {
			ck.SetBlobs(BlobState{Table: ArrayRoot{Page: 99, Depth: 1}})
		},
		"page 5 of checkpoint 3 would be written as page 4": func(_ *toy, ck *Checkpoint, _ *State) {
			id := ck.AllocExtent(1).First
			writePage(ck, id, id+1, ck.number)
		},
		"of checkpoint 2 would be written as page": func(_ *toy, ck *Checkpoint, _ *State) {
			id := ck.AllocExtent(1).First
			writePage(ck, id, id, ck.number-1)
		},
		"planted": func(_ *toy, ck *Checkpoint, _ *State) {
			_ = ck.Fail(errors.New("planted"))
		},
	} {
		t.Run(want, func(t *testing.T) {
			mem := vfs.NewMem()
			y := createToy(t, mem, 512)
			must(t, y.checkpoint(7, []int{0}, nil, 1))
			ck, err := y.p.Begin()
			must(t, err)
			state := y.p.State()
			plant(y, ck, &state)
			err = ck.Commit(context.Background(), state)
			if _, begin := y.p.Begin(); !errors.Is(begin, ErrFailed) || !errors.Is(begin, ErrBroken) || !strings.Contains(begin.Error(), want) {
				t.Fatalf("Commit: %v, Begin afterwards: %v", err, begin)
			}
			must(t, y.p.Close())
			y, err = openToy(mem)
			must(t, err)
			if len(y.leaves) != 1 {
				t.Fatalf("the file holds %v", y.leaves)
			}
		})
	}
}
