package enginetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestSpaceCountsWhatCanBeReadAndNamesTheRest: a damaged page costs the account its own keys. They
// are in the ranges that the report names. Every key that a get finds is counted once, also when it
// has a version in the repair tree, or older ones after the damaged page. A page that can be read
// again is not read for keys of which the repair tree has newer versions.
func TestSpaceCountsWhatCanBeReadAndNamesTheRest(t *testing.T) {
	const count = 400
	o := tiny(vfs.NewMem())
	o.Retention = time.Hour
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	for i := range count {
		mustPut(t, s, fmt.Sprintf("k/%03d", i), strings.Repeat("v", 400))
	}
	for range 100 {
		mustPut(t, s, "k/200", strings.Repeat("w", 400)) // versions that fill several leaves
	}
	mustClose(t, s)
	leaf := leafEndingWith(t, o.Storage.FS, "k/200")
	flip(t, o.Storage.FS, leaf)
	if s, err = mvcc.Open(o); err != nil {
		t.Fatal(err)
	}
	x := mustSession(t, s)
	defer func() {
		x.Close()
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	check := func(when string) uint64 {
		t.Helper()
		r, err := s.Space(context.Background(), inspect.SpaceOptions{})
		if err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		var keys, lost uint64
		for i := range count {
			k := fmt.Sprintf("k/%03d", i)
			v, err := x.Get(nil, []byte(k), 0)
			switch {
			case asDamage(err):
				lost++
				if !inUnreadable(r, k) {
					t.Errorf("%s: %s cannot be read, and is in no range of %+v", when, k, r.Unreadable)
				}
			case err != nil:
				t.Fatal(err)
			case v.Found:
				keys++
			}
		}
		if lost == 0 || len(r.Prefixes) != 1 || string(r.Prefixes[0].Prefix) != "k/" || r.Prefixes[0].Keys != keys || r.UnreadableTotal != 1 {
			t.Errorf("%s: %d keys can be read and %d cannot; the report has %+v, and %d unreadable pages", when, keys, lost, r.Prefixes, r.UnreadableTotal)
		}
		return keys
	}
	check("at first")
	for i := 1; i < count; i += 2 {
		if _, err := put(x, fmt.Sprintf("k/%03d", i), "new", mvcc.DurabilityAsync); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
	keys := check("with a side tree")
	flip(t, o.Storage.FS, leaf)
	r, err := s.Space(context.Background(), inspect.SpaceOptions{})
	if err != nil || !(r.Prefixes[0].Keys == keys && r.UnreadableTotal == 1) && !(r.Prefixes[0].Keys == count && r.UnreadableTotal == 0) { // the latter if the store has noticed it
		t.Errorf("when the page can be read again: %+v, %v", r, err)
	}
}

// TestOlderVersionsAfterADamagedPageAreNotTakenForTheNewest: the versions of a key that is written
// often fill several leaves. Of the first one, which holds the newest, verification says that it
// may hide the key, and salvage brings out none of what follows.
func TestOlderVersionsAfterADamagedPageAreNotTakenForTheNewest(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Retention = time.Hour
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range []string{"a", "hot", "z"} {
		for range 100 {
			mustPut(t, s, k, strings.Repeat("w", 400))
		}
	}
	mustClose(t, s)
	leaf := leafEndingWith(t, o.Storage.FS, "hot")
	flip(t, o.Storage.FS, leaf)
	r, err := inspect.VerifyDir(context.Background(), o.Storage.FS, "db", inspect.VerifyOptions{})
	if err != nil || len(r.Damages) != 1 || string(r.Damages[0].KeyUpper) <= "hot" {
		t.Errorf("verify: %+v, %v", r, err)
	}
	got, _ := mustSalvage(t, o.Storage.FS)
	if _, stale := got["hot"]; stale || len(got) == 0 {
		t.Errorf("salvage restores %d keys, with an old version of the unreadable one: %v", len(got), stale)
	}
	if s, err = mvcc.Open(o); err != nil {
		t.Fatal(err)
	}
	x := mustSession(t, s)
	_, err = x.Get(nil, []byte("hot"), 0)
	if damage, ok := errors.AsType[*storage.CorruptionError](err); !ok || string(damage.KeyUpper) <= "hot" {
		t.Errorf("get: %v", err)
	}
	x.Close()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// leafEndingWith is the place of a byte in the first leaf of the newest state whose last entry is a
// version of the key.
func leafEndingWith(t testing.TB, fs vfs.FS, key string) int64 {
	t.Helper()
	file := readFile(t, fs, dataFile)
	for _, id := range treePages(t, fs) {
		p := file[int(id)*8192 : (int(id)+1)*8192]
		if !page.IsTree(p, 0) {
			continue
		}
		v := page.Leaf(p).Layout()
		var last []byte
		for i := range v.Count() {
			if suffix := v.Suffix(i); i == 0 || len(suffix) > 0 {
				last = slices.Concat(v.Prefix(), suffix)
			}
		}
		if string(keys.User(last)) == key {
			return int64(id)*8192 + 100
		}
	}
	t.Fatalf("no leaf ends with %q", key)
	return 0
}

func inUnreadable(r *inspect.SpaceReport, key string) bool {
	for i := range r.Unreadable {
		d := &r.Unreadable[i]
		if (d.KeyLower == nil || string(d.KeyLower) <= key) && (d.KeyUpper == nil || key < string(d.KeyUpper)) {
			return true
		}
	}
	return false
}
