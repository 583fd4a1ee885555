package enginetest

import (
	"fmt"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestRotationsFindAPreparedMemtable writes through several generations, with a pause where a table
// is half full.
func TestRotationsFindAPreparedMemtable(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	const rotations = 6
	value := make([]byte, 500)
	written := 0
	for start := s.Stats().Storage.Rotations; s.Stats().Storage.Rotations < start+rotations; written++ {
		mustPut(t, s, fmt.Sprintf("%06d", written), string(value))
		time.Sleep(200 * time.Microsecond)
	}
	if ready := s.Stats().Storage.MemtablesPrepared; ready < rotations/2 {
		t.Errorf("%d of %d rotations found a prepared memtable", ready, rotations)
	}
	for i := range written {
		if v, err := x.Get(nil, fmt.Appendf(nil, "%06d", i), 0); err != nil || !v.Found {
			t.Fatalf("key %d: %v, %v", i, v, err)
		}
	}
}
