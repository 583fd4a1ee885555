package btree

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/testseed"
)

// clone copies the store, so that one merge can be done twice.
func (s *store) clone() *store {
	return &store{
		size: s.size, pages: maps.Clone(s.pages), used: slices.Clone(s.used),
		values: maps.Clone(s.values), nextRef: s.nextRef,
	}
}

// numbered is n entries with ascending keys from first on.
func numbered(first, n int, epoch keys.Epoch, valueSize int) []Entry {
	out := make([]Entry, n)
	for i := range out {
		out[i] = set(fmt.Sprintf("key%08d", first+i), epoch, string(bytes.Repeat([]byte{byte(i)}, valueSize)))
	}
	return out
}

// shuffled is entries in an order that the seed decides.
func shuffled(entries []Entry, seed uint64) []Entry {
	out := slices.Clone(entries)
	rand.New(rand.NewPCG(seed, 0)).Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

func sorted(entries []Entry) []Entry {
	slices.SortFunc(entries, func(a, b Entry) int { return keys.Compare(a.Key, a.Trailer, b.Key, b.Trailer) })
	return entries
}

// TestLongKeysThatShareMostAreMergedInLittleMemory: of the longest keys a page of 64 KiB has thousands if they share nearly all of their bytes. No merge
// has them all at full length.
func TestLongKeysThatShareMostAreMergedInLittleMemory(t *testing.T) {
	const size, n, most = 64 << 10, 4000, 16 << 20 // of 62 MiB
	s := newStore(size)
	long := bytes.Repeat([]byte("k"), 16<<10-16)
	var entries [2][]Entry
	for i := range n {
		entries[i%2] = append(entries[i%2], set(fmt.Sprintf("%s%08d", long, i), keys.Epoch(1+i%2), ""))
	}
	var root Root
	for _, some := range entries {
		in := s.mergeInput(root, some, allVisible)
		took := allocatedBytes(func() { root = s.apply(t, in).Root })
		if took > most && !invariants.Enabled { // the assertions look at all entries of a leaf at full length
			t.Errorf("a merge allocated %d MiB", took>>20)
		}
	}
	s.check(t, root)
	got := 0
	err := Walk(s, root, &Visitor{Page: func(_ page.ID, level int, p []byte) error {
		if level == 0 {
			v := page.Leaf(p).Layout()
			got += v.Count()
		}
		return nil
	}})
	if err != nil || got != n {
		t.Errorf("%d keys, want %d: %v", got, n, err)
	}
}

// allocatedBytes is how much do allocates.
func allocatedBytes(do func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	do()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

func deletes(entries []Entry, epoch keys.Epoch) []Entry {
	out := slices.Clone(entries)
	for i := range out {
		out[i].Trailer, out[i].Value = keys.MakeTrailer(epoch, keys.KindDelete), nil
	}
	return out
}

var allVisible = Policy{MinVisible: keys.MaxEpoch}

// TestWorkersDoNotChangeAByte does the same merge with one worker and with several and compares
// everything they wrote.
func TestWorkersDoNotChangeAByte(t *testing.T) {
	base := newStore(512)
	root := base.apply(t, base.mergeInput(Root{}, numbered(0, 20000, 1, 12), allVisible)).Root
	for name, entries := range map[string][]Entry{
		"scattered": sorted(shuffled(numbered(0, 30000, 2, 300), 1)[:3000]),
		"all":       numbered(0, 25000, 2, 20),
		"skewed":    append(numbered(5, 3, 2, 9), numbered(30000, 30000, 2, 40)...),
		"deletes":   sorted(deletes(shuffled(numbered(0, 20000, 1, 0), 2)[:15000], 2)),
	} {
		t.Run(name, func(t *testing.T) {
			var want *store
			var wantResult *Result
			for _, workers := range []int{1, 3, 0} {
				s := base.clone()
				in := s.mergeInput(root, entries, allVisible)
				in.Workers = Always(workers)
				if workers == 0 {
					in.Workers = func() int { return rand.IntN(5) }
				}
				in.Cuts.Keys = [][]byte{[]byte("key00000700"), []byte("key000123"), []byte("key0004"), []byte("key00086")}
				in.Relocate = Relocation{From: 500, Max: 50}
				res := s.apply(t, in)
				s.check(t, res.Root)
				if want == nil {
					want, wantResult = s, res
					continue
				}
				if !maps.EqualFunc(s.pages, want.pages, bytes.Equal) || !maps.EqualFunc(s.values, want.values, bytes.Equal) {
					t.Fatalf("%d workers wrote other bytes than one", workers)
				}
				if fmt.Sprint(res) != fmt.Sprint(wantResult) {
					t.Fatalf("%d workers: %+v, one: %+v", workers, res.Stats, wantResult.Stats)
				}
			}
		})
	}
}

// TestWorkersComeAndGo: a merge has as many workers as it should have, from one partition to the next.
func TestWorkersComeAndGo(t *testing.T) {
	s := newStore(512)
	root := s.apply(t, s.mergeInput(Root{}, numbered(0, 30000, 1, 12), allVisible)).Root
	in := s.mergeInput(root, numbered(0, 30000, 2, 12), allVisible)
	var asked, most, late, now atomic.Int32
	in.Workers = func() int {
		switch n := asked.Add(1); {
		case n < 20:
			return 1
		case n < 40, 60 <= n && n < 80:
			return 4
		default:
			return 2
		}
	}
	source := in.Source
	workers := 0
	in.Source = func() Source {
		workers++ // those of the planner and of the upper levels, too
		return source()
	}
	in.Written = func(page.ID, page.ID, []byte) {
		running := now.Add(1)
		most.Store(max(most.Load(), running))
		if asked.Load() > 100 {
			late.Store(max(late.Load(), running))
		}
		time.Sleep(20 * time.Microsecond)
		now.Add(-1)
	}
	res := s.apply(t, in)
	s.check(t, res.Root)
	if workers > 2+4 {
		t.Errorf("%d workers were made, of which four were to run at once", workers-2)
	}
	if asked.Load() < 140 || most.Load() < 2 || late.Load() > 2 {
		t.Errorf("asked %d times; %d goroutines wrote at once, %d when there should be two", asked.Load(), most.Load(), late.Load())
	}
}

// TestValuesAroundPageSizesSurvive puts values of every length around the inline limit and the page
// payload under the shortest and the longest keys, one by one and together.
func TestValuesAroundPageSizesSurvive(t *testing.T) {
	for _, size := range []int{512, 8192, 65536} {
		s := newStore(size)
		var entries []Entry
		for _, around := range []int{16, page.InlineMax(size), page.Payload(size)} {
			for d := -16; d <= 16; d++ {
				short := fmt.Sprintf("%05d", around+d)
				long := short + string(bytes.Repeat([]byte{'k'}, page.KeySizeMax(size)-len(short)))
				value := string(bytes.Repeat([]byte{byte(d)}, around+d))
				entries = append(entries, set(short, 1, value), set(long, 1, value))
			}
		}
		root := s.apply(t, s.mergeInput(Root{}, entries[:1], allVisible)).Root
		for _, e := range shuffled(entries, 3)[:40] {
			root = s.apply(t, s.mergeInput(root, []Entry{e}, allVisible)).Root
		}
		root = s.apply(t, s.mergeInput(root, sorted(entries), allVisible)).Root
		s.check(t, root)
		for _, e := range entries {
			v, ok, err := Get(s, root, e.Key, 1)
			if !ok || err != nil || !bytes.Equal(s.value(t, v), e.Value) || v.Large != (len(e.Value) > page.InlineMax(size)) {
				t.Fatalf("size %d: key of %d, value of %d bytes: %v, %v", size, len(e.Key), len(e.Value), ok, err)
			}
		}
	}
}

// TestKeySizesOutOfBoundsChangeNothing tries the longest key that a page takes, and one byte more,
// and none.
func TestKeySizesOutOfBoundsChangeNothing(t *testing.T) {
	s := newStore(512)
	root := s.apply(t, s.mergeInput(Root{}, numbered(0, 100, 1, 9), allVisible)).Root
	long := bytes.Repeat([]byte{'z'}, page.KeySizeMax(512)+1)
	for _, key := range [][]byte{long, nil} {
		bad := Entry{Key: key, Trailer: keys.MakeTrailer(2, keys.KindSet)}
		if _, err := Merge(context.Background(), s.clone().mergeInput(root, []Entry{bad}, allVisible)); !errors.Is(err, ErrKeySize) {
			t.Fatalf("key of %d bytes: %v", len(key), err)
		}
	}
	good := Entry{Key: long[1:], Trailer: keys.MakeTrailer(2, keys.KindSet)}
	root = s.apply(t, s.mergeInput(root, []Entry{good}, allVisible)).Root
	if _, ok, _ := Get(s, root, good.Key, 2); !ok {
		t.Fatal("longest key not found")
	}
}

// TestInputOutOfOrderIsRefused swaps two keys, and two versions of one key.
func TestInputOutOfOrderIsRefused(t *testing.T) {
	s := newStore(512)
	root := s.apply(t, s.mergeInput(Root{}, numbered(0, 1000, 1, 9), allVisible)).Root
	for _, base := range []Root{{}, root} {
		for _, entries := range [][]Entry{
			{set("key00000005", 2, ""), set("key00000004", 2, "")},
			{set("a", 2, ""), set("zzz", 2, ""), set("key00000004", 2, "")},
			{set("key00000005", 2, ""), set("key00000005", 3, "")},
		} {
			in := s.clone().mergeInput(base, entries, Policy{})
			if _, err := Merge(context.Background(), in); !errors.Is(err, ErrInputOrder) {
				t.Errorf("%v: %v", entries, err)
			}
		}
	}
}

// TestTreeShrinksToNothing deletes random keys until none is left, a few and many at a time, and
// watches height and fill on the way.
func TestTreeShrinksToNothing(t *testing.T) {
	testseed.SkipUnderRace(t)
	for _, c := range []struct{ n, batch int }{{20000, 500}, {3000, 1}} {
		s := newStore(512)
		root := s.apply(t, s.mergeInput(Root{}, numbered(0, c.n, 1, 12), allVisible)).Root
		full, level := len(s.pages), root.Level
		order := shuffled(numbered(0, c.n, 1, 0), 4)
		for from := 0; from < c.n; from += c.batch {
			root = s.apply(t, s.mergeInput(root, sorted(deletes(order[from:from+c.batch], 2)), allVisible)).Root
			if from%(50*c.batch) == 0 {
				s.check(t, root)
			}
			if leaves, inner := s.kinds(); inner > root.Level+leaves/3 {
				t.Fatalf("%d at a time: %d inner nodes above %d leaves", c.batch, inner, leaves)
			}
			if root.Level > level {
				t.Fatalf("height grew to %d with %d keys left", root.Level, c.n-from-c.batch)
			}
			level = root.Level
			left := float64(c.n-from-c.batch) / float64(c.n)
			if pages := float64(len(s.pages)) / float64(full); pages > 2.2*left+0.02 {
				t.Fatalf("%d at a time: %.3f of the keys are left in %.3f of the pages", c.batch, left, pages)
			}
		}
		if !root.Empty() || len(s.pages) != 0 {
			t.Fatalf("empty tree has root %+v and %d pages", root, len(s.pages))
		}
	}
}

// kinds counts the pages by kind.
func (s *store) kinds() (leaves, inner int) {
	for _, p := range s.pages {
		if page.IsTree(p, 0) {
			leaves++
		}
	}
	return leaves, len(s.pages) - leaves
}

// fill is how full the leaves are on average.
func (s *store) fill() float64 {
	used, n := 0, 0
	for _, p := range s.pages {
		if page.IsTree(p, 0) {
			used += page.Leaf(p).Used()
			n++
		}
	}
	return float64(used) / float64(n*s.size)
}

// TestLeavesAreReasonablyFull builds trees in typical orders of keys.
func TestLeavesAreReasonablyFull(t *testing.T) {
	testseed.SkipUnderRace(t)
	all := numbered(0, 15000, 1, 40)
	for _, c := range []struct {
		name  string
		order []Entry
		batch int
		least float64
	}{
		{"ascending singles", all[:1000], 1, 0.85},
		{"ascending batches", all, 100, 0.80},
		{"random batches", shuffled(all, 5), 300, 0.62},
		{"random large batches", shuffled(all, 5), 6000, 0.75},
		{"bulk", all, len(all), 0.87},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStore(2048)
			var root Root
			for b := range slices.Chunk(c.order, c.batch) {
				root = s.apply(t, s.mergeInput(root, sorted(slices.Clone(b)), allVisible)).Root
			}
			s.check(t, root)
			t.Logf("fill %.3f in %d pages", s.fill(), len(s.pages))
			if f := s.fill(); f < c.least {
				t.Fatalf("leaves are %.2f full, want %.2f", f, c.least)
			}
		})
	}
}

