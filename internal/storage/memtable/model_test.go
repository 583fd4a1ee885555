package memtable

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// tiny makes splits, growth, new regions and full index windows happen every few inserts.
func tiny() Config {
	return Config{
		Bytes:  64 << 10,
		Prefix: []byte("p"),
		layout: layout{slots: 4, reserveBytes: 16 << 20, stepBytes: 64 << 10, regionBytes: 256, indexBytes: 1},
	}
}

// model is a table as a sorted slice of internal entries.
type model []entry

type entry struct {
	key     string
	trailer keys.Trailer
	value   string
	sync    bool
}

func (e entry) compare(o entry) int {
	return keys.Compare([]byte(e.key), e.trailer, []byte(o.key), o.trailer)
}

func (m *model) add(e entry) {
	i, _ := slices.BinarySearchFunc(*m, e, entry.compare)
	*m = slices.Insert(*m, i, e)
}

func (m model) at(key string, at keys.Epoch) (entry, bool) {
	i, _ := slices.BinarySearchFunc(m, entry{key: key, trailer: keys.MakeTrailer(at, 255)}, entry.compare)
	if i < len(m) && m[i].key == key {
		return m[i], true
	}
	return entry{}, false
}

// lower is the index of the first entry whose user key is >= key.
func (m model) lower(key string) int {
	i, _ := slices.BinarySearchFunc(m, entry{key: key, trailer: keys.MakeTrailer(keys.MaxEpoch, 255)}, entry.compare)
	return i
}

func (m model) keyCount() int {
	n := 0
	for i := range m {
		if i == 0 || m[i].key != m[i-1].key {
			n++
		}
	}
	return n
}

func drawKey(t *rapid.T, label string) string {
	prefix := rapid.SampledFrom([]string{"p", "p", "p", "p", "paaaa", "o", "q", "", "pp\x00\x00"}).Draw(t, label+" prefix")
	k := prefix + rapid.StringN(0, 3, 12).Draw(t, label)
	if k == "" {
		return "\x00"
	}
	return k
}

// drawHeads learns from some keys like those to come, or from none.
func drawHeads(t *rapid.T) *Heads {
	var sample [][]byte
	for range rapid.IntRange(0, 40).Draw(t, "sample") {
		sample = append(sample, []byte(drawKey(t, "sampled")))
	}
	slices.SortFunc(sample, bytes.Compare)
	if sample = slices.CompactFunc(sample, bytes.Equal); len(sample) == 0 {
		return nil
	}
	return learnHeads(sample, rapid.IntRange(len(sample), 1000).Draw(t, "population"), nil)
}

func drawBody(t *rapid.T, epoch keys.Epoch, sync bool, m *model) *batch.Body {
	var b batch.Builder
	seen := map[string]bool{}
	for range rapid.IntRange(1, 12).Draw(t, "ops") {
		k := drawKey(t, "key")
		if seen[k] {
			continue
		}
		seen[k] = true
		internal := []byte(k)
		if rapid.IntRange(0, 4).Draw(t, "kind") == 0 {
			b.Delete(keys.SpaceOf(internal), keys.User(internal))
			m.add(entry{k, keys.MakeTrailer(epoch, keys.KindDelete), "", sync})
			continue
		}
		v := rapid.StringN(0, 20, 40).Draw(t, "value")
		b.Set(keys.SpaceOf(internal), keys.User(internal), []byte(v))
		m.add(entry{k, keys.MakeTrailer(epoch, keys.KindSet), v, sync})
	}
	body, err := b.Finish()
	if err != nil {
		t.Fatal(err)
	}
	return body
}

func TestTableIsASortedMapOfVersions(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := tiny()
		c.layout.slots = rapid.SampledFrom([]int{2, 3, 4, 7, slotsMax}).Draw(t, "slots")
		c.layout.indexBytes = rapid.SampledFrom([]int{1, 1 << 20}).Draw(t, "index")
		c.Heads = drawHeads(t)
		tab, err := New(c)
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := tab.Free(); err != nil {
				t.Fatal(err)
			}
		}()
		var (
			m     model
			ins   [3]Inserter
			epoch keys.Epoch
			it    Iter
		)
		for range rapid.IntRange(1, 30).Draw(t, "batches") {
			epoch++
			sync := rapid.Bool().Draw(t, "sync")
			body := drawBody(t, epoch, sync, &m)
			in := &ins[rapid.IntRange(0, len(ins)-1).Draw(t, "inserter")]
			if err := tab.Secure(in, MaxSize(body)); err != nil {
				t.Fatal(err)
			}
			if err := tab.Apply(in, body, epoch, sync); err != nil {
				t.Fatal(err)
			}
		}
		if tab.Count() != m.keyCount() || tab.Versions() != len(m) {
			t.Fatalf("counts %d keys, %d versions, want %d, %d", tab.Count(), tab.Versions(), m.keyCount(), len(m))
		}
		it.Init(tab)
		checkWholeIteration(t, &it, m)
		for range 20 {
			k := drawKey(t, "probe")
			at := keys.Epoch(rapid.Uint64Range(0, uint64(epoch)).Draw(t, "at"))
			checkPoint(t, tab, m, k, at)
			checkSeeks(t, &it, m, k, at)
		}
		checkWalk(t, &it, m)
	})
}

