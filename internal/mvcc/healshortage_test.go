package mvcc

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestLeavesAreReadAgainWhenAFullDiskHasSpace: a start on a full disk does not look at the leaves that checkpoints have skipped. It does when the disk has
// space, and not only after the time between two looks.
func TestLeavesAreReadAgainWhenAFullDiskHasSpace(t *testing.T) {
	for _, full := range []bool{false, true} {
		t.Run(fmt.Sprintf("full=%v", full), func(t *testing.T) {
			fs := vfs.NewMem()
			fs.SetCapacity(64 << 20)
			o := tiny(fs)
			o.Storage.PageSize, o.Storage.DiskReserve = 512, storage.DiskReserveDerived
			s := mustStart(t, o)
			for i := range 200 {
				mustPut(t, s, fmt.Sprintf("key %03d", i), strings.Repeat("o", 20+i%5*40))
			}
			mustCheckpoint(t, s)
			mustClose(t, s)
			intact, every := dataFile(t, fs), 0
			damageLeaves(t, fs, 512, func(_, _ []byte) bool { every++; return every%3 == 0 })
			damaged := dataFile(t, fs)
			s = mustStart(t, o)
			for i := 0; i < 200; i += 7 {
				mustPut(t, s, fmt.Sprintf("key %03d", i), "new")
			}
			mustCheckpoint(t, s)
			if skipped := s.Stats().Storage.Damage.SkippedPages; skipped < 3 {
				t.Fatalf("%d pages are skipped", skipped)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			now := dataFile(t, fs)
			for at := 0; at+512 <= len(damaged); at += 512 {
				if !bytes.Equal(now[at:at+512], damaged[at:at+512]) { // it was used again
					copy(intact[at:at+512], damaged[at:])
				}
			}
			restoreBytes(t, fs, intact, damaged)
			if full {
				names, err := fs.List("db/wal")
				if err != nil {
					t.Fatal(err)
				}
				for _, name := range names {
					if strings.HasPrefix(name, "reserve-") {
						if err := fs.Remove("db/wal/" + name); err != nil {
							t.Fatal(err)
						}
					}
				}
				fs.LeaveFree(0)
			}
			s = mustOpen(t, o)
			if is := s.Shortage() != nil; is != full {
				t.Fatalf("shortage: %v", s.Shortage())
			}
			if full {
				time.Sleep(200 * time.Millisecond) // the look of the start is over
			}
			fs.SetCapacity(64 << 20)
			awaitExpiry(t, s, "the end of the shortage", func() bool { return s.Shortage() == nil })
			awaitExpiry(t, s, "the leaves", func() bool { return s.Stats().Storage.Damage.SkippedPages == 0 })
		})
	}
}
