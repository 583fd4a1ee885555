package server

import (
	"bytes"
	"fmt"
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/testseed"
)

// TestScansAreAdmittedWithWhatTheyHold: the buffer of a page, and the one from which it is sent, are never more than what the scan is
// admitted with, whatever the entries are; and pages of entries that fit, or of one larger entry, need no more than two pages.
func TestScansAreAdmittedWithWhatTheyHold(t *testing.T) {
	testseed.SkipUnderRace(t)
	for name, test := range map[string]struct{ entries, size int }{
		"tiny entries": {20_000, 0}, "entries of 100 bytes": {10_000, 100}, "entries of a few KiB": {300, 5 << 10},
		"entries of a quarter of a page": {20, 64 << 10}, "entries larger than a page": {4, 600 << 10},
	} {
		t.Run(name, func(t *testing.T) {
			h := mustStart(t)
			var mutations []*pb.Mutation
			flush := func() {
				if len(mutations) == 0 {
					return
				}
				if _, err := h.kv.BatchWrite(testContext(t), &pb.BatchWriteRequest{Mutations: mutations, Durability: pb.Durability_DURABILITY_ASYNC}); err != nil {
					t.Fatal(err)
				}
				mutations = nil
			}
			for i := range test.entries {
				mutations = append(mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "%06d", i), Value: bytes.Repeat([]byte("v"), test.size)})
				if len(mutations) == 500 || test.size > 10<<10 {
					flush()
				}
			}
			flush()
			sc, err := newScan(h.Server, new(pb.ScanRequest))
			if err != nil {
				t.Fatal(err)
			}
			sc.held = sc.pageBytes + pb.BufferBytes(sc.pageBytes)
			admitted := sc.held
			sc.access = &access{conn: new(connection)}
			if sc.executor, err = h.takeExecutor(); err != nil {
				t.Fatal(err)
			}
			if !h.admission.enter(sc.access.conn, shareScans, sc.held) {
				t.Fatal("no room for a scan")
			}
			defer sc.end()
			if err := sc.begin(testContext(t)); err != nil {
				t.Fatal(err)
			}
			pages, entries := 0, 0
			for more := true; more; pages++ {
				if more, err = sc.nextPage(testContext(t)); err != nil {
					t.Fatal(err)
				}
				entries += int(sc.page.count)
				if holds := cap(sc.page.buf) + pb.BufferBytes(5+sc.page.SizeVT()); holds > sc.held {
					t.Errorf("page %d holds %d bytes, and is admitted with %d", pages, holds, sc.held)
				}
			}
			if entries != test.entries {
				t.Errorf("%d of %d entries", entries, test.entries)
			}
			if most := max(admitted, test.size+pb.BufferBytes(test.size)); (test.size < 10<<10 || test.size > sc.pageBytes) && sc.held > most+most/16 {
				t.Errorf("%d bytes were admitted for two pages, and %d at the end", most, sc.held)
			}
		})
	}
}
