package wal

import (
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// A sync costs the processors far more than a put: two requests to the device, their interrupts, and
// every wake-up around them. So while commits keep coming, the flusher delays the next sync to let more
// commits join the group. This is the group-commit delay.
//
// The flusher waits only for commits that are likely to come. Commits that came while a sync ran show
// that the processors had work meanwhile. Then a larger group costs no time, and the target grows by half
// of those commits. When few commits came, the processors were idle, and the target shrinks. The delay is
// never in vain for writers in a closed loop: the writers of the last group and the writers that came
// during its sync are different writers, and the target stays below their sum. One writer, or a handful
// of writers, is never delayed.
const (
	// delayRecordsMin is how many records must come during one sync before the next sync is delayed.
	delayRecordsMin = 6
	// delayMax bounds the delay, together with twice the time of a sync: on a slow disk the time of a sync
	// is enough to form groups.
	delayMax = time.Millisecond
	// delayTargetMax bounds the target: in such a group the cost of a sync no longer shows in a commit.
	// Streams that keep hundreds of requests in flight form such groups without a delay, and a larger target
	// would only delay them.
	delayTargetMax = 64
)

// groupDelay computes the target size of a group, in records. The background goroutine owns it while it
// holds the flush role.
type groupDelay struct {
	target int
	timer  *time.Timer
}

// targetFor is how many records the next sync should have, after a sync of some records during which
// others came. Zero means that the next sync should not be delayed.
func (g *groupDelay) targetFor(synced, came int) int {
	if came < delayRecordsMin {
		g.target = g.target * 3 / 4
	} else {
		g.target = min(max(g.target, synced)+came/2, delayTargetMax)
	}
	if g.target <= came {
		return 0
	}
	return g.target
}

// delayNext wakes the waiters whose epochs are durable, and then lets the next group grow if that saves
// syncs. The last flush moved durable from the given epoch on, and had the given duration.
func (g *groupDelay) delayNext(l *Log, from keys.Epoch, duration time.Duration) {
	w := &l.waits
	w.mu.Lock()
	w.wakeDurableLocked(l)
	durable := l.Durable()
	target := g.targetFor(int(durable-from), w.recordsAfter(durable))
	if target > 0 {
		w.groupTarget = durable + keys.Epoch(target)
	}
	w.mu.Unlock()
	if target > 0 {
		g.wait(l, min(2*duration, delayMax))
	}
}

// wait sleeps until the group has its target size, at most for limit.
func (g *groupDelay) wait(l *Log, limit time.Duration) {
	if g.timer == nil {
		g.timer = time.NewTimer(limit)
	} else {
		g.timer.Reset(limit)
	}
	w := &l.waits
	select {
	case <-w.groupReached:
		return
	case <-g.timer.C:
	case <-l.stop:
	}
	w.mu.Lock()
	if w.groupTarget == 0 {
		<-w.groupReached // the group was complete at the same moment
	}
	w.groupTarget = 0
	g.target = w.recordsAfter(l.Durable())
	w.mu.Unlock()
}
