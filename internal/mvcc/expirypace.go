package mvcc

import (
	"context"
	"time"
)

// expiryPace makes the pauses of a pass of the expirer, so that it handles expiryRateMax entries a second at most. Without them
// a million keys that are due at once took all processors, and wrote 80 MB of log a second that each sync of a writer had to
// wait for.
type expiryPace struct {
	began   time.Time
	entries int // since began
}

const (
	// expiryRateMax is a third of what two processors can do, and 1.5 times what is promised for a burst.
	expiryRateMax = 300_000
	// expiryPauseMin is the shortest pause: the timers of a process that rests are no better.
	expiryPauseMin = time.Millisecond
	// expiryBehindMax is how much of the time that it has lost a pass catches up with.
	expiryBehindMax = 10 * time.Millisecond
)

// pause follows a batch of so many entries. It returns early when ctx ends.
func (p *expiryPace) pause(ctx context.Context, entries int) {
	p.entries += entries
	ahead := time.Duration(p.entries)*time.Second/expiryRateMax - time.Since(p.began)
	switch {
	case ahead >= expiryPauseMin:
		wait(ctx, ahead)
	case ahead < -expiryBehindMax:
		*p = expiryPace{began: time.Now()}
	}
}
