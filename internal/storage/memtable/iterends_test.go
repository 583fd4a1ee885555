package memtable

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// TestIteratorComesBackFromPastAnEnd: a random walk over versions, over keys, and over both in
// turns, off both ends and back, is where a walk over a sorted slice is.
func TestIteratorComesBackFromPastAnEnd(t *testing.T) {
	for seed := range uint64(100) {
		random := rand.New(rand.NewPCG(seed, 7))
		tab, err := New(tiny())
		if err != nil {
			t.Fatal(err)
		}
		var in Inserter
		var m model
		for epoch := keys.Epoch(1); epoch <= keys.Epoch(random.IntN(8)); epoch++ {
			var b batch.Builder
			for _, n := range random.Perm(12)[:1+random.IntN(6)] {
				key, value := fmt.Sprintf("p%02d", n), fmt.Sprint(epoch)
				b.Set(keys.SpaceOf([]byte(key)), keys.User([]byte(key)), []byte(value))
				m.add(entry{key: key, trailer: keys.MakeTrailer(epoch, keys.KindSet), value: value})
			}
			body, err := b.Finish()
			if err != nil {
				t.Fatal(err)
			}
			if err := tab.Secure(&in, MaxSize(body)); err != nil {
				t.Fatal(err)
			}
			if err := tab.Apply(&in, body, epoch, false); err != nil {
				t.Fatal(err)
			}
		}
		var it Iter
		it.Init(tab)
		if it.Next() || it.Prev() || it.NextKey() || it.PrevKey() {
			t.Fatalf("seed %d: a step leads somewhere before the iterator was positioned", seed)
		}
		walk(t, seed, random, &it, m)
		if err := tab.Free(); err != nil {
			t.Fatal(err)
		}
	}
}

func walk(t *testing.T, seed uint64, random *rand.Rand, it *Iter, m model) {
	t.Helper()
	at := -1 // in m, one out at either end
	for step := range 300 {
		key := fmt.Sprintf("p%02d", random.IntN(14)-1)
		n := random.IntN(9)
		if step == 0 {
			n %= 4
		}
		var ok bool
		switch n {
		case 0:
			ok, at = it.SeekGE([]byte(key)), m.lower(key)
		case 1:
			ok, at = it.SeekLT([]byte(key)), m.lower(key)-1
		case 2:
			ok, at = it.First(), 0
		case 3:
			ok, at = it.Last(), len(m)-1
		case 8:
			ok, at = it.SeekNearGE([]byte(key)), m.lower(key)
		case 4:
			ok, at = it.Next(), min(at+1, len(m))
		case 5:
			ok, at = it.Prev(), max(at-1, -1)
		case 6:
			ok, at = it.NextKey(), m.nextKey(at)
		case 7:
			ok, at = it.PrevKey(), m.prevKey(at)
		}
		if ok != (at >= 0 && at < len(m)) || ok != it.Valid() {
			t.Fatalf("seed %d, step %d (%d, %q): on an entry: %v; at %d of %d", seed, step, n, key, ok, at, len(m))
		}
		if ok && (!bytes.Equal(it.Key(), []byte(m[at].key)) || it.Trailer() != m[at].trailer) {
			t.Fatalf("seed %d, step %d (%d): on %q %x, not %q %x", seed, step, n, it.Key(), it.Trailer(), m[at].key, m[at].trailer)
		}
	}
}

// nextKey is the index of the newest version of the key after the one at an index.
func (m model) nextKey(at int) int {
	if at < 0 {
		return 0
	}
	for at < len(m) {
		if at++; at == len(m) || m[at].key != m[at-1].key {
			break
		}
	}
	return at
}

// prevKey is the index of the newest version of the key before the one at an index.
func (m model) prevKey(at int) int {
	if len(m) == 0 {
		return -1
	}
	if at >= len(m) {
		return m.lower(m[len(m)-1].key)
	}
	if at < 0 {
		return -1
	}
	before := m.lower(m[at].key) - 1
	if before < 0 {
		return -1
	}
	return slices.IndexFunc(m, func(e entry) bool { return e.key == m[before].key })
}
