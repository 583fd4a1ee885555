package wal

import (
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// A sync costs the processors far more than a put: two requests to the device, their interrupts, and every wake-up around
// them. So while commits keep coming, the flusher lets the next group grow before it syncs.
//
// It waits only for what is known to be there. Commits that came while a sync ran show that the processors had work
// meanwhile: then a larger group costs no time, and it is aimed at half of them more. When few came, the processors
// were idle, and the aim shrinks. Callers in a closed loop are never waited for in vain: the group that has just been settled and those
// that came meanwhile are different callers, and the aim stays below their sum. A lone writer, and a handful of
// them, never wait.
const (
	// gatherFrom is how many must come during one sync before the next one waits for more.
	delayRecordsMin = 6
	// gatherMax bounds the wait, together with twice the time of a sync: on a slow disk the device's own pace forms the groups.
	delayMax = time.Millisecond
	// gatherRecordsMax bounds the group that is aimed at: with so many the cost of a sync no longer shows in a commit.
	// Streams that keep hundreds of requests in flight form such groups by themselves, and would only be held up.
	delayTargetMax = 64
)

// gather aims at a group's size, in records. It belongs to the background goroutine while that has the flush role.
type groupDelay struct {
	target int
	timer  *time.Timer
}

// aim tells how many records the next sync should have, after one that settled some while others came. Zero means that it should
// not wait.
func (g *groupDelay) targetFor(settled, came int) int {
	if came < delayRecordsMin {
		g.target = g.target * 3 / 4
	} else {
		g.target = min(max(g.target, settled)+came/2, delayTargetMax)
	}
	if g.target <= came {
		return 0
	}
	return g.target
}

// settle wakes whoever has what it waited for, and then lets the next group grow if that pays. The last flush moved durable
// from the given epoch on, and took took.
func (g *groupDelay) delayNext(l *Log, from keys.Epoch, took time.Duration) {
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
		g.wait(l, min(2*took, delayMax))
	}
}

// await sleeps until the group is as large as it was aimed at, or for limit.
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
		<-w.groupReached // it was reached at the same moment
	}
	w.groupTarget = 0
	g.target = w.recordsAfter(l.Durable())
	w.mu.Unlock()
}
