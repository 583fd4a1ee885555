package batch

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

// TestBodyInPiecesHasTheBytesOfAContiguousOne builds batches of short and long values, shared and copied, in order and
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
			addNumbered(&shared, i, shared.SetShared)
		}
		for i := range count {
			addNumbered(&copied, i, copied.Set)
		}
		pieces, err := shared.Finish()
		if err != nil {
			t.Fatal(err)
		}
		whole, err := copied.Finish()
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(pieces.Bytes(), whole.Bytes()) {
			t.Fatalf("%d operations in order %v: the bytes differ", count, order)
		}
		if pieces.Size() != len(whole.Bytes()) || pieces.Size() != shared.Size() || pieces.Count() != count {
			t.Fatalf("size %d, %d of the builder, count %d; want %d and %d", pieces.Size(), shared.Size(), pieces.Count(), len(whole.Bytes()), count)
		}
		checkSameOperations(t, pieces, whole)
	}
}

// addNumbered adds operation i, which depends on i alone: a deletion, or a value around the length from which values are shared.
func addNumbered(b *Builder, i int, set func(keys.Space, []byte, []byte)) {
	key := fmt.Appendf(nil, "key %04d", i)
	if i%5 == 3 {
		b.Delete(keys.SpaceUser, key)
		return
	}
	lengths := []int{0, 1, sharedBytesMin - 1, sharedBytesMin, 3 * sharedBytesMin}
	set(keys.SpaceUser, key, bytes.Repeat([]byte{byte(i)}, lengths[i%len(lengths)]))
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
		if !x.Next() || x.Kind != y.Kind || !bytes.Equal(x.Key, y.Key) || !bytes.Equal(x.Value, y.Value) {
			t.Fatalf("%v %q with %d bytes, want %v %q with %d", x.Kind, x.Key, len(x.Value), y.Kind, y.Key, len(y.Value))
		}
	}
	if x.Next() || x.Err() != nil {
		t.Fatalf("one operation more, or %v", x.Err())
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
