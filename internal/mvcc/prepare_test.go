package mvcc

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestNextSegmentIsPreparedBeforeTheFirstFlush: ASYNC commits fill more than half of the first segment while nothing is
// flushed. The next segment has its buffer before they reach the end.
func TestNextSegmentIsPreparedBeforeTheFirstFlush(t *testing.T) {
	const segmentBytes = 1 << 20
	o := tiny(vfs.NewMem())
	o.Storage.MemtableBytes, o.Storage.SegmentBytes, o.SyncInterval = segmentBytes, segmentBytes, time.Hour
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	for i := range 700 {
		if _, err := put(x, fmt.Sprint("key", i), strings.Repeat("v", 1000), DurabilityAsync); err != nil {
			t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(30 * time.Second); s.Stats().Storage.Log.BufferBytes < 2*segmentBytes; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes of buffers, %d syncs", s.Stats().Storage.Log.BufferBytes, s.Stats().Storage.Log.Syncs)
		}
	}
}
