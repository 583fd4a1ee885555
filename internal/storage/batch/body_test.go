package batch

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
)

// TestBodyInPiecesHasTheBytesOfAContiguousOne builds batches of short and long values, with and without metadata, shared and copied, in order and
// not, and compares bytes, size and operations with the body that the same operations have when they are added in
// order and copied.
func TestBodyInPiecesHasTheBytesOfAContiguousOne(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 200 {
		var shared, copied Builder
		count := 1 + rng.IntN(40)
		order := rng.Perm(count)
		for _, i := range order {
			addNumbered(&shared, i, shared.SetShared, shared.SetMetadataShared)
		}
		for i := range count {
			addNumbered(&copied, i, copied.Set, func(s keys.Space, key []byte, f *metadata.Fields, value []byte) {
				copied.SetStored(keys.KindSetMetadata, s, key, append(f.Append(nil), value...))
			})
		}
		pieces, whole := finishBoth(t, &shared, &copied)
		if !bytes.Equal(pieces.Bytes(), whole.Bytes()) {
			t.Fatalf("%d operations in order %v: the bytes differ", count, order)
		}
		if pieces.Size() != len(whole.Bytes()) || pieces.Size() != shared.Size() || pieces.Count() != count {
			t.Fatalf("size %d, %d of the builder, count %d; want %d and %d", pieces.Size(), shared.Size(), pieces.Count(), len(whole.Bytes()), count)
		}
		if shared.PayloadBytes() != copied.PayloadBytes() || shared.ValueBytesMax() != copied.ValueBytesMax() || shared.WithMetadata() != copied.WithMetadata() {
			t.Fatalf("shared: %d bytes, longest %d, %d with metadata; copied: %d, %d, %d", shared.PayloadBytes(), shared.ValueBytesMax(), shared.WithMetadata(),
				copied.PayloadBytes(), copied.ValueBytesMax(), copied.WithMetadata())
		}
		for i := range count {
			f, err := shared.Metadata(i)
			if g, again := copied.Metadata(i); f != g || err != nil || again != nil {
				t.Fatalf("metadata %+v, %v; copied: %+v, %v", f, err, g, again)
			}
		}
		checkSameOperations(t, pieces, whole)
	}
}

// addNumbered adds operation i, which depends on i alone: a deletion, or a value around the length from which values are shared.
func addNumbered(b *Builder, i int, set func(keys.Space, []byte, []byte), setMetadata func(keys.Space, []byte, *metadata.Fields, []byte)) {
	key := fmt.Appendf(nil, "key %04d", i)
	if i%5 == 3 {
		b.Delete(keys.SpaceUser, key)
		return
	}
	lengths := []int{0, 1, sharedBytesMin - 1, sharedBytesMin, 3 * sharedBytesMin}
	value := bytes.Repeat([]byte{byte(i)}, lengths[i%len(lengths)])
	if i%3 == 1 {
		setMetadata(keys.SpaceUser, key, &metadata.Fields{ExpiresAt: 1 << i, Lease: uint64(i)}, value)
		return
	}
	set(keys.SpaceUser, key, value)
}

func checkSameOperations(t *testing.T, a, b *Body) {
	t.Helper()
	var x, y Reader
	if err := x.ReadBody(a); err != nil {
		t.Fatal(err)
	}
	if err := y.ReadBody(b); err != nil {
		t.Fatal(err)
	}
	for y.Next() {
		if !x.Next() || x.Kind != y.Kind || !bytes.Equal(x.Key, y.Key) || !bytes.Equal(slices.Concat(x.Value, x.Rest), y.Value) || y.Rest != nil {
			t.Fatalf("%v %q with %d bytes, want %v %q with %d", x.Kind, x.Key, x.StoredBytes(), y.Kind, y.Key, len(y.Value))
		}
		if section := metadata.Size(x.Kind, y.Value); metadata.Size(x.Kind, x.Value) != section {
			t.Fatalf("%q: Value does not begin with the metadata, of %d bytes", x.Key, section)
		}
	}
	if x.Next() || x.Err() != nil {
		t.Fatalf("one operation more, or %v", x.Err())
	}
	for err := x.ReadBody(b); err != nil || x.Next(); { // a reader that is used again
		if err != nil || x.Rest != nil {
			t.Fatalf("%q still has the rest of another value: %v", x.Key, err)
		}
	}
}

// TestSharedValuesAreNotKept: a pooled builder must not keep the memory of a request.
func TestSharedValuesAreNotKept(t *testing.T) {
	var b Builder
	b.SetShared(keys.SpaceUser, []byte("key"), make([]byte, sharedBytesMin))
	b.ReleaseShared()
	if b.shared[0] != nil {
		t.Error("the builder still refers to a value that it has released")
	}
	const count = 1000
	for range count {
		b.SetShared(keys.SpaceUser, []byte("key"), make([]byte, sharedBytesMin))
	}
	b.Reset()
	if n := b.MemoryBytes() - cap(b.buf) - cap(b.spans)*spanBytes; n < count*sliceBytes {
		t.Errorf("%d bytes count of the room for %d values", n, count)
	}
}

// finishBoth finishes a batch of shared values and one of copies.
func finishBoth(t *testing.T, shared, copied *Builder) (pieces, whole *Body) {
	t.Helper()
	pieces, err := shared.Finish()
	if err != nil {
		t.Fatal(err)
	}
	if whole, err = copied.Finish(); err != nil {
		t.Fatal(err)
	}
	return pieces, whole
}
