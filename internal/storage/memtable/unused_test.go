package memtable

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// TestALargeBodyGivesBackWhatItHasNotUsed: the memtable of 400,000 short operations is in memory until it is merged, beside the next request.
func TestALargeBodyGivesBackWhatItHasNotUsed(t *testing.T) {
	if watched {
		t.Skip("the race detector's arena is in the heap")
	}
	const n, most = 100_000, 1 << 20
	var b batch.Builder
	for i := range n {
		b.Set(keys.SpaceUser, fmt.Appendf(nil, "key%07d", i), make([]byte, 100))
	}
	body, err := b.Finish()
	if err != nil {
		t.Fatal(err)
	}
	table, err := New(Config{Bytes: most})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = table.Free() }() // at the end of the test
	in := Inserter{Ordered: true}
	if err := table.SecureBelow(&in, MaxSize(body), most); err != nil {
		t.Fatal(err)
	}
	if err := table.Apply(&in, body, 1, false); err != nil {
		t.Fatal(err)
	}
	unused, before := int(in.end-in.pos)*wordBytes, resident(t)
	if unused < 2<<20 {
		t.Fatalf("%d bytes are not used; the test needs more", unused)
	}
	in.GiveBack()
	if given := before - resident(t); given < unused/2 {
		t.Errorf("%d bytes of %d were given back", given, unused)
	}
	for i := range n {
		if v, ok := table.Newest(fmt.Appendf([]byte{byte(keys.SpaceUser)}, "key%07d", i)); !ok || len(v.Value) != 100 {
			t.Fatalf("key %d: %v, %d bytes", i, ok, len(v.Value))
		}
	}
	one := new(batch.Builder)
	one.Set(keys.SpaceUser, []byte("another"), nil)
	if body, err = one.Finish(); err != nil {
		t.Fatal(err)
	}
	if err := table.Secure(&in, MaxSize(body)); err != nil {
		t.Fatal(err)
	}
	if err := table.Apply(&in, body, 2, false); err != nil {
		t.Error(err)
	}
}

func resident(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Skip(err)
	}
	pages, err := strconv.Atoi(strings.Fields(string(text))[1])
	if err != nil {
		t.Fatal(err)
	}
	return pages * os.Getpagesize()
}
