package enginetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestCancelledBulkLoadsFreeTheirPages cancels several bulk loads late. Afterwards the file is as
// long as after the first, and all pages and blobs are accounted for.
func TestCancelledBulkLoadsFreeTheirPages(t *testing.T) {
	fs := vfs.NewMem()
	s := mustOpen(t, tiny(fs))
	want := map[string]string{}
	for i := range 300 {
		want[fmt.Sprintf("key-%05d", i)] = strings.Repeat("v", 3000)
	}
	mustLoad(t, s, want)
	sizes := []int64{}
	for round := range 12 {
		l, err := s.BeginBulkLoad()
		if err != nil {
			t.Fatal(err)
		}
		for i := range 500 {
			if err := l.Add(fmt.Appendf(nil, "key-%05d", i), []byte(strings.Repeat("l", 9000))); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		fs.SetHook(func(op vfs.Op, name string) {
			if op == vfs.OpSyncData && name == dataFile {
				cancel()
			}
		})
		_, err = l.Commit(ctx)
		fs.SetHook(nil)
		cancel()
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		if err == nil {
			t.Fatal("the bulk load was not cancelled")
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		mustPut(t, s, "n", fmt.Sprint(round))
		want["n"] = fmt.Sprint(round)
		if err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
		mustVerify(t, s)
		size, err := fs.Size(dataFile)
		if err != nil {
			t.Fatal(err)
		}
		sizes = append(sizes, size)
	}
	mustHold(t, s, want)
	t.Log(sizes)
	if sizes[11] > sizes[1]+sizes[1]/8 {
		t.Errorf("the file grows with each cancelled bulk load: %v", sizes)
	}
}
