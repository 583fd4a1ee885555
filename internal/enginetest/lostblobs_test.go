package enginetest

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
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

// TestARebuiltTableGivesNoIDsOfALeafThatComesBack damages the indirection table, a leaf, and a page with values of it for a while. Nothing that is read then
// tells the ids of these values. The ones that are written meanwhile must have others: the leaf comes back, and its keys are overwritten.
func TestARebuiltTableGivesNoIDsOfALeafThatComesBack(t *testing.T) {
	for _, valuesToo := range []bool{false, true} {
		o := modelOptions(vfs.NewMem())
		fs := o.Storage.FS
		s := mustReopen(t, o)
		value := func(kind, i int) string { return strings.Repeat(string(rune(kind+i%26)), 300) }
		want := map[string]string{}
		for i := range 40 {
			mustPut(t, s, fmt.Sprintf("k%03d", i), value('a', i))
		}
		mustClose(t, s)
		table, leaf, values := tableLeafAndValues(t, fs, o.Storage.PageSize, "k020", value('a', 20)[:100])
		for _, at := range []int64{table, leaf, values} {
			flip(t, fs, at+100)
		}

		s = mustReopen(t, o)
		for i := range 30 {
			key := fmt.Sprintf("n%03d", i)
			want[key] = value('A', i)
			mustPut(t, s, key, want[key])
		}
		if err := errors.Join(s.Checkpoint(t.Context()), s.Close()); err != nil {
			t.Fatal(err)
		}
		flip(t, fs, leaf+100)
		if valuesToo {
			flip(t, fs, values+100)
		}
		s = mustReopen(t, o)
		for i := range 40 {
			key := fmt.Sprintf("k%03d", i)
			want[key] = "short"
			mustPut(t, s, key, "short")
		}
		for range 3 {
			mustCheckpoint(t, s)
		}
		for range 2 {
			if lost := lostKeys(t, s, want); len(lost) > 0 {
				t.Errorf("values come back %v: lost are %q", valuesToo, lost)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = mustReopen(t, o)
		}
		report, err := s.Verify(t.Context(), inspect.VerifyOptions{})
		if err := errors.Join(err, s.Close()); err != nil {
			t.Fatal(err)
		}
		for _, d := range report.Damages { // the first part of a value whose second part was lost stays
			if d.Kind != inspect.DamageAccounts {
				t.Errorf("values come back %v: %+v", valuesToo, d)
			}
		}
	}
}

// TestALeafThatComesBackTakesNoOtherValue: the page with the newest value of a key is damaged, and a live page has an older fragment of the same id, which
// continues in an id that another value has now. The drop of the one must not drop the other.
func TestALeafThatComesBackTakesNoOtherValue(t *testing.T) {
	const length = 302
	runs := 0
	for seed := range uint64(8) {
		rng := rand.New(rand.NewPCG(1000+seed, 4))
		fs := vfs.NewMem()
		o := modelOptions(fs)
		s := mustReopen(t, o)
		want := map[string]string{}
		for range 12 {
			for range 8 {
				key := fmt.Sprintf("k%03d", rng.IntN(40))
				want[key] = fmt.Sprintf("%s/%06d/%s", key, rng.IntN(1_000_000), strings.Repeat("x", length-12))
				mustPut(t, s, key, want[key])
			}
			mustCheckpoint(t, s)
			mustCheckpoint(t, s)
		}
		mustClose(t, s)
		for key, value := range want {
			o := o
			o.Storage.FS = fs.Crash(1, vfs.SurviveAll)
			comesBackAlone(t, o, want, key, value[:12])
			runs++
		}
	}
	if runs < 200 {
		t.Errorf("%d runs", runs)
	}
}

// TestALeafThatComesBackHasItsValues, if no page of values was damaged with the table. If the allocation map was, pages that were never written, or have
// lost their blocks, are read with the others, and older values that had the same ids.
func TestALeafThatComesBackHasItsValues(t *testing.T) {
	for _, mapToo := range []bool{false, true} {
		o := modelOptions(vfs.NewMem())
		fs := o.Storage.FS
		s := mustReopen(t, o)
		for i := range 150 {
			mustPut(t, s, fmt.Sprintf("f%03d", i), strings.Repeat("F", 300))
		}
		mustCheckpoint(t, s)
		for i := range 150 {
			mustPut(t, s, fmt.Sprintf("f%03d", i), "")
		}
		for range 3 {
			mustCheckpoint(t, s)
		}
		want := map[string]string{}
		for i := range 40 {
			key := fmt.Sprintf("k%03d", i)
			want[key] = fmt.Sprintf("%s/%s", key, strings.Repeat("v", 300))
			mustPut(t, s, key, want[key])
		}
		mustClose(t, s)
		table, leaf, _ := tableLeafAndValues(t, fs, o.Storage.PageSize, "k020", "k020/vvv")
		damaged := []int64{table, leaf}
		if mapToo {
			damaged = append(damaged, mapRoot(t, fs, o.Storage.PageSize))
		}
		for _, at := range damaged {
			flip(t, fs, at+100)
		}
		s = mustReopen(t, o)
		hidden := lostKeys(t, s, want)
		if len(hidden) < 4 {
			t.Errorf("map %v: hidden are %q: the test tests nothing", mapToo, hidden)
		}
		mustCheckpoint(t, s)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		flip(t, fs, leaf+100)
		s = mustReopen(t, o)
		if lost := lostKeys(t, s, want); len(lost) > 0 {
			t.Errorf("map %v: lost are %q of %q", mapToo, lost, hidden)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// mapRoot is the offset of the root of the allocation map.
func mapRoot(t *testing.T, fs vfs.FS, pageSize int) int64 {
	t.Helper()
	p, err := pager.OpenSnapshot(fs, dataFile)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	return int64(p.MapRoot()) * int64(pageSize)
}

// comesBackAlone damages the table, the leaf of a key and the page of its value. The leaf comes back, and the key is overwritten.
func comesBackAlone(t *testing.T, o mvcc.Options, want map[string]string, key, text string) {
	t.Helper()
	fs := o.Storage.FS
	table, leaf, values := tableLeafAndValues(t, fs, o.Storage.PageSize, key, text)
	for _, at := range []int64{table, leaf, values} {
		flip(t, fs, at+100)
	}
	s := mustReopen(t, o)
	mustCheckpoint(t, s)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	flip(t, fs, leaf+100)
	s = mustReopen(t, o)
	readable := maps.Clone(want)
	for _, lost := range lostKeys(t, s, want) {
		delete(readable, lost)
	}
	mustPut(t, s, key, "short")
	readable[key] = "short"
	for range 3 {
		mustCheckpoint(t, s)
	}
	for i := range 10 {
		name := fmt.Sprintf("n%03d", i)
		readable[name] = strings.Repeat("N", 302)
		mustPut(t, s, name, readable[name])
	}
	for range 3 {
		mustCheckpoint(t, s)
	}
	if lost := lostKeys(t, s, readable); len(lost) > 0 {
		t.Errorf("only %s was overwritten, and %q are lost", key, lost)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// tableLeafAndValues are the offsets of the root of the indirection table, of the newest leaf with a key, and of the newest blob page with a text.
func tableLeafAndValues(t *testing.T, fs vfs.FS, pageSize int, key, text string) (table, leaf, values int64) {
	t.Helper()
	p, err := pager.OpenSnapshot(fs, dataFile)
	if err != nil {
		t.Fatal(err)
	}
	table = int64(p.Blobs().Table.Page) * int64(pageSize)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	file := readFile(t, fs, dataFile)
	newer := func(than, at int64) bool {
		written := func(at int64) uint64 { return page.ReadHeader(file[at:][:pageSize]).Checkpoint }
		return than == 0 || written(at) >= written(than)
	}
	for id := page.ID(2); (int(id)+1)*pageSize <= len(file); id++ {
		at := int64(id) * int64(pageSize)
		p := file[at:][:pageSize]
		switch {
		case page.Check(p, id) != nil:
		case page.ReadHeader(p).Type == page.TypeBlobs && bytes.Contains(p, []byte(text)) && newer(values, at):
			values = at
		case page.IsTree(p, 0) && newer(leaf, at):
			view := page.Leaf(p).Layout()
			for i := range view.Count() {
				if strings.HasSuffix(string(view.Prefix())+string(view.Suffix(i)), key) {
					leaf = at
				}
			}
		}
	}
	if table == 0 || leaf == 0 || values == 0 {
		t.Fatalf("table at %d, leaf at %d, values at %d", table, leaf, values)
	}
	return table, leaf, values
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
