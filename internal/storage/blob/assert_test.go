package blob

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestBrokenAccountsStopTheStore plants a bug for each assertion of a batch: Finish refuses, and the pager takes no checkpoint
// after it.
func TestBrokenAccountsStopTheStore(t *testing.T) {
	for want, plant := range map[string]func(b *bag, batch *Batch){
		"blob id 0 is given to a new blob while it is in use": func(b *bag, batch *Batch) {
			b.s.used.Remove(0)
			batch.newID()
		},
		"loses 152 bytes of fragments and has 0": func(b *bag, batch *Batch) {
			batch.subtract(b.s.table.locationOf(0))
			batch.subtract(b.s.table.locationOf(0))
		},
		"page 99 loses 20 bytes of fragments and has 1": func(b *bag, batch *Batch) {
			batch.fresh[99] = 1
			batch.subtract(makeLocation(99, 0, 20, fragmentWhole))
		},
		"2 blob ids are in use, and blobs have 1": func(b *bag, _ *Batch) { b.s.used.Add(70) },
		"fragment 0 is still queued": func(_ *bag, batch *Batch) {
			batch.changes[0] = locationQueued
		},
	} {
		t.Run(want, func(t *testing.T) {
			b := mustCreate(t, vfs.NewMem(), 512)
			must(t, b.checkpoint(change{0: value(0, 0, 140)}))
			ck, err := b.p.Begin()
			must(t, err)
			batch := b.s.Begin(ck)
			plant(b, batch)
			if err := batch.Finish(t.Context(), 0); !errors.Is(err, ErrAccounts) || !errors.Is(err, pager.ErrBroken) || !strings.Contains(err.Error(), want) {
				t.Fatalf("Finish: %v", err)
			}
			if err := ck.Commit(context.Background(), b.p.State()); !errors.Is(err, pager.ErrFailed) {
				t.Fatalf("Commit: %v", err)
			}
			if _, err := b.p.Begin(); !errors.Is(err, pager.ErrBroken) {
				t.Fatalf("Begin afterwards: %v", err)
			}
		})
	}
}
