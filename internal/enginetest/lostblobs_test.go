package enginetest

import (
	"fmt"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestDamagedIndirectionTableCostsOnlyTheValuesOfDamagedPages damages the indirection table, which
// is rebuilt from the blobs, and one blob page. The values of that page are DATA_LOSS. They can be
// overwritten before and after a restart, and later values remain.
func TestDamagedIndirectionTableCostsOnlyTheValuesOfDamagedPages(t *testing.T) {
	const n = 60
	for nth := range 4 {
		o := modelOptions(vfs.NewMem())
		s := mustReopen(t, o)
		want := map[string]string{}
		put := func(key, value string) {
			t.Helper()
			mustPut(t, s, key, value)
			want[key] = value
		}
		for i := range n {
			put(fmt.Sprintf("k%03d", i), strings.Repeat("L", 200+i*20))
		}
		mustClose(t, s)
		damageTableAndBlobs(t, o.Storage.FS, o.Storage.PageSize, nth)

		s = mustReopen(t, o)
		lost := lostKeys(t, s, want)
		if len(lost) == 0 || len(lost) == n {
			t.Fatalf("%d values are lost: the test tests nothing", len(lost))
		}
		for restart := range 2 {
			for i := range 20 { // they take the rows that are free
				put(fmt.Sprintf("new%d-%03d", restart, i), strings.Repeat("N", 300+i*20))
			}
			if err := s.Checkpoint(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = mustReopen(t, o)
			if repaired := s.Recovery().Repaired; len(repaired) > 0 {
				t.Errorf("start %d repairs again: %q", restart, repaired)
			}
		}
		for _, key := range lost {
			put(key, "overwritten")
		}
		if err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		s = mustReopen(t, o)
		if again := lostKeys(t, s, want); len(again) > 0 {
			t.Errorf("blob page %d: values still lost, or lost meanwhile: %q", nth, again)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// lostKeys lists the keys whose values are refused as damaged. All others are right.
func lostKeys(t *testing.T, s *mvcc.Store, want map[string]string) (lost []string) {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	for key, value := range want {
		v, err := x.Get(nil, []byte(key), 0)
		switch {
		case asDamage(err):
			lost = append(lost, key)
		case err != nil || string(v.Data) != value:
			t.Fatalf("%s: %.20q, %v", key, v.Data, err)
		}
	}
	return lost
}

// damageTableAndBlobs damages all pages of the allocation map and of the indirection table, and one
// blob page.
func damageTableAndBlobs(t *testing.T, fs vfs.FS, pageSize, nth int) {
	t.Helper()
	file := readFile(t, fs, dataFile)
	for id := page.ID(2); (int(id)+1)*pageSize <= len(file); id++ {
		p := file[int(id)*pageSize:][:pageSize]
		if page.Check(p, id) != nil {
			continue
		}
		kind := page.ReadHeader(p).Type
		if kind == page.TypeArray || kind == page.TypeBlobs && nth == 0 {
			flip(t, fs, int64(int(id)*pageSize+100))
		}
		if kind == page.TypeBlobs {
			nth--
		}
	}
}
