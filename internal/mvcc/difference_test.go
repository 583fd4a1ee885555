package mvcc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// versionAt is what a full scan at a snapshot shows of a key.
type versionAt struct {
	epoch keys.Epoch
	value string
}

// scanAll reads every key in [lower, upper) at the session's snapshot.
func scanAll(t *testing.T, x *Session, lower, upper []byte) map[string]versionAt {
	t.Helper()
	c, err := x.Scan(ScanOptions{Lower: lower, Upper: upper})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	all := map[string]versionAt{}
	for c.Next() {
		all[string(c.Key())] = versionAt{c.Epoch(), string(c.Value())}
	}
	if c.Err() != nil {
		t.Fatal(c.Err())
	}
	return all
}

// checkDifference compares the difference between two snapshots with full scans at both of them. Every part of the walk
// begins a new one after the last key, with a small probability, and the walk may pause before and after any of them.
func checkDifference(t *testing.T, from, to *Session, lower, upper []byte, rng *rand.Rand) {
	t.Helper()
	before, after := scanAll(t, from, lower, upper), scanAll(t, to, lower, upper)
	want := maps.Clone(after)
	maps.DeleteFunc(want, func(_ string, v versionAt) bool { return v.epoch <= from.at })
	for key := range before {
		if _, ok := after[key]; !ok {
			want[key] = versionAt{} // deleted
		}
	}
	last := []byte(nil)
	resume := lower
	for ended := false; !ended; {
		d, err := to.Difference(DifferenceOptions{Lower: resume, Upper: upper, Since: from.at})
		if err != nil {
			t.Fatalf("the difference since %d at %d: %v", from.at, to.at, err)
		}
		defer d.Close()
		if rng.IntN(2) == 0 { // many small parts
			d.walk.Bounds = storage.ChangedBounds{Pages: 8, Steps: 1 + rng.IntN(5), Bytes: 1 + rng.IntN(500)}
		}
		pauses := []int{0, 1, 2, 20}[rng.IntN(4)] // never, after each key, after some of them
		pause := func() {
			for pauses > 0 && rng.IntN(pauses) == 0 { // once or more
				if d.Pause(); len(d.found) > 0 {
					t.Fatal("a paused difference keeps candidates")
				}
				if pauses == 1 {
					break
				}
			}
		}
		pause()
		for ended = true; d.Next(); {
			key, v := string(d.Key()), d.Version()
			if last != nil && key <= string(last) {
				t.Fatalf("%q after %q", key, last)
			}
			last = append(last[:0], key...)
			w, ok := want[key]
			switch {
			case v.Epoch <= from.at || v.Epoch > to.at:
				t.Fatalf("%q has epoch %d outside (%d, %d]", key, v.Epoch, from.at, to.at)
			case v.Deleted && ok && w.epoch != 0, v.Deleted && after[key].epoch != 0:
				t.Fatalf("%.20q is shown as deleted", key)
			case !v.Deleted && (!ok || w != versionAt{v.Epoch, string(d.Value())}):
				t.Fatalf("%.20q: epoch %d, a value of %d bytes; want %d, %d", key, v.Epoch, len(d.Value()), w.epoch, len(w.value))
			}
			delete(want, key)
			pause()
			if rng.IntN(50) == 0 {
				resume, ended = append(bytes.Clone(d.Key()), 0), false
				break
			}
		}
		if pause(); ended && d.Next() {
			t.Fatalf("%q after the end", d.Key())
		}
		d.Close()
		if d.Err() != nil {
			t.Fatal(d.Err())
		}
	}
	for key, v := range want {
		t.Fatalf("%.20q of epoch %d is missing in the difference of (%d, %d]", key, v.epoch, from.at, to.at)
	}
}

// changingStore is a store of tiny pages with random operations and open snapshots.
type changingStore struct {
	t         *testing.T
	rng       *rand.Rand
	store     *Store
	x         *Session
	snapshots []*Session
}

