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
	gatherFrom = 6
	// gatherMax bounds the wait, together with twice the time of a sync: on a slow disk the device's own pace forms the groups.
	gatherMax = time.Millisecond
	// gatherRecordsMax bounds the group that is aimed at: with so many the cost of a sync no longer shows in a commit.
	// Streams that keep hundreds of requests in flight form such groups by themselves, and would only be held up.
	gatherRecordsMax = 64
)

// gather aims at a group's size, in records. It belongs to the background goroutine while that has the flush role.
type gather struct {
	goal  int
	timer *time.Timer
}

// aim tells how many records the next sync should have, after one that settled some while others came. Zero means that it should
// not wait.
func (g *gather) aim(settled, came int) int {
	if came < gatherFrom {
		g.goal = g.goal * 3 / 4
	} else {
		g.goal = min(max(g.goal, settled)+came/2, gatherRecordsMax)
	}
	if g.goal <= came {
		return 0
	}
	return g.goal
}

// settle wakes whoever has what it waited for, and then lets the next group grow if that pays. The last flush moved durable
// from the given epoch on, and took took.
func (g *gather) settle(l *Log, from keys.Epoch, took time.Duration) {
	w := &l.waits
	w.mu.Lock()
	w.settleLocked(l)
	durable := l.Durable()
	aim := g.aim(int(durable-from), w.beyond(durable))
	if aim > 0 {
		w.gathered = durable + keys.Epoch(aim)
	}
	w.mu.Unlock()
	if aim > 0 {
		g.await(l, min(2*took, gatherMax))
	}
}

// await sleeps until the group is as large as it was aimed at, or for limit.
func (g *gather) await(l *Log, limit time.Duration) {
	if g.timer == nil {
		g.timer = time.NewTimer(limit)
	} else {
		g.timer.Reset(limit)
	}
	w := &l.waits
	select {
	case <-w.company:
		return
	case <-g.timer.C:
	case <-l.stop:
	}
	w.mu.Lock()
	if w.gathered == 0 {
		<-w.company // it was reached at the same moment
	}
	w.gathered = 0
	g.goal = w.beyond(l.Durable())
	w.mu.Unlock()
}
