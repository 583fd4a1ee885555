package enginetest

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestDifferenceOverSkippedPages: a difference that begins after the pages were damaged shows what was written to their keys
// since, deletions included, from the repair tree. One that begins before is refused, because what the pages had is unknown.
func TestDifferenceOverSkippedPages(t *testing.T) {
	fs := vfs.NewMem()
	s, err := mvcc.Open(tiny(fs)) // not mustOpen, which would verify in the end
	if err != nil {
		t.Fatal(err)
	}
	for i := range 400 {
		mustPut(t, s, fmt.Sprintf("k%03d", i), strings.Repeat("v", 100))
	}
	mustClose(t, s)
	damageLeaves(t, fs, 8192, 1)
	if s, err = mvcc.Open(tiny(fs)); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	x, from := mustSession(t, s), mustSession(t, s)
	defer x.Close()
	defer from.Close()
	write := func(value string, step int) {
		w := mvcc.Write{}
		for i := 0; i < 400; i += step {
			if i%20 == 0 {
				w.Delete(fmt.Appendf(nil, "k%03d", i))
			} else {
				w.Set(fmt.Appendf(nil, "k%03d", i), []byte(value))
			}
		}
		if _, err := commitAndWait(x, &w); err != nil {
			t.Fatal(err)
		}
		if err := s.Checkpoint(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	write("first", 4)
	since, err := from.OpenSnapshot(0)
	if err != nil {
		t.Fatal(err)
	}
	write("second", 10)
	if s.Stats().Storage.Damage.SkippedPages == 0 {
		t.Fatal("no page is skipped")
	}
	if _, err := x.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	d, err := x.Difference(mvcc.DifferenceOptions{Since: since})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	n := 0
	for ; d.Next(); n++ {
		key, deleted := fmt.Sprintf("k%03d", 10*n), n%2 == 0
		if string(d.Key()) != key || d.Version().Deleted != deleted || !deleted && string(d.Value()) != "second" {
			t.Fatalf("%q, deleted %v, %q; want %q", d.Key(), d.Version().Deleted, d.Value(), key)
		}
	}
	if d.Err() != nil || n != 40 {
		t.Fatalf("%d keys, %v; want 40", n, d.Err())
	}
	all, err := x.Difference(mvcc.DifferenceOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer all.Close()
	for all.Next() {
	}
	if !asDamage(all.Err()) {
		t.Fatalf("a difference from the beginning: %v; want that pages are damaged", all.Err())
	}
}
