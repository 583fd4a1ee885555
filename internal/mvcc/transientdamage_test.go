package mvcc

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestTransientFaultsHideNothingForGood: the leaves of a store cannot be read while it checkpoints changes to them. When they can, a start brings
// everything back: all keys, with the changes, and scans across all of them.
func TestTransientFaultsHideNothingForGood(t *testing.T) {
	fs := vfs.NewMem()
	o := tiny(fs)
	o.Storage.PageSize = 512
	s := mustStart(t, o)
	want := map[string]string{}
	for i := range 200 {
		key := fmt.Sprintf("key %03d", i)
		want[key] = strings.Repeat("o", 20+i%5*40)
		mustPut(t, s, key, want[key])
	}
	mustCheckpoint(t, s)
	mustClose(t, s)

	intact, every := dataFile(t, fs), 0
	if damageLeaves(t, fs, 512, func(_, _ []byte) bool { every++; return every%3 == 0 }) < 5 {
		t.Fatal("too few leaves are damaged")
	}
	damaged := dataFile(t, fs)
	s = mustStart(t, o)
	for i := 0; i < 200; i += 7 {
		key := fmt.Sprintf("key %03d", i)
		want[key] = strings.Repeat("n", i%3*70)
		mustPut(t, s, key, want[key])
	}
	mustCheckpoint(t, s)
	skipped := s.Stats().Storage.Damage.SkippedPages
	if err := s.Close(); err != nil || skipped < 3 {
		t.Fatalf("%d pages are skipped, %v", skipped, err)
	}

	now := dataFile(t, fs)
	for at := 0; at+512 <= len(damaged); at += 512 {
		if !bytes.Equal(now[at:at+512], damaged[at:at+512]) { // it was used again
			copy(intact[at:at+512], damaged[at:])
		}
	}
	restoreBytes(t, fs, intact, damaged)
	s = mustOpen(t, o)
	awaitExpiry(t, s, "the leaves", func() bool { return s.Stats().Storage.Damage.SkippedPages == 0 })
	got := dump(t, s)
	if len(got) != len(want) {
		t.Errorf("%d keys, expected %d", len(got), len(want))
	}
	for key, value := range want {
		if got[key] != value {
			t.Errorf("%q is %.10q, expected %.10q", key, got[key], value)
		}
	}
	mustClose(t, s)
}
