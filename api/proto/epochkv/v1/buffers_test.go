package epochkvv1

import (
	"bytes"
	"testing"
)

// TestBuffersAreAboutAsLargeAsAskedFor: what an answer counts is what its buffer takes, up to twice.
func TestBuffersAreAboutAsLargeAsAskedFor(t *testing.T) {
	for _, size := range []int{0, 1, 1 << 10, 1<<10 + 1, 33 << 10, 64 << 10, 64<<10 + 1, 256 << 10, 1<<20 - 1, 1 << 20, 1<<20 + 1, 3 << 20} {
		for range 2 { // the second is a used one
			b := Buffers.Get(size)
			if len(*b) != size || cap(*b) > max(2*size, 1<<bufferBitsMin) {
				t.Errorf("%d bytes: length %d, capacity %d", size, len(*b), cap(*b))
			}
			Buffers.Put(b)
		}
	}
	odd := make([]byte, 3000)
	Buffers.Put(&odd) // of no size of the pool
	if b := Buffers.Get(2048); cap(*b) != 2048 {
		t.Errorf("a buffer of another size came back from the pool: %d", cap(*b))
	}
}

// TestEncodingsTakeTheirSize: a response of 64 KiB that waits for its client must not take 1 MiB.
func TestEncodingsTakeTheirSize(t *testing.T) {
	out, err := NewCodec().Marshal(&WatchResponse{Body: &WatchResponse_Changes{Changes: &WatchChanges{
		Commits: []*ChangedCommit{{Events: []*ChangeEvent{{Value: bytes.Repeat([]byte("v"), 65<<10)}}}},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	defer out.Free()
	if taken := cap(out[0].ReadOnlyData()); taken > 2*out.Len() {
		t.Errorf("%d bytes are encoded into a buffer of %d", out.Len(), taken)
	}
}