// TestDeadVersionsAreDropped checks the policy's decisions for one key.
func TestDeadVersionsAreDropped(t *testing.T) {
	for _, c := range []struct {
		name          string
		versions      string // newest first, epoch and kind
		min           keys.Epoch
		live          []keys.Epoch
		want          string
		wantTombstone int64
	}{
		{"newest below the horizon stays", "5s 3s 1s", 4, nil, "5s 3s", 0},
		{"exactly at the horizon", "5s 3s 1s", 3, nil, "5s 3s", 0},
		{"all newer than the horizon stay", "9s 8s 7s", 2, nil, "9s 8s 7s", 0},
		{"interior between two snapshots goes", "9s 7s 6s 2s", 2, []keys.Epoch{2, 8}, "9s 7s 2s", 0},
		{"interior that a snapshot sees stays", "9s 7s 6s 2s", 2, []keys.Epoch{2, 6, 8}, "9s 7s 6s 2s", 0},
		{"after the last snapshot all stay", "9s 8s 7s", 3, []keys.Epoch{3, 5}, "9s 8s 7s", 0},
		{"tombstone with nothing below goes", "5d 3s", 5, nil, "", 1},
		{"tombstone that hides from a snapshot stays", "5d 3s", 4, nil, "5d 3s", 0},
		{"value over a tombstone", "6s 5d 3s", 5, nil, "6s", 1},
		{"tombstone above the horizon with nothing below stays", "5d", 4, nil, "5d", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStore(512)
			var entries []Entry
			for f := range bytes.FieldsSeq([]byte(c.versions)) {
				e := set("k", keys.Epoch(f[0]-'0'), "v")
				if f[1] == 'd' {
					e = deletes([]Entry{e}, e.Trailer.Epoch())[0]
				}
				entries = append(entries, e)
			}
			split := len(entries) / 2 // the older half is in the tree already
			root := s.apply(t, s.mergeInput(Root{}, entries[split:], Policy{})).Root
			res := s.apply(t, s.mergeInput(root, entries[:split], Policy{MinVisible: c.min, Snapshots: c.live}))
			if got := s.versions(t, res.Root, "k"); got != c.want || res.Stats.TombstonesDropped != c.wantTombstone {
				t.Fatalf("left %q, dropped %d tombstones, want %q, %d", got, res.Stats.TombstonesDropped, c.want, c.wantTombstone)
			}
		})
	}
}

