//go:build ablation

package btree

import (
	"context"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

// putAll merges entries, sorted by key and then newest first, instead of in's Input. Neighbours
// share one descent, and each page is read and written once.
func putAll(ctx context.Context, in MergeInput, entries []Entry) (*Result, error) {
	in.Input = func() Input { return &SliceInput{Entries: entries} }
	return Merge(ctx, &in)
}

// removeAll merges a tombstone at epoch e for each of the sorted keys.
func removeAll(ctx context.Context, in MergeInput, sorted [][]byte, e keys.Epoch) (*Result, error) {
	return putAll(ctx, in, stamped(sorted, e, keys.KindDelete))
}

// invokeAll is read-modify-write in one descent: for each of the sorted keys fn gets the newest
// version in the tree, if found, and returns the key's version at epoch e. A result of kind
// KindNone leaves the key as it is. The result's epoch is ignored; its value must not change until
// fn is called again, or, if it is longer than page.InlineMax, until invokeAll returns. Workers
// call fn concurrently.
func invokeAll(ctx context.Context, in MergeInput, sorted [][]byte, e keys.Epoch, fn func(key []byte, old Version, found bool) Version) (*Result, error) {
	in.Invoke = func(entry Entry, old Version, found bool) Entry {
		v := fn(entry.Key, old, found)
		return Entry{Key: entry.Key, Value: v.Value, Trailer: keys.MakeTrailer(e, v.Kind), Large: v.Large}
	}
	return putAll(ctx, in, stamped(sorted, e, keys.KindSet))
}

// stamped makes entries without values of sorted keys.
func stamped(sorted [][]byte, e keys.Epoch, kind keys.Kind) []Entry {
	entries := make([]Entry, len(sorted))
	for i, k := range sorted {
		entries[i] = Entry{Key: k, Trailer: keys.MakeTrailer(e, kind)}
	}
	return entries
}

// TestInvokeAllSeesKeysBetweenThoseOfALeafAsMissing has every second key in the tree and invokes
// all.
func TestInvokeAllSeesKeysBetweenThoseOfALeafAsMissing(t *testing.T) {
	s := newStore(512)
	var all, odd [][]byte
	for i := range 200 {
		all = append(all, fmt.Appendf(nil, "key%05d", i))
		if i%2 == 1 {
			odd = append(odd, all[i])
		}
	}
	root := Root{}
	policy := Policy{MinVisible: keys.MaxEpoch}
	for round, some := range [][][]byte{odd, all} {
		root = s.replace(t, func() (*Result, error) {
			return invokeAll(context.Background(), *s.mergeInput(root, nil, policy), some, keys.Epoch(round+1), func(key []byte, _ Version, found bool) Version {
				return Version{Kind: keys.KindSet, Value: fmt.Appendf(nil, "%s %v", key, found)}
			})
		}).Root
	}
	s.check(t, root)
	for i, k := range all {
		v, ok, _ := Get(s, root, k, keys.MaxEpoch)
		if want := fmt.Sprintf("%s %v", k, i%2 == 1); !ok || string(v.Value) != want {
			t.Fatalf("%q holds %q, want %q", k, v.Value, want)
		}
	}
}

// TestInvokeAllReadsAndWritesInOneDescent counts a thousand counters up, some of which do not exist
// yet.
func TestInvokeAllReadsAndWritesInOneDescent(t *testing.T) {
	s := newStore(512)
	ctx := context.Background()
	var all [][]byte
	for i := range 1000 {
		all = append(all, fmt.Appendf(nil, "counter%05d", i))
	}
	root := Root{}
	policy := Policy{MinVisible: keys.MaxEpoch}
	add := func(_ []byte, old Version, found bool) Version {
		n := uint64(1)
		if found {
			n += binary.BigEndian.Uint64(old.Value)
		}
		if n == 3 {
			return Version{Kind: keys.KindNone}
		}
		return Version{Kind: keys.KindSet, Value: binary.BigEndian.AppendUint64(nil, n)}
	}
	for round := range 4 {
		some := all[round*100:]
		in := s.mergeInput(root, nil, policy)
		in.Workers = Always(2)
		root = s.replace(t, func() (*Result, error) {
			return invokeAll(ctx, *in, some, keys.Epoch(round+1), add)
		}).Root
	}
	s.check(t, root)
	for i, k := range all {
		v, ok, _ := Get(s, root, k, keys.MaxEpoch)
		want := min(uint64(i/100)+1, 2)
		if !ok || binary.BigEndian.Uint64(v.Value) != want {
			t.Fatalf("%q counts %x, want %d", k, v.Value, want)
		}
	}
	res := s.replace(t, func() (*Result, error) {
		return removeAll(ctx, *s.mergeInput(root, nil, policy), all, 9)
	})
	if !res.Root.Empty() || res.Stats.Keys != -1000 {
		t.Fatalf("after removing all: %+v", res)
	}
	s.check(t, res.Root)
}
