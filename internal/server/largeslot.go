package server

import (
	"sync"
	"sync/atomic"
	"time"
)

// largeSlot is a place beside a share, for one thing of any size that the share has no room for: a client that is alone may send and
// read the largest there is, and takes nothing of the share from others with it. What is in the slot is known by its owner and its size:
// two things that are alike in both, in the slot and in the share, are as good as each other, and either may leave the slot.
//
// Owners take turns. One that is refused has a claim, and a slot that gets free is kept for the oldest claim for a while after its owner has
// asked. So each owner that goes on asking has its turn after at most one of each other owner, without a queue: nothing waits.
type largeSlot struct {
	held atomic.Pointer[largeHeld] // changed with mu locked

	mu     sync.Mutex // a leaf; guards what follows
	taken  time.Time
	sent   time.Time // when its client was the one to take it; zero: it is not
	wanted bool      // another owner was refused since it was taken
	claims uint64    // made so far
	next   *claim    // the oldest one whose owner goes on asking
	asked  time.Time // when that was last
	keep   time.Duration
}

type largeHeld struct {
	owner any // a pointer: to a connection, or to what it counts
	bytes int64
}

// claim is the number of an owner's first refusal since it had the slot last; 0: it was not refused. The slot's mutex guards it.
type claim uint64

// The slot is kept for the next owner for as long as the one before had it: so it is in use for half of the time at least, and clients that wait
// longer before they ask again have a turn where turns last longer. But it is kept for several times as long as clients are advised to wait.
const (
	claimTimeMin = 100 * time.Millisecond
	claimTimeMax = time.Second
)

// take takes the slot, unless it is taken, or it is the turn of another. Without a claim the caller sees to the turns.
func (s *largeSlot) take(owner any, c *claim, bytes int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	h := s.held.Load()
	if h != nil && h.owner == owner {
		return false // it has its turn
	}
	if h == nil && s.isTurnLocked(c, now) {
		s.held.Store(&largeHeld{owner, bytes})
		s.taken, s.sent, s.wanted, s.keep = now, time.Time{}, false, claimTimeMax
		if c != nil {
			*c = 0
		}
		if s.next == c {
			s.next = nil
		}
		return true
	}
	s.wanted = true
	if c != nil {
		s.claimLocked(c, now)
	}
	return false
}

// isTurnLocked reports whether the slot is kept for no other with an older claim.
func (s *largeSlot) isTurnLocked(c *claim, now time.Time) bool {
	return c == nil || s.next == nil || s.next == c || now.Sub(s.asked) > s.keep || *c != 0 && *c < *s.next
}

func (s *largeSlot) claimLocked(c *claim, now time.Time) {
	if *c == 0 {
		s.claims++
		*c = claim(s.claims)
	}
	if s.isTurnLocked(c, now) {
		s.next, s.asked = c, now
	}
}

// change changes the size of what is in the slot. It reports false if that is something else.
func (s *largeSlot) change(owner any, from, to int64) bool {
	return s.replace(owner, from, &largeHeld{owner, to})
}

// leave frees the slot. It reports false if something else is in it, or nothing.
func (s *largeSlot) leave(owner any, bytes int64) bool { return s.replace(owner, bytes, nil) }

func (s *largeSlot) replace(owner any, bytes int64, with *largeHeld) bool {
	if !s.holds(owner, bytes) {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.holds(owner, bytes) {
		return false
	}
	if s.held.Store(with); with == nil {
		s.keep = min(max(time.Since(s.taken), claimTimeMin), claimTimeMax)
	}
	return true
}

func (s *largeSlot) holds(owner any, bytes int64) bool {
	h := s.held.Load()
	return h != nil && *h == largeHeld{owner, bytes}
}

// drop frees the slot if it is the owner's.
func (s *largeSlot) drop(owner any) {
	if h := s.held.Load(); h != nil && h.owner == owner {
		s.leave(owner, h.bytes)
	}
}

// bytes is the size of what is in the slot.
func (s *largeSlot) bytes() int64 {
	if h := s.held.Load(); h != nil {
		return h.bytes
	}
	return 0
}

// handOver says that what is in the slot waits for its client from now on.
func (s *largeSlot) handOver(owner any, bytes int64) {
	if !s.holds(owner, bytes) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = time.Now()
}

// isOverdue reports whether the owner's client has taken longer than it may over what is in the slot, and another wants the slot.
func (s *largeSlot) isOverdue(owner any, most time.Duration) bool {
	h := s.held.Load()
	if h == nil || h.owner != owner {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wanted && !s.sent.IsZero() && time.Since(s.sent) > most
}

// overstays reports whether something has been in the slot for longer than it may, and another wants the slot.
func (s *largeSlot) overstays(owner any, bytes int64, most time.Duration) bool {
	if !s.holds(owner, bytes) {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wanted && time.Since(s.taken) > most
}
