package memtable

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/testseed"
)

// windowShapes are keys of which windows see few or many in a block, and heads that tell nothing.
var windowShapes = map[string]func(r *rand.Rand, i int) []byte{
	"random":     func(r *rand.Rand, _ int) []byte { return binary.BigEndian.AppendUint64([]byte("p"), r.Uint64()) },
	"ascending":  func(_ *rand.Rand, i int) []byte { return binary.BigEndian.AppendUint64([]byte("p"), uint64(i)<<40) },
	"descending": func(_ *rand.Rand, i int) []byte { return binary.BigEndian.AppendUint64([]byte("p"), -uint64(i)<<40) },
	"equal heads": func(r *rand.Rand, _ int) []byte {
		return fmt.Appendf(nil, "ptable/%011d/column", r.IntN(20_000))
	},
	"many versions": func(r *rand.Rand, _ int) []byte { return binary.BigEndian.AppendUint64([]byte("p"), r.Uint64N(50)<<56) },
}

// addSome adds a value, some of which have metadata or are long, so that they are in pieces, and returns what is stored.
func addSome(b *batch.Builder, key []byte, number int) string {
	value := fmt.Append(nil, number)
	if number%10 > 7 {
		value = append(value, make([]byte, 600)...)
	}
	if number%10 < 9 {
		b.SetShared(keys.SpaceOf(key), keys.User(key), value)
		return string(value)
	}
	f := metadata.Fields{ExpiresAt: uint64(number)}
	b.SetMetadataShared(keys.SpaceOf(key), keys.User(key), &f, value)
	return string(append(f.Append(nil), value...))
}

// TestBatchesInstallEveryOperation applies batches around the size of a window, and of several windows, that
// overwrite keys, split blocks and build guides.
func TestBatchesInstallEveryOperation(t *testing.T) {
	testseed.SkipUnderRace(t)
	for name, shape := range windowShapes {
		t.Run(name, func(t *testing.T) {
			rnd := seeded(t)(0)
			tab := mustNew(t, Config{Bytes: 8 << 20, Prefix: []byte("p")})
			var in Inserter
			var b batch.Builder
			want, versions, made := map[string]string{}, 0, 0
			for epoch := keys.Epoch(1); made < 20_000; epoch++ {
				b.Reset()
				now := map[string]string{}
				for range 1 + rnd.IntN(4*windowOps) {
					key := shape(rnd, made)
					if _, twice := now[string(key)]; !twice {
						now[string(key)] = addSome(&b, key, made)
					}
					made++
				}
				versions += len(now)
				for k, v := range now {
					want[k] = v
				}
				applyAll(t, tab, &in, &b, epoch)
			}
			if tab.Count() != len(want) || tab.Versions() != versions {
				t.Errorf("%d keys and %d versions, want %d and %d", tab.Count(), tab.Versions(), len(want), versions)
			}
			checkHolds(t, tab, want)
		})
	}
}

func applyAll(t *testing.T, tab *Table, in *Inserter, b *batch.Builder, epoch keys.Epoch) {
	t.Helper()
	body, err := b.Finish()
	if err == nil {
		err = tab.Secure(in, MaxSize(body))
	}
	if err == nil {
		err = tab.Apply(in, body, epoch, false)
	}
	if err != nil {
		t.Error(err)
	}
}

// checkHolds looks every key up, and walks over all of them in order.
func checkHolds(t *testing.T, tab *Table, want map[string]string) {
	t.Helper()
	for k, v := range want {
		if got, ok := tab.Newest([]byte(k)); !ok || string(got.Value) != v {
			t.Fatalf("%q is %q (%v), want %q", k, got.Value, ok, v)
		}
		if tab.search([]byte(k), tab.heads.of([]byte(k))) == 0 {
			t.Fatalf("%q is not in its block", k)
		}
	}
	var it Iter
	it.Init(tab)
	var last []byte
	n := 0
	for ok := it.First(); ok; ok = it.NextKey() {
		if n > 0 && bytes.Compare(last, it.Key()) >= 0 {
			t.Fatalf("%q comes after %q", it.Key(), last)
		}
		last = bytes.Clone(it.Key())
		n++
	}
	if n != len(want) {
		t.Errorf("a walk finds %d keys, want %d", n, len(want))
	}
}

// TestBatchesOfSeveralWritersInstallEveryOperation lets writers apply batches of the same keys: what a window has
// located is split, and what it has not found is added, before it inserts.
func TestBatchesOfSeveralWritersInstallEveryOperation(t *testing.T) {
	const writers, batches, size = 4, 60, 5 * windowOps
	rnd := seeded(t)
	tab := mustNew(t, tiny())
	var group sync.WaitGroup
	for writer := range writers {
		group.Go(func() {
			var in Inserter
			var b batch.Builder
			for n := range batches {
				r := rnd(n) // all writers draw the same keys
				b.Reset()
				for range size {
					key := binary.BigEndian.AppendUint64([]byte("p"), r.Uint64())
					b.Set(keys.SpaceOf(key), keys.User(key), []byte("v"))
				}
				applyAll(t, tab, &in, &b, keys.Epoch(1+n*writers+writer))
			}
		})
	}
	group.Wait()
	want := map[string]string{}
	for n := range batches {
		r := rnd(n)
		for range size {
			want[string(binary.BigEndian.AppendUint64([]byte("p"), r.Uint64()))] = "v"
		}
	}
	if tab.Count() != len(want) || tab.Versions() != writers*len(want) {
		t.Errorf("%d keys and %d versions, want %d and %d", tab.Count(), tab.Versions(), len(want), writers*len(want))
	}
	checkHolds(t, tab, want)
}
