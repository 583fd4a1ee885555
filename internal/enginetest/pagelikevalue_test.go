package enginetest

import (
	"bytes"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// TestAValueLikePagesHidesNothingFromAStartOrSalvage: a client wrote a large value with more intact pages of a smaller page size than the file
// has pages. A start without both slots takes the copies, and salvage without any superblock reads the pages of the file.
func TestAValueLikePagesHidesNothingFromAStartOrSalvage(t *testing.T) {
	const pageSize, small, pages, payload = 8192, 512, 40, 8192 - page.HeaderSize - 8 // of an overflow page: its last bytes
	build := func(value []byte) mvcc.Options {
		o := mvcc.Options{Storage: storage.Options{Dir: "db", FS: vfs.NewMem(), PageSize: pageSize, MemoryBytes: 64 << 20}}
		s := mustReopen(t, o)
		mustPut(t, s, "other", "value")
		mustPut(t, s, "k", string(value))
		mustClose(t, s)
		return o
	}
	value := bytes.Repeat([]byte{7}, pages*payload)
	file, forged, part := readFile(t, build(value).Storage.FS, dataFile), 0, 0 // where the pages of the value will be
	for at := 2 * pageSize; at < len(file); at += pageSize {
		if page.ReadHeader(file[at:]).Type != page.TypeOverflow {
			continue
		}
		for p := at + small; p < at+pageSize; p += small {
			if in := part*payload + p - at - (pageSize - payload); in+small <= len(value) {
				page.PutHeader(value[in:], page.Header{Type: page.TypeLeaf, ID: page.ID(p / small), Checkpoint: 1})
				page.Seal(value[in:][:small])
			}
		}
		part++
	}
	o := build(value)
	file = readFile(t, o.Storage.FS, dataFile)
	for id := page.ID(2); int(id+1)*small <= len(file); id++ {
		if page.Check(file[int(id)*small:][:small], id) == nil {
			forged++
		}
	}
	if forged < 2*len(file)/pageSize {
		t.Fatalf("%d pages in the value: the test tests nothing", forged)
	}

	flip(t, o.Storage.FS, 100)
	flip(t, o.Storage.FS, pageSize+100)
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	if got := s.Recovery().Repaired; len(got) != 2 {
		t.Errorf("repaired: %q", got)
	}
	mustClose(t, s)
	damageKind(t, nil, o.Storage.FS, pageSize, "superblocks")
	segments, err := wal.Segments(o.Storage.FS, "db") // which have all keys, too
	if err != nil {
		t.Fatal(err)
	}
	for i := range segments {
		if err := o.Storage.FS.Remove(segments[i].File); err != nil {
			t.Fatal(err)
		}
	}
	got, report := mustSalvage(t, o.Storage.FS)
	if err := equalMaps(map[string]string{"other": "value", "k": string(value)}, got); err != nil {
		t.Errorf("%.200v; lost %+v", err, report.Lost)
	}
	if report.FromScan != 2 {
		t.Errorf("%d keys come from the data file", report.FromScan)
	}
}
