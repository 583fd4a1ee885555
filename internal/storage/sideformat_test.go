package storage

import (
	"bytes"
	"encoding/hex"
	"reflect"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

func lostExamples() []quarantinedPage {
	separator := func(key string, t keys.Trailer) page.Separator { return page.Separator{Key: []byte(key), Trailer: t} }
	upper := separator("\x10m", keys.MakeTrailer(70, keys.KindSet)-1)
	return []quarantinedPage{
		{id: 17, level: 0, checkpoint: 12, lower: separator("\x10f", page.NoTrailer), upper: &upper, reason: "checksum mismatch"},
		{id: 1 << 38, level: 31, checkpoint: 1, lower: separator("", page.NoTrailer)},
	}
}

// TestRecordsOfLostPagesKeepTheirBytes: docs/formats.md says what they are.
func TestRecordsOfLostPagesKeepTheirBytes(t *testing.T) {
	want := []string{
		"00" + "0c00000000000000" + "ffffffffffffffff" + "0046000000000000" + "01" + "0200" + "0200" + "1100" + "1066" + "106d" + hex.EncodeToString([]byte("checksum mismatch")),
		"1f" + "0100000000000000" + "ffffffffffffffff" + "0000000000000000" + "00" + "0000" + "0000" + "0000",
	}
	for i, p := range lostExamples() {
		if got := hex.EncodeToString(p.encode()); got != want[i] {
			t.Errorf("record %d:\n%s, want\n%s", i, got, want[i])
		}
		got, err := decodePageRecord(pageRecordKey(p.id), p.encode())
		if err != nil || got.id != p.id || !bytes.Equal(got.encode(), p.encode()) {
			t.Errorf("record %d reads as %+v, %v", i, got, err)
		}
	}
	var state pager.State
	encodeRepairTreeRoots(&state, btree.Root{ID: 0x1234, Level: 2}, btree.Root{ID: 0x5678, Level: 1})
	if got := hex.EncodeToString(state.Engine[:24]); got != "3412000000000000"+"03000000"+"7856000000000000"+"02000000" {
		t.Errorf("roots: %s", got)
	}
	if root, mirror, err := decodeRepairTreeRoots(&state); err != nil || root != (btree.Root{ID: 0x1234, Level: 2}) || mirror != (btree.Root{ID: 0x5678, Level: 1}) {
		t.Errorf("roots read as %v, %v, %v", root, mirror, err)
	}
	state.Engine[100] = 1
	if _, _, err := decodeRepairTreeRoots(&state); err == nil {
		t.Error("reserved bytes are not looked at")
	}
}

// FuzzLostRecord: no bytes make the decoder panic, and what it takes it writes the same way.
func FuzzLostRecord(f *testing.F) {
	for _, p := range lostExamples() {
		f.Add(pageRecordKey(p.id), p.encode())
	}
	f.Fuzz(func(t *testing.T, key, value []byte) {
		p, err := decodePageRecord(key, value)
		if err != nil {
			return
		}
		if !bytes.Equal(p.encode(), value) || !bytes.Equal(pageRecordKey(p.id), key) {
			t.Fatalf("%x: %x reads as %+v, which is %x", key, value, p, p.encode())
		}
	})
}

// TestOverlappingRangesOfLostPagesAreJoined: pages may lie one above the other.
func TestOverlappingRangesOfLostPagesAreJoined(t *testing.T) {
	at := func(key string) page.Separator { return page.Separator{Key: []byte(key), Trailer: page.NoTrailer} }
	lost := func(id page.ID, lower, upper string) btree.UnreadablePage {
		p := btree.UnreadablePage{ID: id, Lower: at(lower), Err: errPageRecord}
		if u := at(upper); upper != "" {
			p.Upper = &u
		}
		return p
	}
	s, changed := (*repairTree)(nil).with([]btree.UnreadablePage{lost(2, "b", "d"), lost(3, "d", "f"), lost(4, "k", ""), lost(5, "m", "p"), lost(6, "c", "d")}, 1)
	if !changed || len(s.ranges) != 3 || len(s.avoid) != 5 {
		t.Fatalf("%d ranges, %d pages", len(s.ranges), len(s.avoid))
	}
	if _, changed = s.with([]btree.UnreadablePage{lost(2, "b", "d")}, 2); changed {
		t.Error("nothing is new, and it says so")
	}
	wider, changed := s.with([]btree.UnreadablePage{lost(3, "d", "g")}, 2)
	if !changed || len(wider.records(1)) != 5 || !wider.covers([]byte("f"), page.NoTrailer) || s.covers([]byte("f"), page.NoTrailer) {
		t.Errorf("a page that came to stand for more: %v", changed)
	}
	for key, want := range map[string]bool{"a": false, "b": true, "c": true, "d": true, "ezzz": true, "f": false, "j": false, "k": true, "z": true} {
		if got := s.covers([]byte(key), page.NoTrailer); got != want {
			t.Errorf("covers(%q) = %v", key, got)
		}
	}
	if kept := s.durable(btree.Root{ID: 9}, btree.Root{}); len(kept.records(1)) != 0 || !reflect.DeepEqual(kept.ranges, s.ranges) || kept.root.ID != 9 {
		t.Errorf("after a checkpoint: %+v", kept)
	}
}

// TestEveryVersionGoesToOneTree: what is inside lost ranges and what is outside make the whole, from wherever a worker starts.
func TestEveryVersionGoesToOneTree(t *testing.T) {
	var entries []btree.Entry
	for c := byte('a'); c <= 'z'; c++ {
		for e := keys.Epoch(9); e > 0; e -= 3 {
			entries = append(entries, btree.Entry{Key: []byte{c}, Trailer: keys.MakeTrailer(e, keys.KindSet)})
		}
	}
	between := page.Separator{Key: []byte("g"), Trailer: keys.MakeTrailer(6, keys.KindSet) - 1}
	upper := page.Separator{Key: []byte("c"), Trailer: keys.MakeTrailer(9, keys.KindSet) - 1}
	s, _ := (*repairTree)(nil).with([]btree.UnreadablePage{
		{ID: 2, Lower: page.Separator{Key: []byte("b"), Trailer: page.NoTrailer}, Upper: &upper, Err: errPageRecord},
		{ID: 3, Lower: between, Upper: &page.Separator{Key: []byte("k"), Trailer: page.NoTrailer}, Err: errPageRecord},
		{ID: 4, Lower: page.Separator{Key: []byte("x"), Trailer: page.NoTrailer}, Err: errPageRecord},
	}, 1)
	read := func(inside bool, from []byte) (got []btree.Entry) {
		in := newRangeInput(&btree.SliceInput{Entries: entries}, s, inside)
		in.SeekGE(from)
		var e btree.Entry
		for in.Next(&e) {
			if s.covers(e.Key, e.Trailer) != inside {
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
