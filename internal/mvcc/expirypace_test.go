package mvcc

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/metadata"
)

// TestExpirerKeepsItsRate: batches take the time that the rate gives them, and a pass that was held up does not catch up.
func TestExpirerKeepsItsRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pace := expiryPace{began: time.Now()}
		for range 3 {
			const batches = 1000
			begun := time.Now()
			for range batches {
				pace.pause(context.Background(), expiryBatchMax)
			}
			const want = batches * expiryBatchMax * time.Second / expiryRateMax
			if took := time.Since(begun); took < want-expiryBehindMax-expiryPauseMin || took > want+expiryPauseMin {
				t.Errorf("%d batches took %v, want %v", batches, took, want)
			}
			time.Sleep(time.Second) // a writer holds a latch, or the log rotates
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		begun := time.Now()
		if pace.pause(ctx, 10*expiryRateMax); time.Since(begun) != 0 {
			t.Errorf("a pause went on for %v after its context had ended", time.Since(begun))
		}
	})
}

// TestBurstLeavesTimeToWriters: keys that are due at once expire at the rate, and no later.
func TestBurstLeavesTimeToWriters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := mustOpen(t, atLeisure())
		x := mustSession(t, s)
		defer x.Close()
		const keys = 3000
		due := in(s, time.Second)
		for i := range keys {
			putWith(t, x, fmt.Sprint("key ", i), "v", metadata.Fields{ExpiresAt: due})
		}
		for s.expirer.expired.Load() == 0 {
			time.Sleep(100 * time.Microsecond)
		}
		// No time passes in this test but that of pauses.
		begun := time.Now()
		for s.expirer.expired.Load() < keys {
			time.Sleep(100 * time.Microsecond)
		}
		least, most := 8*time.Millisecond, 20*time.Millisecond
		if took := time.Since(begun); took < least || took > most {
			t.Errorf("%d keys took %v, want %v to %v", keys, took, least, most)
		}
	})
}
