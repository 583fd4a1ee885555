package wal

import (
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestIdleLogHasOneBuffer: the second buffer comes when records fill an eighth of the first one, and before a writer
// needs it.
func TestIdleLogHasOneBuffer(t *testing.T) {
	const segmentBytes = 256 << 10
	a := mustStart(t, testOptions(vfs.NewMem(), segmentBytes))
	for range 3 {
		if _, err := a.put(bodyOf(1, 1000)); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(20 * time.Millisecond) // the goroutine that prepares segments has nothing to do
	if n := a.log.buffers.mappedBytes(); n != segmentBytes {
		t.Errorf("%d bytes of buffers for three records, want one buffer of %d", n, segmentBytes)
	}
	for range segmentBytes / preparedFrom / 1000 {
		if _, err := a.put(bodyOf(1, 1000)); err != nil {
			t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(10 * time.Second); a.log.buffers.mappedBytes() != 2*segmentBytes; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes of buffers, want two buffers of %d", a.log.buffers.mappedBytes(), segmentBytes)
		}
	}
	mustClose(t, a.log)
}
