package server

import (
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// idleAfter is for how long a server must have had nothing to do to be idle.
const idleAfter = 100 * time.Millisecond

// idleness finds out whether the server has nothing else to do, by many looks. It is for one goroutine.
type idleness struct {
	requests func() int        // in progress
	visible  func() keys.Epoch // the newest epoch
	seen     keys.Epoch
	busyAt   time.Time // the last look that found something
}

func newIdleness(s *Server) *idleness {
	return &idleness{visible: s.store.Visible, busyAt: time.Now(), requests: func() int {
		n, _, _ := s.admission.inflight()
		return n
	}}
}

// idle reports whether no look has found a request or a commit for a while.
func (i *idleness) idle() bool {
	now, visible := time.Now(), i.visible()
	if i.requests() > 0 || visible != i.seen {
		i.busyAt, i.seen = now, visible
	}
	return now.Sub(i.busyAt) >= idleAfter
}
