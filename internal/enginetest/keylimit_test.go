package enginetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// longestKeys are keys of n bytes: neighbours that differ in their last bytes, so that separators are as long as keys, among groups that
// differ in their first byte, so that pages cannot share a long prefix.
func longestKeys(n, groups, each int) (all []string) {
	for g := range groups {
		for i := range each {
			all = append(all, string(rune('a'+g))+strings.Repeat("x", n-4)+fmt.Sprintf("%03d", i))
		}
	}
	return all
}

// TestLongestKeyIsCheckpointedAtEveryPageSize is the promise of the key limit: what the store acknowledges, the tree takes. Both sides of the limit, with
// the largest value that a leaf holds, in such numbers that inner nodes divide, and in several versions, so that separators carry trailers.
func TestLongestKeyIsCheckpointedAtEveryPageSize(t *testing.T) {
	for pageSize := page.SizeMin; pageSize <= page.SizeMax; pageSize *= 2 {
		t.Run(fmt.Sprint(pageSize), func(t *testing.T) {
			t.Parallel()
			o := tiny(vfs.NewMem())
			o.Storage.PageSize = pageSize
			s := mustOpen(t, o)
			limit := storage.KeyBytesMax(pageSize)
			want := map[string]string{}
			x := mustSession(t, s)
			putAll := func(round int) {
				w := mvcc.Write{}
				for i, key := range longestKeys(limit, 8, 6) {
					size := []int{0, pageSize / 4, pageSize/4 + 1, 3}[(i+round)%4]
					want[key] = patterned(size, key)
					w.Set([]byte(key), []byte(want[key]))
				}
				if _, err := commitAndWait(x, &w); err != nil {
					t.Fatal(err)
				}
			}
			checkpoint := func() {
				t.Helper()
				if err := s.Checkpoint(context.Background()); err != nil {
					t.Fatalf("checkpoint with keys of %d bytes in pages of %d: %v", limit, pageSize, err)
				}
			}
			putAll(0)
			checkpoint()
			view := mustSession(t, s)
			at, err := view.OpenSnapshot(0)
			if err != nil {
				t.Fatal(err)
			}
			old := maps.Clone(want)
			for round := 1; round <= 3; round++ {
				putAll(round)
				checkpoint()
			}
			mustHold(t, s, want)
			for key, value := range old {
				if got := get(t, s, key, at); got != value {
					t.Fatalf("a snapshot before reads %d bytes, want %d", len(got), len(value))
				}
			}
			view.CloseSnapshot()
			view.Close()
			w := mvcc.Write{}
			w.Set([]byte(strings.Repeat("k", limit+1)), nil)
			var refused *mvcc.LimitError
			if _, err := x.Commit(context.Background(), &w); !errors.As(err, &refused) || refused.Limit != limit || refused.Got != limit+1 {
				t.Fatalf("a key of %d bytes: %v, want a LimitError of %d", limit+1, err, limit)
			}
			x.Close()
			mustClose(t, s)
			s = mustOpen(t, o)
			mustHold(t, s, want)
		})
	}
}

// TestKeyLimitAboveTheTreesIsRefusedAtOpen keeps a configuration from promising what the tree cannot hold.
func TestKeyLimitAboveTheTreesIsRefusedAtOpen(t *testing.T) {
	for _, pageSize := range []int{page.SizeMin, page.SizeDefault, page.SizeMax} {
		o := tiny(vfs.NewMem())
		o.Storage.PageSize, o.Limits.KeyBytes = pageSize, page.KeySizeMax(pageSize)
		var refused *mvcc.LimitError
		if s, err := mvcc.Open(o); !errors.As(err, &refused) {
			t.Fatalf("pages of %d bytes, keys of %d: opened %v, %v", pageSize, o.Limits.KeyBytes, s != nil, err)
		}
		o.Limits.KeyBytes--
		mustClose(t, mustOpen(t, o))
	}
}
