package wal

import (
	"path"
	"slices"
	"strings"
	"testing"
)

// TestReserveTakesNoSegmentThatWasTruncated: the reserve has files with all their blocks. A segment whose torn tail was
// truncated at the start of the log does not become one of them.
func TestReserveTakesNoSegmentThatWasTruncated(t *testing.T) {
	fs, rec, _ := smallLog(t, 30, false)
	last := rec.Segments[len(rec.Segments)-1]
	for _, p := range locationsOf(t, fs, rec) {
		if p.file == last.File {
			_ = patch(t, fs, last.File, p.off+20, make([]byte, SegmentBytesMin-p.off-20))
			break
		}
	}
	rec, _ = mustReplay(t, fs, 0)
	if rec.Torn == nil {
		t.Fatal("no torn tail")
	}
	opts := testOptions2(fs)
	opts.Reserve = len(rec.Segments)
	a, err := startLog(opts, rec)
	if err != nil {
		t.Fatal(err)
	}
	a.mustAppend(t, []byte("body"))
	a.mustSealAndTruncate(t)
	mustClose(t, a.log) // the goroutine that prepares segments takes recyclable files until then
	owned := append(slices.Clone(a.log.preallocator.reserve.files), a.log.preallocator.recyclable...)
	for _, name := range owned {
		if size, err := fs.Size(name); err != nil || size != int64(opts.SegmentBytes) {
			t.Errorf("%s has %d bytes of %d, %v", name, size, opts.SegmentBytes, err)
		}
	}
	names, err := fs.List(Dir(testDir))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasPrefix(name, reservePrefix) && !slices.Contains(owned, path.Join(Dir(testDir), name)) {
			t.Errorf("%s is neither of the reserve nor recyclable", name)
		}
	}
	if kept, _ := a.log.Reserve(); kept != opts.Reserve {
		t.Errorf("the reserve has %d files, want %d", kept, opts.Reserve)
	}
}