func (c *changingStore) key() string {
	n := c.rng.IntN(2000)
	if c.rng.IntN(4) == 0 {
		n = c.rng.IntN(3) // hot: many versions
	}
	return fmt.Sprintf("k%04d%s", n, strings.Repeat("x", n%40))
}

func (c *changingStore) step() {
	t := c.t
	switch op := c.rng.IntN(100); {
	case op < 70:
		w := Write{Durability: DurabilityAsync}
		seen := map[string]bool{}
		for range 1 + c.rng.IntN(40) {
			key := c.key()
			if seen[key] {
				continue
			}
			seen[key] = true
			if c.rng.IntN(3) == 0 {
				w.Delete([]byte(key))
			} else {
				w.Set([]byte(key), bytes.Repeat([]byte{'v'}, c.rng.IntN(300)))
			}
		}
		if _, err := commitAndWait(c.x, &w); err != nil {
			t.Fatal(err)
		}
	case op < 73:
		first := c.rng.IntN(2000)
		lower, upper := fmt.Appendf(nil, "k%04d", first), fmt.Appendf(nil, "k%04d", first+c.rng.IntN(50))
		if _, err := c.x.DeleteRange(context.Background(), RangeDelete{Lower: lower, Upper: upper, Durability: DurabilityAsync}); err != nil {
			t.Fatal(err)
		}
	case op < 75:
		entries := map[string]string{}
		for range c.rng.IntN(300) {
			entries[c.key()] = "loaded"
		}
		if _, err := load(c.store, entries); err != nil {
			t.Fatal(err)
		}
	case op < 82:
		mustCheckpoint(t, c.store)
	case op < 92:
		x := mustSession(t, c.store)
		if _, err := x.OpenSnapshot(0); err != nil {
			t.Fatal(err)
		}
		c.snapshots = append(c.snapshots, x)
	case len(c.snapshots) > 6:
		i := c.rng.IntN(len(c.snapshots))
		c.snapshots[i].Close()
		c.snapshots = append(c.snapshots[:i], c.snapshots[i+1:]...)
	}
}

func (c *changingStore) compare() {
	if len(c.snapshots) < 2 {
		return
	}
	to := 1 + c.rng.IntN(len(c.snapshots)-1)
	var lower, upper []byte
	if c.rng.IntN(2) == 0 {
		first := c.rng.IntN(2000)
		lower, upper = fmt.Appendf(nil, "k%04d", first), fmt.Appendf(nil, "k%04d", first+c.rng.IntN(1000))
	}
	from := c.snapshots[c.rng.IntN(to)]
	checkDifference(c.t, from, c.snapshots[to], lower, upper, c.rng)
	checkDiffOfScans(c.t, from, c.snapshots[to], lower, upper, c.rng)
}

func (c *changingStore) run(steps int) {
	defer func() {
		c.x.Close()
		for _, x := range c.snapshots {
			x.Close()
		}
	}()
	for step := range steps {
		if c.step(); step%15 == 14 {
			c.compare()
		}
	}
}

// TestDifferenceEqualsTheDifferenceOfFullScans: between any two snapshots the walk over changed keys shows what full scans at
// both of them differ in, whatever is in memtables, tree and quarantine, and wherever the walk is continued.
func TestDifferenceEqualsTheDifferenceOfFullScans(t *testing.T) {
	testseed.SkipUnderRace(t)
	base := testseed.Base(t)
	for seed := range uint64(2) {
		o := tiny(vfs.NewMem())
		o.Storage.PageSize, o.Storage.MemtableBytes, o.Storage.SegmentBytes = 512, 32<<10, 32<<10
		s := mustOpen(t, o)
		c := &changingStore{t: t, rng: rand.New(rand.NewPCG(base+seed, 1)), store: s, x: mustSession(t, s)}
		c.run(150)
	}
}