func check(t *rapid.T, it *Iter, m model, i int, what string) {
	t.Helper()
	if i < 0 || i >= len(m) {
		if it.Valid() {
			t.Fatalf("%s: at %q, want the end", what, it.Key())
		}
		return
	}
	if !it.Valid() {
		t.Fatalf("%s: at the end, want %q", what, m[i].key)
	}
	if got := (entry{string(it.Key()), it.Trailer(), string(it.Value()), it.Version().Sync}); got != m[i] {
		t.Fatalf("%s: %+v, want %+v", what, got, m[i])
	}
}

func checkWholeIteration(t *rapid.T, it *Iter, m model) {
	i := 0
	for it.First(); it.Valid(); it.Next() {
		check(t, it, m, i, "forward")
		i++
	}
	if i != len(m) {
		t.Fatalf("forward saw %d of %d", i, len(m))
	}
	for it.Last(); it.Valid(); it.Prev() {
		i--
		check(t, it, m, i, "backward")
	}
	if i != 0 {
		t.Fatalf("backward missed %d", i)
	}
}

func checkPoint(t *rapid.T, tab *Table, m model, k string, at keys.Epoch) {
	want, found := m.at(k, at)
	v, ok := tab.Get([]byte(k), at)
	if ok != found || ok && (entry{k, keys.MakeTrailer(v.Epoch, v.Kind), string(v.Value), v.Sync}) != want {
		t.Fatalf("get %q at %d: %+v %v, want %+v %v", k, at, v, ok, want, found)
	}
	n := tab.search([]byte(k), tab.heads.of([]byte(k)))
	if _, ever := m.at(k, keys.MaxEpoch); (n != 0) != ever {
		t.Fatalf("the blocks' answer for %q is %v, want %v", k, n != 0, ever)
	}
}

func checkSeeks(t *rapid.T, it *Iter, m model, k string, at keys.Epoch) {
	i := m.lower(k)
	it.SeekGE([]byte(k))
	check(t, it, m, i, "SeekGE "+k)
	it.SeekLT([]byte(k))
	check(t, it, m, i-1, "SeekLT "+k)
	if it.SeekGE([]byte(k)) {
		r := it.VersionAt(at)
		want, found := m.at(m[i].key, at)
		if r.Found() != found || found && r.Epoch() != want.trailer.Epoch() {
			t.Fatalf("VersionAt(%d) of %q: %v, want %+v", at, it.Key(), r, want)
		}
	}
}

// checkWalk goes forth and back at random.
func checkWalk(t *rapid.T, it *Iter, m model) {
	k := drawKey(t, "start")
	i := m.lower(k)
	it.SeekGE([]byte(k))
	for n := range 40 {
		if i < 0 || i >= len(m) {
			return
		}
		what := ""
		switch rapid.IntRange(0, 3).Draw(t, "step") {
		case 0:
			what, i = "Next", i+1
			it.Next()
		case 1:
			what, i = "Prev", i-1
			it.Prev()
		case 2:
			here := m[i].key
			for i < len(m) && m[i].key == here {
				i++
			}
			what = "NextKey"
			it.NextKey()
		case 3:
			what, i = "PrevKey", m.lower(m[i].key)-1
			if i >= 0 {
				i = m.lower(m[i].key)
			}
			it.PrevKey()
		}
		check(t, it, m, i, fmt.Sprintf("step %d, %s", n, what))
	}
}

func TestHeadsOrderAsTheirKeys(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		prefix := []byte(rapid.SampledFrom([]string{"", "p", "paa", "\xff\xff", "\x00"}).Draw(t, "prefix"))
		gen := rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 'a', 'p', 0xff}), 0, 8)
		a, b := gen.Draw(t, "a"), gen.Draw(t, "b")
		if rapid.Bool().Draw(t, "inside") {
			a, b = append(slices.Clone(prefix), a...), append(slices.Clone(prefix), b...)
		}
		ha, hb := plainHeads(prefix, nil).of(a), plainHeads(prefix, nil).of(b)
		if c := bytes.Compare(a, b); c < 0 && ha > hb || c > 0 && ha < hb || c == 0 && ha != hb {
			t.Fatalf("keys %q %q have heads %x %x", a, b, ha, hb)
		}
	})
}
