package server

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestStoppedSoonAfterStartIsNoFailure: a server that is told to stop before or while its listeners begin to serve ends without an error.
func TestStoppedSoonAfterStartIsNoFailure(t *testing.T) {
	c := testConfig()
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	for i := range 40 {
		s, err := open(c, slog.New(slog.DiscardHandler), vfs.NewMem())
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		if i%2 == 0 {
			cancel()
		} else {
			time.AfterFunc(time.Duration(rand.IntN(300))*time.Microsecond, cancel)
		}
		if err := s.Run(ctx); err != nil {
			t.Errorf("stop %d: %v", i, err)
		}
		cancel()
	}
}