// versions lists what the tree has of key, newest first.
func (s *store) versions(t *testing.T, root Root, key string) string {
	t.Helper()
	var out []string
	err := Walk(s, root, &Visitor{Page: func(_ page.ID, level int, p []byte) error {
		if level > 0 {
			return nil
		}
		v := page.Leaf(p).Layout()
		for i := range v.Count() {
			if string(v.Prefix())+string(v.Suffix(i)) == key {
				out = append(out, fmt.Sprintf("%d%c", v.Trailer(i).Epoch(), "ds"[v.Trailer(i).Kind()]))
			}
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	return string(bytes.Join(func() (b [][]byte) {
		for _, o := range out {
			b = append(b, []byte(o))
		}
		return b
	}(), []byte(" ")))
}

// TestVersionsOfOneKeySpanLeaves retains thousands of versions of one key, reads all of them in
// both directions, and drops them.
func TestVersionsOfOneKeySpanLeaves(t *testing.T) {
	s := newStore(512)
	var root Root
	const n = 3000
	for e := 1; e <= n; e += 100 {
		entries := []Entry{set("a", keys.Epoch(e), "left"), set("z", keys.Epoch(e), "right")}
		for i := range 100 {
			entries = append(entries, set("hot", keys.Epoch(e+i), fmt.Sprint("value", e+i)))
		}
		root = s.apply(t, s.mergeInput(root, sorted(entries), Policy{})).Root
	}
	s.check(t, root)
	var c Cursor
	for e := keys.Epoch(1); e <= n; e += 7 {
		want := fmt.Sprint("value", e)
		v, ok, err := Get(s, root, []byte("hot"), e)
		if !ok || err != nil || string(v.Value) != want {
			t.Fatalf("at %d: %q %v %v", e, v.Value, ok, err)
		}
		c.Reset(s, root, e, nil, nil)
		var got []string
		for ok := c.First(); ok; ok = c.Next() {
			got = append(got, string(c.Key()), string(c.Version().Value))
		}
		for ok := c.Last(); ok; ok = c.Prev() {
			got = append(got, string(c.Key()), string(c.Version().Value))
		}
		if w := fmt.Sprint([]string{"a", "left", "hot", want, "z", "right", "z", "right", "hot", want, "a", "left"}); fmt.Sprint(got) != w {
			t.Fatalf("at %d: %v", e, got)
		}
	}
	var touch []Entry
	for i := range 1000 {
		touch = append(touch, set("hot", keys.Epoch(n+1000-i), "last"))
	}
	taken, src := 0, &prefetchingSource{s, map[page.ID]bool{}, map[page.ID]bool{}}
	in := s.mergeInput(root, touch, allVisible)
	in.Input = func() Input { return &countingInput{SliceInput{Entries: touch}, &taken} }
	in.Source, in.Lookahead = func() Source { return src }, in.Input
	root = s.apply(t, in).Root
	s.check(t, root)
	if v := s.versions(t, root, "hot"); v != fmt.Sprintf("%ds", n+1000) {
		t.Fatalf("%d versions are left", len(v)/6)
	}
	if most := 4 * len(touch); taken > most { // by the planner, by the worker, and by what it reads ahead
		t.Errorf("%d entries were taken from an input of %d", taken, len(touch))
	}
}

// countingInput counts the entries that are taken from all inputs of a merge.
type countingInput struct {
	SliceInput
	taken *int
}

func (c *countingInput) Next(e *Entry) bool {
	*c.taken++
	return c.SliceInput.Next(e)
}

// TestRelocationEmptiesTheEndOfTheFile relocates pages until the file could be cut to little more
// than its live pages.
func TestRelocationEmptiesTheEndOfTheFile(t *testing.T) {
	s := newStore(512)
	all := numbered(0, 20000, 1, 12)
	root := s.apply(t, s.mergeInput(Root{}, all, allVisible)).Root
	root = s.apply(t, s.mergeInput(root, sorted(deletes(shuffled(all, 6)[:18000], 2)), allVisible)).Root
	for range 200 {
		last := slices.Max(slices.Collect(maps.Keys(s.pages)))
		if int(last) < len(s.pages)*5/4+extentMax {
			s.check(t, root)
			return
		}
		in := s.mergeInput(root, nil, allVisible)
		in.Relocate = Relocation{From: last - 100, Max: 16}
		res := s.apply(t, in)
		if n := len(res.Freed); n > 16*4+partitionLeaves {
			t.Fatalf("asked to move 16 pages, moved %d", n)
		}
		root = res.Root
	}
	t.Fatalf("%d pages still reach up to %d", len(s.pages), slices.Max(slices.Collect(maps.Keys(s.pages))))
}

// TestNothingToDoWritesNothing merges an empty input.
func TestNothingToDoWritesNothing(t *testing.T) {
	s := newStore(512)
	root := s.apply(t, s.mergeInput(Root{}, numbered(0, 5000, 1, 12), allVisible)).Root
	res := s.apply(t, s.mergeInput(root, nil, allVisible))
	if res.Root != root || res.Stats != (Stats{}) || res.Freed != nil {
		t.Fatalf("%+v", res)
	}
	if res = s.apply(t, s.mergeInput(Root{}, nil, allVisible)); !res.Root.Empty() {
		t.Fatalf("%+v", res)
	}
}

// faulty fails at the n-th call.
type faulty struct {
	*store
	left int
}

var errInjected = errors.New("injected")

func (f *faulty) call() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.left--; f.left < 0 {
		return errInjected
	}
	return nil
}

func (f *faulty) AllocExtent(n int) (page.ID, int, error) {
	if err := f.call(); err != nil {
		return 0, 0, err
	}
	return f.store.AllocExtent(n)
}

func (f *faulty) WritePage(id page.ID, p []byte) error {
	return errors.Join(f.call(), f.store.WritePage(id, p))
}

func (f *faulty) Page(id page.ID, level int) ([]byte, error) {
	if err := f.call(); err != nil {
		return nil, err
	}
	return f.store.Page(id, level)
}

func (f *faulty) Store(value []byte) (page.Ref, error) {
	if err := f.call(); err != nil {
		return page.Ref{}, err
	}
	return f.store.Store(value)
}

// TestFailedMergeReturnsItsError lets each call of a merge fail in turn, with one worker and with
// several, and cancels others. All workers must come back, and the base must be what it was.
func TestFailedMergeReturnsItsError(t *testing.T) {
	base := newStore(512)
	root := base.apply(t, base.mergeInput(Root{}, numbered(0, 3000, 1, 12), allVisible)).Root
	entries := sorted(shuffled(numbered(0, 6000, 2, 150), 1)[:300])
	for n := 0; ; n += 1 + n/8 {
		f := &faulty{store: base.clone(), left: n}
		in := f.mergeInput(root, entries, allVisible)
		in.Source = func() Source { return f }
		in.Sink, in.Values, in.Workers = f, f, Always(1+n%3)
		_, err := Merge(context.Background(), in)
		if err == nil {
			break
		}
		if !errors.Is(err, errInjected) {
			t.Fatalf("call %d: %v", n, err)
		}
		for id, p := range base.pages {
			if !bytes.Equal(f.pages[id], p) {
				t.Fatalf("call %d: page %d of the base changed", n, id)
			}
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Merge(ctx, base.mergeInput(root, entries, allVisible)); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}

// TestRepeatedInputChangesNothing merges the same versions twice, as a replay after a crash may.
func TestRepeatedInputChangesNothing(t *testing.T) {
	s := newStore(512)
	entries := sorted(append(numbered(0, 500, 1, 300), numbered(100, 300, 2, 30)...))
	root := s.apply(t, s.mergeInput(Root{}, entries, Policy{})).Root
	res := s.apply(t, s.mergeInput(root, entries, Policy{}))
	s.check(t, res.Root)
	if st := res.Stats; st.Keys != 0 || st.Versions != 0 || st.Bytes != 0 || st.Stored != st.Dropped {
		t.Fatalf("%+v", st)
	}
}

// prefetchingSource records the leaves that a merge prefetches and those that it reads.
type prefetchingSource struct {
	*store
	told, read map[page.ID]bool
}

func (f *prefetchingSource) Prefetch(leaves []page.ID) {
	for _, id := range leaves {
		f.told[id] = true
	}
}

func (f *prefetchingSource) Page(id page.ID, level int) ([]byte, error) {
	if level == 0 {
		f.read[id] = true
	}
	return f.store.Page(id, level)
}

// TestMergePrefetchesTheLeavesThatItReads: only then can they be read together. A leaf that is read
// to join an underfull neighbour is the exception.
func TestMergePrefetchesTheLeavesThatItReads(t *testing.T) {
	s := newStore(512)
	var all, some []Entry
	for i := range 5000 {
		all = append(all, set(fmt.Sprintf("key%06d", i), 1, "value"))
		if i%97 == 0 || i > 3000 && i < 3100 {
			some = append(some, set(fmt.Sprintf("key%06d", i), 2, "changed"))
		}
	}
	root := s.apply(t, s.mergeInput(Root{}, all, Policy{})).Root
	f := &prefetchingSource{s, map[page.ID]bool{}, map[page.ID]bool{}}
	in := s.mergeInput(root, some, Policy{MinVisible: keys.MaxEpoch})
	in.Source, in.Lookahead = func() Source { return f }, in.Input
	root = s.apply(t, in).Root
	s.check(t, root)
	surprised := 0
	for id := range f.read {
		if !f.told[id] {
			surprised++
		}
	}
	for id := range f.told {
		if !f.read[id] {
			t.Errorf("leaf %d was told and not read", id)
		}
	}
	if len(f.read) < 50 || surprised > len(f.read)/10 {
		t.Errorf("%d leaves read, %d of them not foreseen", len(f.read), surprised)
	}
}

// TestNodesOfLongAndShortSeparatorsFitTheirPages evens out two nodes, the first with few long
// separators, the second with many short ones, and the other way round.
func TestNodesOfLongAndShortSeparatorsFitTheirPages(t *testing.T) {
	const size = 1024
	child := func(i, length int) page.Child {
		key := append([]byte{byte(i)}, bytes.Repeat([]byte{'x'}, length-1)...)
		return page.Child{ID: 2, Separator: page.Separator{Key: key, Trailer: page.NoTrailer}}
	}
	for _, c := range []struct{ few, many int }{{3, 11}, {4, 12}, {4, 3}, {2, 12}} {
		for _, longFirst := range []bool{true, false} {
			var k nodePacker
			var all []page.Child
			for i := range c.few + c.many {
				long := i < c.few
				if !longFirst {
					long = i >= c.many
				}
				length := 4
				if long {
					length = 255
				}
				all = append(all, child(i+1, length))
			}
			first := c.few
			if !longFirst {
				first = c.many
			}
			for i, n := range all {
				r := &k.regions[0]
				if i >= first {
					r = &k.regions[1]
				}
				r.add(n)
			}
			k.second = true
			u := upper{m: &merge{MergeInput: &MergeInput{PageSize: size}}}
			u.balance(&k)
			got := slices.Clone(k.regions[0].children)
			if !nodeFits(got, page.Payload(size)) {
				t.Errorf("%+v: %d children do not fit", c, len(got))
			}
			if k.second {
				if !nodeFits(k.regions[1].children, page.Payload(size)) {
					t.Errorf("%+v: %d children do not fit", c, len(k.regions[1].children))
				}
				got = append(got, k.regions[1].children...)
			}
			if len(got) != len(all) {
				t.Errorf("%+v: %d children of %d", c, len(got), len(all))
			}
		}
	}
}
