package server

import (
	"context"
	"testing"
	"testing/synctest"
)

// TestAnAckQueueKeepsLittleWhileNothingWaits: its stream may be idle for ever.
func TestAnAckQueueKeepsLittleWhileNothingWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, room := range []int{ackQueueKept, ackQueueMax} {
			var q ackQueue
			q.init(new(waitingAnswers), owned{}, nil)
			q.list = make([]answer, 0, room)
			ctx, cancel := context.WithCancel(t.Context())
			taken := make(chan []answer)
			go func() {
				waiting, _ := q.take(ctx, make([]answer, 0, room), nil)
				taken <- waiting
			}()
			synctest.Wait() // it sleeps
			cancel()
			waiting := <-taken
			if kept := cap(q.list) + cap(waiting); kept > 2*ackQueueKept || room == ackQueueKept && kept != 2*room {
				t.Errorf("of lists with room for %d answers, room for %d is kept", room, kept)
			}
		}
	})
}