// TestDifferenceShowsQuarantinedKeys, set and deleted.
func TestDifferenceShowsQuarantinedKeys(t *testing.T) {
	for _, merged := range []bool{false, true} {
		s, x, long := quarantinedStore(t, merged)
		from, to := mustSession(t, s), mustSession(t, s)
		defer from.Close()
		defer to.Close()
		mustSnapshot(t, from)
		deleteLongKeys(t, x, long)
		mustCheckpoint(t, s)
		mustSnapshot(t, to)
		checkDifference(t, from, to, nil, nil, rand.New(rand.NewPCG(1, 1)))
	}
}

func mustSnapshot(t *testing.T, x *Session) {
	t.Helper()
	if _, err := x.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
}

// TestDifferenceIsRefusedWhereItsBeginIsGone: without the snapshot before the changes, a deletion may have left no trace.
func TestDifferenceIsRefusedWhereItsBeginIsGone(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	e := mustPut(t, s, "a", "1")
	for i := 0; s.LowWatermark() <= e; i++ {
		mustPut(t, s, "b", fmt.Sprint(i))
	}
	x := mustSession(t, s)
	defer x.Close()
	mustSnapshot(t, x)
	_, err := x.Difference(DifferenceOptions{Since: e})
	var gone *SnapshotGoneError
	if !errors.As(err, &gone) || gone.Oldest <= e {
		t.Fatalf("%v; want that epoch %d is gone", err, e)
	}
}

// TestDifferenceReadsOnlyWhatChanged: of a large tree in which few keys have changed, few pages are read.
func TestDifferenceReadsOnlyWhatChanged(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	w := Write{Durability: DurabilityAsync}
	for i := range 20_000 {
		w.Set(fmt.Appendf(nil, "k%05d", i), bytes.Repeat([]byte{'v'}, 50))
	}
	e, err := commitAndWait(x, &w)
	if err != nil {
		t.Fatal(err)
	}
	mustCheckpoint(t, s)
	from := mustSession(t, s)
	defer from.Close()
	mustSnapshot(t, from)
	mustPut(t, s, "k10000", "new")
	mustCheckpoint(t, s)
	mustSnapshot(t, x)
	d, err := x.Difference(DifferenceOptions{Since: e})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	parts, n := 0, 0
	for d.Next() {
		n++
	}
	for d.next, d.more, d.lower = 0, true, keys.Append(nil, keys.SpaceUser, nil); d.more; parts++ {
		d.advance()
	}
	if d.Err() != nil || n != 1 || parts != 1 {
		t.Fatalf("%d keys in %d parts, %v; want one in one part: the tree has hundreds of leaves", n, parts, d.Err())
	}
}

// TestAPausedDifferenceKeepsNoCandidates: the caller may wait for a client for minutes. What is collected at once takes little, however short the keys are.
func TestAPausedDifferenceKeepsNoCandidates(t *testing.T) {
	const n = 20_000
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	w := Write{Durability: DurabilityAsync}
	for i := range n {
		w.Set(fmt.Appendf(nil, "%05d", i), nil)
	}
	if _, err := commitAndWait(x, &w); err != nil {
		t.Fatal(err)
	}
	mustCheckpoint(t, s)
	mustSnapshot(t, x)
	d, err := x.Difference(DifferenceOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	d.walk.Bounds.Pages = 1000
	for i := range n {
		if !d.Next() || string(d.Key()) != fmt.Sprintf("%05d", i) {
			t.Fatalf("%q, %v; want key %d", d.Key(), d.Err(), i)
		}
		if most := d.walk.Bounds.Bytes / 48; len(d.found) > most {
			t.Fatalf("%d candidates, want at most %d", len(d.found), most)
		}
		if i%1000 == 999 {
			if len(d.found) == 0 {
				t.Fatal("there are no candidates: the test tests nothing")
			}
			walk := reflect.ValueOf(&d.walk).Elem()
			if d.Pause(); len(d.found) > 0 || walk.FieldByName("found").Cap()+walk.FieldByName("bytes").Cap()+walk.FieldByName("keys").Cap() > 0 {
				t.Fatal("a paused difference keeps candidates")
			}
		}
	}
	if d.Next() || d.Err() != nil {
		t.Fatalf("%q, %v; want the end", d.Key(), d.Err())
	}
}
