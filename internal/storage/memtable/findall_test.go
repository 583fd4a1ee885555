package memtable

import (
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// TestFindAllFindsWhatFindFinds fills tables with keys of all sizes, some of them with several
// versions, and looks up windows of keys that are there and that are not, at several epochs. The
// last nodes are where the mapped memory ends.
func TestFindAllFindsWhatFindFinds(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	table := mustNew(t, Config{Bytes: 1 << 20, Prefix: []byte{byte(keys.SpaceUser)}})
	var in Inserter
	list := make([][]byte, 3000)
	for i := range list {
		key := make([]byte, 1+rng.IntN(40))
		for j := range key {
			key[j] = byte(rng.IntN(3))
		}
		list[i] = binary.BigEndian.AppendUint16(key, uint16(i))
	}
	for epoch := range keys.Epoch(5000) {
		var b batch.Builder
		b.Set(keys.SpaceUser, list[rng.IntN(len(list)/2)], make([]byte, rng.IntN(3)))
		body, err := b.Finish()
		if err != nil {
			t.Fatal(err)
		}
		mustPut(table, &in, body, epoch+1)
	}
	for _, at := range []keys.Epoch{1, 2500, keys.MaxEpoch} {
		for from := 0; from < len(list); from += FindWindow {
			var window [][]byte
			for _, key := range list[from:min(from+FindWindow, len(list))] {
				window = append(window, keys.Append(nil, keys.SpaceUser, key))
			}
			refs := make([]Ref, len(window))
			known := Ref{at: table.arena.base} // what is found already must stay
			refs[0] = known
			table.FindAll(window, at, refs)
			for i, key := range window {
				want := table.Find(key, at)
				if i == 0 {
					want = known
				}
				if refs[i] != want {
					t.Fatalf("at %d key %x: %v instead of %v", at, key, refs[i], want)
				}
			}
		}
	}
}

// TestFindAllDuringInserts looks up the newest keys while other goroutines insert after them. Under
// the race detector it shows that a look-up reads only the memory of its own keys.
func TestFindAllDuringInserts(t *testing.T) {
	const count = 5000
	table := mustNew(t, Config{Bytes: 1 << 20, layout: layout{reserveBytes: 16 << 20}})
	key := func(i uint64) []byte { return binary.BigEndian.AppendUint64(nil, i) }
	var inserted atomic.Uint64
	var wg sync.WaitGroup
	wg.Go(func() {
		var in Inserter
		for i := range uint64(count) {
			var b batch.Builder
			b.Set(keys.SpaceUser, key(i), []byte("v"))
			body, err := b.Finish()
			if err != nil {
				t.Error(err)
			}
			mustPut(table, &in, body, keys.Epoch(i+1))
			inserted.Store(i + 1)
		}
	})
	for last := uint64(0); last < count; {
		last = inserted.Load()
		var window [][]byte
		for i := last - min(last, FindWindow); i < last; i++ {
			window = append(window, keys.Append(nil, keys.SpaceUser, key(i)))
		}
		refs := make([]Ref, len(window))
		table.FindAll(window, keys.MaxEpoch, refs)
		for i := range refs {
			if !refs[i].Found() {
				t.Fatalf("key %x of %d is not found", window[i], last)
			}
		}
	}
	wg.Wait()
}
