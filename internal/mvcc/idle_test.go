package mvcc

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestAnIdleStoreLetsItsClockRest: nothing that a store does each second reads the time of commits, which would wake the clock's
// goroutine a thousand times a second for a while.
func TestAnIdleStoreLetsItsClockRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ticks atomic.Int64
		o := atLeisure()
		o.WallClock = func() time.Time { ticks.Add(1); return time.Now() }
		s := mustOpen(t, o)
		time.Sleep(10 * time.Second)
		before := ticks.Load()
		for range 60 { // a reader of its figures does not wake it
			time.Sleep(time.Second)
			s.Stats()
		}
		if n := ticks.Load() - before; n > 3*60 {
			t.Errorf("%d ticks in an idle minute", n)
		}
	})
}
