// Package clock is the clock of a store: microseconds since 1970 that never go back.
//
//	start     the wall clock, or the time of the newest commit if that is later
//	then      advanced by the monotonic clock, which no operator and no time service sets
//	corrected to the wall clock by at most a tenth of the elapsed time
//
// So a wall clock that jumps by an hour expires nothing at once, and a commit never has an earlier time than one that was
// complete before it began. The difference that is left to correct is reported; above DifferenceMax an operator should look
// at it. Accept adopts a wall clock that is ahead; one that shows an earlier time is never adopted.
//
// The time is cached: one goroutine stores it every millisecond, because time.Now costs forty times as much as an atomic load.
// While nothing reads the clock the goroutine sleeps, because 1,000 wakes a second take an idle server 3 % of a core; the
// first reader after that advances the clock itself and wakes it.
package clock

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// DifferenceMax is the difference to the wall clock above which the clock reports it as a problem.
	DifferenceMax = 5 * time.Second
	// tick is how often the time is stored.
	tick = time.Millisecond
	// correctionShare limits the correction to the part 1/correctionShare of the elapsed time.
	correctionShare = 10
	// idleAfter is how many ticks without a reader end the ticks, until there is one again.
	idleAfter = 8
	// idleTick is how often the difference to the wall clock is looked at meanwhile.
	idleTick = time.Second
)

// Clock is a running clock. Its methods but Run are safe for concurrent use.
type Clock struct {
	wall func() time.Time // constant

	now        atomic.Uint64 // microseconds since 1970; stored by advance alone
	used       atomic.Bool   // read since rest; then the clock does not sleep
	_          [52]byte      // every commit reads the line above
	wake       chan struct{} // holds a token if the goroutine must tick again
	difference atomic.Int64  // nanoseconds from the clock to the wall clock

	mu    sync.Mutex
	nanos int64     // since 1970; the exact form of now
	last  time.Time // when nanos was computed; its monotonic part counts
	idle  bool      // the goroutine ticks every idleTick only. Invariant: not while used is set
}

// New is a clock that begins at the wall clock, and not before a time in microseconds since 1970. A nil wall is that of the
// system; tests pass another one.
func New(wall func() time.Time, notBefore uint64) *Clock {
	if wall == nil {
		wall = time.Now
	}
	c := &Clock{wall: wall, wake: make(chan struct{}, 1)}
	at := wall().UnixNano()
	c.last = time.Now()
	c.nanos = max(at, int64(notBefore)*int64(time.Microsecond), 0)
	c.publish(at)
	return c
}

// Run advances the clock until ctx ends.
func (c *Clock) Run(ctx context.Context) {
	t := time.NewTicker(tick)
	defer t.Stop()
	for ticks := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
			t.Reset(tick)
			ticks = 0
		case <-t.C:
			c.advance()
			if ticks++; ticks == idleAfter {
				ticks = 0
				if c.rest() {
					t.Reset(idleTick)
				}
			}
		}
	}
}

// rest lets the clock sleep if nothing has read it since the call before.
func (c *Clock) rest() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.idle = !c.used.Swap(false)
	return c.idle
}

// Now is the time in microseconds since 1970, at most about a millisecond old. It never goes back.
func (c *Clock) Now() uint64 {
	if !c.used.Load() {
		c.use()
	}
	return c.now.Load()
}

// Latest is the time that was stored last, which is older while the clock sleeps. It takes no lock: for a commit that has
// reserved its epoch, and has called Now before.
func (c *Clock) Latest() uint64 { return c.now.Load() }

// use is called by the first reader after rest. A clock that sleeps shows an old time.
func (c *Clock) use() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.idle {
		c.idle = false
		c.advanceLocked()
		select {
		case c.wake <- struct{}{}:
		default:
		}
	}
	c.used.Store(true)
}

// Difference is how far the wall clock is ahead of the clock, negative if it shows an earlier time. It does not wake a clock that sleeps.
func (c *Clock) Difference() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.idle {
		c.advanceLocked()
	}
	return time.Duration(c.difference.Load())
}

// EarlierError means that the clock cannot adopt the wall clock, because it would go back.
type EarlierError struct{ By time.Duration }

func (e *EarlierError) Error() string {
	return fmt.Sprintf("clock: the wall clock is %v earlier than the clock of the store, which never goes back; it runs slower until they agree, for about %v",
		e.By.Round(time.Millisecond), (e.By * correctionShare).Round(time.Second))
}

// Accept adopts the wall clock at once. An operator calls it, if the wall clock is right. It returns by how much the clock was
// advanced, or a *EarlierError. Less than a tick earlier is not earlier.
func (c *Clock) Accept() (time.Duration, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.advanceLocked()
	at := c.wall().UnixNano()
	ahead := time.Duration(at - c.nanos)
	if ahead < -tick {
		return 0, &EarlierError{By: -ahead}
	}
	if ahead < 0 {
		return 0, nil // they agree
	}
	c.nanos, c.last = at, time.Now()
	c.publish(at)
	return ahead, nil
}

func (c *Clock) advance() {
	c.mu.Lock()
	c.advanceLocked()
	c.mu.Unlock()
}

// advanceLocked moves the time by the elapsed time and the correction. The correction is smaller than the elapsed time, so
// the time never goes back. The wall clock is read before the monotonic one, here and elsewhere: a goroutine that is interrupted
// between the two must not take the clock ahead of the wall clock.
func (c *Clock) advanceLocked() {
	at, now := c.wall().UnixNano(), time.Now()
	elapsed := int64(now.Sub(c.last))
	if elapsed <= 0 {
		return
	}
	c.last = now
	c.nanos += elapsed
	most := elapsed / correctionShare
	c.nanos += min(max(at-c.nanos, -most), most)
	c.publish(at)
}

func (c *Clock) publish(wall int64) {
	c.now.Store(uint64(c.nanos) / uint64(time.Microsecond))
	c.difference.Store(wall - c.nanos)
}
