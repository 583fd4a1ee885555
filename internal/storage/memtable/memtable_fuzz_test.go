package memtable

import (
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// FuzzOperations runs a script of puts, deletes, prunes and reads against a map of version slices.
// Each step is two bytes: the operation and the length of the key, of which there are few, so that
// chains, splits and neighbours all occur.
func FuzzOperations(f *testing.F) {
	f.Add([]byte{0, 1, 0, 2, 0, 1, 1, 1, 3, 0, 2, 1})
	f.Add([]byte{0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 2, 5, 4, 3})
	f.Add([]byte{0, 200, 0, 201, 64, 200, 128, 200, 3, 200, 0, 200, 2, 200, 3, 200, 0, 200})
	f.Fuzz(func(t *testing.T, script []byte) {
		if len(script) > 4096 {
			return
		}
		c := tiny()
		c.layout.slots = 3
		tab := mustNew(t, c)
		var (
			in      Inserter
			b       batch.Builder
			retired Retired
			it      Iter
			model   = map[string][]Version{} // newest last
			epoch   keys.Epoch
			horizon keys.Epoch
		)
		it.Init(tab)
		for i := 0; i+1 < len(script); i += 2 {
			op, key := script[i], fuzzKey(script[i+1])
			k := string(key)
			switch op % 5 {
			case 0, 1:
				epoch++
				v := Version{Epoch: epoch, Kind: keys.KindSet, Value: make([]byte, op/5)}
				b.Reset()
				if op%5 == 0 {
					b.Set(keys.SpaceOf(key), keys.User(key), v.Value)
				} else {
					b.Delete(keys.SpaceOf(key), keys.User(key))
					v.Kind, v.Value = keys.KindDelete, nil
				}
				body, err := b.Finish()
				if err == nil {
					err = tab.Secure(&in, MaxSize(body))
				}
				if err == nil {
					err = tab.Apply(&in, body, epoch, false)
				}
				if err != nil {
					t.Fatal(err)
				}
				model[k] = append(model[k], v)
			case 2:
				at := max(horizon, keys.Epoch(op)*epoch/256)
				want, found := modelAt(model[k], at)
				got, ok := tab.Get(key, at)
				if ok != found || got.Epoch != want.Epoch || got.Kind != want.Kind || len(got.Value) != len(want.Value) {
					t.Fatalf("get %q at %d: %+v %v, want %+v %v", key, at, got, ok, want, found)
				}
			case 3:
				horizon = max(horizon, epoch*keys.Epoch(op)/256)
				if n := tab.node(key); n != 0 {
					h := GCWatermarks{MinVisible: horizon, LowWatermark: epoch}
					if op > 128 {
						h.Snapshots = []keys.Epoch{horizon, epoch}
					}
					tab.Prune(Chain{n}, &h, &retired)
					model[k] = pruneModel(model[k], &h)
				}
				tab.Reclaim(&retired)
			case 4:
				ok, found := it.SeekGE(key), false
				for m := range model {
					found = found || m >= k
				}
				if ok != found || ok && string(it.Key()) < k {
					t.Fatalf("SeekGE(%q): %v", key, ok)
				}
			}
		}
		for k, vs := range model {
			if n := tab.ChainLength(chainOf(tab, []byte(k))); n != len(vs) {
				t.Fatalf("%q has %d versions, want %d", k, n, len(vs))
			}
		}
		checkTable(t, tab)
	})
}

func fuzzKey(b byte) []byte {
	key := []byte("paaaaa"[:1+b%6])
	if b >= 32 {
		key = append(key, b>>5)
	}
	if b >= 240 {
		key[0] = b
	}
	return key
}

func modelAt(vs []Version, at keys.Epoch) (Version, bool) {
	for i := len(vs) - 1; i >= 0; i-- {
		if vs[i].Epoch <= at {
			return vs[i], true
		}
	}
	return Version{}, false
}

// pruneModel retains what some epoch in h sees, and everything newer than h.LowWatermark.
func pruneModel(vs []Version, h *GCWatermarks) (kept []Version) {
	for i, v := range vs {
		until := keys.MaxEpoch + 1
		if i+1 < len(vs) {
			until = vs[i+1].Epoch
		}
		keep := until > h.MinVisible
		if h.Snapshots != nil {
			keep = until > h.LowWatermark
			for _, s := range h.Snapshots {
				keep = keep || v.Epoch <= s && s < until
			}
		}
		if keep {
			kept = append(kept, v)
		}
	}
	return kept
}
