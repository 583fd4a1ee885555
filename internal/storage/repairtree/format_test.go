package repairtree

import (
	"bytes"
	"encoding/hex"
	"reflect"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
)

func examples() []Page {
	separator := func(key string, t keys.Trailer) page.Separator { return page.Separator{Key: []byte(key), Trailer: t} }
	upper := separator("\x10m", keys.MakeTrailer(70, keys.KindSet)-1)
	return []Page{
		{ID: 17, Level: 0, Checkpoint: 12, Lower: separator("\x10f", page.NoTrailer), Upper: &upper, Reason: "checksum mismatch"},
		{ID: 1 << 38, Level: 31, Checkpoint: 1, Lower: separator("", page.NoTrailer)},
	}
}

// TestRecordsOfSkippedPagesKeepTheirBytes: docs/formats.md says what they are.
func TestRecordsOfSkippedPagesKeepTheirBytes(t *testing.T) {
	want := []string{
		"00" + "0c00000000000000" + "ffffffffffffffff" + "0046000000000000" + "01" + "0200" + "0200" + "1100" + "1066" + "106d" + hex.EncodeToString([]byte("checksum mismatch")),
		"1f" + "0100000000000000" + "ffffffffffffffff" + "0000000000000000" + "00" + "0000" + "0000" + "0000",
	}
	for i, p := range examples() {
		if got := hex.EncodeToString(p.encode()); got != want[i] {
			t.Errorf("record %d:\n%s, want\n%s", i, got, want[i])
		}
		got, err := decodePageRecord(pageRecordKey(p.ID), p.encode())
		if err != nil || got.ID != p.ID || !bytes.Equal(got.encode(), p.encode()) {
			t.Errorf("record %d reads as %+v, %v", i, got, err)
		}
	}
}

// FuzzPageRecord: no bytes make the decoder panic, and what it takes it writes the same way.
func FuzzPageRecord(f *testing.F) {
	for _, p := range examples() {
		f.Add(pageRecordKey(p.ID), p.encode())
	}
	f.Fuzz(func(t *testing.T, key, value []byte) {
		p, err := decodePageRecord(key, value)
		if err != nil {
			return
		}
		if !bytes.Equal(p.encode(), value) || !bytes.Equal(pageRecordKey(p.ID), key) {
			t.Fatalf("%x: %x reads as %+v, which is %x", key, value, p, p.encode())
		}
	})
}

// TestOverlappingRangesOfSkippedPagesAreJoined: pages may lie one above the other.
func TestOverlappingRangesOfSkippedPagesAreJoined(t *testing.T) {
	at := func(key string) page.Separator { return page.Separator{Key: []byte(key), Trailer: page.NoTrailer} }
	unreadable := func(id page.ID, lower, upper string) btree.UnreadablePage {
		p := btree.UnreadablePage{ID: id, Lower: at(lower), Err: errPageRecord}
		if u := at(upper); upper != "" {
			p.Upper = &u
		}
		return p
	}
	s, changed := (*Tree)(nil).With([]btree.UnreadablePage{unreadable(2, "b", "d"), unreadable(3, "d", "f"), unreadable(4, "k", ""), unreadable(5, "m", "p"), unreadable(6, "c", "d")}, 1)
	if !changed || len(s.ranges) != 3 || len(s.avoid) != 5 {
		t.Fatalf("%d ranges, %d pages", len(s.ranges), len(s.avoid))
	}
	if _, changed = s.With([]btree.UnreadablePage{unreadable(2, "b", "d")}, 2); changed {
		t.Error("nothing is new, and it says so")
	}
	wider, changed := s.With([]btree.UnreadablePage{unreadable(3, "d", "g")}, 2)
	if !changed || len(wider.records(1)) != 5 || !wider.Covers([]byte("f"), page.NoTrailer) || s.Covers([]byte("f"), page.NoTrailer) {
		t.Errorf("a page that came to stand for more: %v", changed)
	}
	for key, want := range map[string]bool{"a": false, "b": true, "c": true, "d": true, "ezzz": true, "f": false, "j": false, "k": true, "z": true} {
		if got := s.Covers([]byte(key), page.NoTrailer); got != want {
			t.Errorf("covers(%q) = %v", key, got)
		}
	}
	if kept := s.durable(btree.Root{ID: 9}, btree.Root{}); len(kept.records(1)) != 0 || !reflect.DeepEqual(kept.ranges, s.ranges) || kept.root.ID != 9 {
		t.Errorf("after a checkpoint: %+v", kept)
	}
}

// TestEveryVersionGoesToOneTree: what is inside skipped ranges and what is outside make the whole, from wherever a worker starts.
func TestEveryVersionGoesToOneTree(t *testing.T) {
	var entries []btree.Entry
	for c := byte('a'); c <= 'z'; c++ {
		for e := keys.Epoch(9); e > 0; e -= 3 {
			entries = append(entries, btree.Entry{Key: []byte{c}, Trailer: keys.MakeTrailer(e, keys.KindSet)})
		}
	}
	between := page.Separator{Key: []byte("g"), Trailer: keys.MakeTrailer(6, keys.KindSet) - 1}
	upper := page.Separator{Key: []byte("c"), Trailer: keys.MakeTrailer(9, keys.KindSet) - 1}
	s, _ := (*Tree)(nil).With([]btree.UnreadablePage{
		{ID: 2, Lower: page.Separator{Key: []byte("b"), Trailer: page.NoTrailer}, Upper: &upper, Err: errPageRecord},
		{ID: 3, Lower: between, Upper: &page.Separator{Key: []byte("k"), Trailer: page.NoTrailer}, Err: errPageRecord},
		{ID: 4, Lower: page.Separator{Key: []byte("x"), Trailer: page.NoTrailer}, Err: errPageRecord},
	}, 1)
	read := func(inside bool, from []byte) (got []btree.Entry) {
		in := newRangeInput(&btree.SliceInput{Entries: entries}, s, inside)
		in.SeekGE(from)
		var e btree.Entry
		for in.Next(&e) {
			if s.Covers(e.Key, e.Trailer) != inside {
				t.Fatalf("%q at %d, inside %v", e.Key, e.Trailer.Epoch(), inside)
			}
			got = append(got, e)
		}
		return got
	}
	for from := byte('a'); from <= 'z'+1; from++ {
		inside, outside := read(true, []byte{from}), read(false, []byte{from})
		if want := max(0, 3*int('z'+1-from)); len(inside)+len(outside) != want {
			t.Fatalf("from %c: %d inside, %d outside, want %d", from, len(inside), len(outside), want)
		}
	}
}
