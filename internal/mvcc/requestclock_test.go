package mvcc

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestJumpOfTheWallClockExpiresNoRequest: the cut-off of request ids follows the clock of the store, which a wall
// clock that jumps ahead moves slowly.
func TestJumpOfTheWallClockExpiresNoRequest(t *testing.T) {
	var jump atomic.Int64
	o := tiny(vfs.NewMem())
	o.RequestWindow = 150 * time.Millisecond
	o.WallClock = func() time.Time { return time.Now().Add(time.Duration(jump.Load())) }
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	for range 2 {
		if _, err := putOnce(t, x, newRequest(), "k", "v"); err != nil {
			t.Fatal(err)
		}
		before := s.RequestCutoff()
		for deadline := time.Now().Add(30 * time.Second); s.RequestCutoff() == before; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("the cut-off does not move")
			}
		}
		if cutoff, now := s.RequestCutoff(), uint64(time.Now().UnixMilli()); cutoff > now {
			t.Fatalf("the cut-off is %d ms ahead", cutoff-now)
		}
		jump.Store(int64(time.Hour))
	}
	if _, err := putOnce(t, x, &Request{ID: requestID(uint64(time.Now().Add(time.Second).UnixMilli()))}, "new", "v"); err != nil {
		t.Errorf("a request after the jump: %v", err)
	}
}
