package clock

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// shiftedWall is a wall clock that an operator can set.
type shiftedWall struct{ by time.Duration }

func (w *shiftedWall) now() time.Time { return time.Now().Add(w.by) }

// run advances a clock by d, as Run does.
func run(t *testing.T, c *Clock, d time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	before := c.Now()
	var watched sync.WaitGroup
	watched.Go(func() {
		for ctx.Err() == nil {
			if now := c.Now(); now < before {
				t.Errorf("the clock went back from %d to %d", before, now)
			} else {
				before = now
			}
			time.Sleep(100 * time.Microsecond)
		}
	})
	c.Run(ctx)
	watched.Wait()
}

func TestClockFollowsTheWallClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New(nil, 0)
		run(t, c, 3*time.Second)
		if late := time.Since(time.UnixMicro(int64(c.Now()))); late < 0 || late > 2*time.Millisecond {
			t.Errorf("the clock is %v late", late)
		}
		if c.Difference().Abs() > 2*time.Millisecond {
			t.Errorf("difference %v", c.Difference())
		}
	})
}

// TestJumpsOfTheWallClockAreWorkedOffSlowly: an hour or a day forward or back changes the clock by a tenth of the time that
// passes, and not in the wrong direction.
func TestJumpsOfTheWallClockAreWorkedOffSlowly(t *testing.T) {
	for _, jump := range []time.Duration{time.Hour, -time.Hour, 24 * time.Hour, -24 * time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			var wall shiftedWall
			c := New(wall.now, 0)
			run(t, c, 100*time.Millisecond)
			before, start := c.Now(), time.Now()
			wall.by = jump
			run(t, c, time.Second)
			elapsed, moved := time.Since(start), time.Duration(c.Now()-before)*time.Microsecond
			want := elapsed + elapsed/correctionShare
			if jump < 0 {
				want = elapsed - elapsed/correctionShare
			}
			if (moved - want).Abs() > 2*time.Millisecond {
				t.Errorf("after a jump of %v the clock moved %v in %v, want %v", jump, moved, elapsed, want)
			}
			if left := c.Difference(); (left-jump).Abs() > elapsed/correctionShare+2*time.Millisecond || left.Abs() >= jump.Abs() {
				t.Errorf("after a jump of %v the difference is %v", jump, left)
			}
		})
	}
}

// TestSmallDifferencesEnd: a difference is worked off in ten times as long, and then the clock follows the wall clock.
func TestSmallDifferencesEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var wall shiftedWall
		c := New(wall.now, 0)
		wall.by = -200 * time.Millisecond
		run(t, c, 1900*time.Millisecond)
		if c.Difference() > -5*time.Millisecond {
			t.Errorf("worked off too early: %v", c.Difference())
		}
		run(t, c, 200*time.Millisecond)
		if c.Difference().Abs() > 2*time.Millisecond {
			t.Errorf("the difference stays: %v", c.Difference())
		}
	})
}

// TestClockBeginsAfterTheNewestCommit: a wall clock that was set back while the store was closed does not take the clock back.
func TestClockBeginsAfterTheNewestCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		newest := uint64(time.Now().Add(time.Hour).UnixMicro())
		c := New(nil, newest)
		if c.Now() != newest || c.Difference() > -time.Hour {
			t.Fatalf("the clock begins at %d, difference %v", c.Now(), c.Difference())
		}
		run(t, c, time.Second)
		if moved := time.Duration(c.Now()-newest) * time.Microsecond; (moved - 900*time.Millisecond).Abs() > 2*time.Millisecond {
			t.Errorf("moved %v in a second", moved)
		}
	})
}

func TestAcceptAdoptsAWallClockThatIsAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var wall shiftedWall
		c := New(wall.now, 0)
		wall.by = time.Hour
		if by, err := c.Accept(); err != nil || by != time.Hour || c.Difference() != 0 {
			t.Fatalf("accepted %v, %v; difference %v", by, err, c.Difference())
		}
		wall.by = 0
		before := c.Now()
		var earlier *EarlierError
		if by, err := c.Accept(); !errors.As(err, &earlier) || earlier.By != time.Hour || by != 0 || c.Now() < before {
			t.Fatalf("accepted %v, %v", by, err)
		}
	})
}

// TestAnInterruptedClockIsNotAheadOfTheWallClock: one of the times that the clock reads the wall clock, its goroutine is interrupted.
// The clock is not ahead of the wall clock afterwards, so that an operator can accept it.
func TestAnInterruptedClockIsNotAheadOfTheWallClock(t *testing.T) {
	for interrupted := range 6 {
		synctest.Test(t, func(t *testing.T) {
			calls := 0
			c := New(func() time.Time {
				if calls++; calls == interrupted {
					time.Sleep(10 * time.Millisecond)
				}
				return time.Now()
			}, 0)
			for range 3 {
				if by, err := c.Accept(); err != nil {
					t.Fatalf("interrupted at %d: accepted %v, %v", interrupted, by, err)
				}
				c.advance()
			}
		})
	}
}

func BenchmarkNow(b *testing.B) {
	c := New(nil, 0)
	for b.Loop() {
		c.Now()
	}
}

// TestClockSleepsWhileNothingReadsIt, and the first reader after that sees the time, whichever reader it is.
func TestClockSleepsWhileNothingReadsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ticks atomic.Int64
		c := New(func() time.Time { ticks.Add(1); return time.Now() }, 0)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { c.Run(ctx) })
		for _, pause := range []time.Duration{10 * time.Second, time.Millisecond, 100 * time.Millisecond, 500 * time.Millisecond, time.Minute} {
			before := ticks.Load()
			time.Sleep(pause)
			if n := ticks.Load() - before; n > 4*idleAfter+int64(pause/idleTick) {
				t.Errorf("%d ticks in %v without a reader", n, pause)
			}
			before = ticks.Load()
			if d := c.Difference(); d != 0 {
				t.Errorf("the difference is %v", d)
			}
			time.Sleep(50 * time.Millisecond)
			if n := ticks.Load() - before; pause > time.Second && n > 1+1 {
				t.Errorf("%d ticks after a look at the difference", n)
			}
			for range 1000 { // busy for 100 ms
				if late := time.Since(time.UnixMicro(int64(c.Now()))); late < 0 || late > 2*time.Millisecond {
					t.Fatalf("%v late after %v", late, pause)
				}
				time.Sleep(100 * time.Microsecond)
			}
		}
		cancel()
		running.Wait()
	})
}
