package server

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/fairqueue"
)

// largeSlot is a place beside a share, for one thing of any size that the share has no room for: a client that is alone may send and
// read the largest there is, and takes nothing of the share from others with it. What is in the slot is known by its owner and its size:
// two things that are alike in both, in the slot and in the share, are as good as each other, and either may leave the slot.
//
// Clients take turns, and so do the owners of each. An owner that is refused has a claim, at the end of the line of its client. While the slot is free it
// is kept for the owner of the next claim, for a while after that has asked last. Then the claim lapses, and if its owner asks again it has a new one, at
// the end of the line. That ends the turn of its client, unless its owner had given up before the slot was free.
//
// Invariant: while the slot is free, the owner of the next claim either has the slot when it asks or loses its claim within claimTimeMax, and
// whatever had a turn has no claim older than those of its client that wait. So an owner that asks every claimTimeMin has its turn after at most (older
// claims of its client, and one) x (clients that wait, and one) x (longest turn + claimTimeMax), whatever others do; and turns are the shorter, the more
// wait. Nothing waits but claims.
type largeSlot struct {
	held atomic.Pointer[largeHeld] // changed with mu locked

	mu     sync.Mutex // a leaf; guards what follows
	taken  time.Time
	by     *claim    // of what took it
	sent   time.Time // when its client was the one to take it; zero: it is not
	wanted bool      // another owner was refused since it was taken
	claims fairqueue.Queue[*streamClient, *claim]
	keep   time.Duration
	freed  time.Time // when it was left last
}

type largeHeld struct {
	owner any // a pointer: to a connection, or to what it counts
	bytes int64
}

// claim is that of an owner that was refused and has not had the slot since. An owner whose commits wait has another one for these, so that they and
// its requests take turns, too. The slot's mutex guards it.
type claim struct {
	client *streamClient                           // of the owner; constant
	place  *fairqueue.Place[*streamClient, *claim] // nil: it has no claim
	asked  time.Time                               // when the owner was refused last
}

// The slot is kept for the next owner for as long as the one before had it: so it is in use for half of the time at least, and clients that wait
// longer before they ask again have a turn where turns last longer. But it is kept for several times as long as clients are advised to wait.
const (
	claimTimeMin = 100 * time.Millisecond
	claimTimeMax = time.Second
)

// slotParts is for how many times --message-timeout a client may keep the slot from one other. From more it may keep it for a part of that, and
// from slotParts others for that time once: as long as any client may take over a message or an answer.
const slotParts = 4

// take takes the slot, unless it is taken, or it is the turn of another. Without a claim the caller sees to the turns.
func (s *largeSlot) take(owner any, c *claim, bytes int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	h := s.held.Load()
	if h != nil && h.owner == owner && s.by == c {
		return false // it has its turn
	}
	if h == nil && s.isTurnLocked(c, now) {
		s.forgetLocked(c)
		s.held.Store(&largeHeld{owner, bytes})
		s.taken, s.by, s.sent, s.wanted = now, c, time.Time{}, false
		return true
	}
	if s.wanted = true; c != nil {
		if c.place == nil {
			c.place = s.claims.Push(c.client, c)
		}
		c.asked = now
	}
	return false
}

// isTurnLocked reports whether the slot, which is free, is kept for no other. Claims lapse here.
func (s *largeSlot) isTurnLocked(c *claim, now time.Time) bool {
	next := s.claims.Next()
	for ; next != nil && now.Sub(next.Value.asked) > s.keep; next = s.claims.Next() {
		s.forgetLocked(next.Value)
	}
	return c == nil || next == nil || next.Value == c
}

// forget ends the claim of an owner that will not ask any more.
func (s *largeSlot) forget(c *claim) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forgetLocked(c)
}

// forgetLocked ends a claim, and the turn of its client if the free slot was kept for it.
func (s *largeSlot) forgetLocked(c *claim) {
	switch {
	case c == nil || c.place == nil:
		return
	case s.held.Load() == nil && s.claims.Next() == c.place && s.freed.Sub(c.asked) <= s.keep:
		s.claims.Pop()
	default:
		s.claims.Remove(c.place)
	}
	c.place = nil
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
		s.freed = time.Now()
		s.keep = min(max(s.freed.Sub(s.taken), claimTimeMin), claimTimeMax)
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

// handOver says that what is in the slot waits for its client from now on, unless it does already: another thing of its size may be meant.
func (s *largeSlot) handOver(owner any, bytes int64) {
	if !s.holds(owner, bytes) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sent.IsZero() {
		s.sent = time.Now()
	}
}

// haste is that of the client that has the slot: none if no other was refused since it has it.
func (s *largeSlot) haste() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.wanted {
		return 0
	}
	return haste(s.claims.Len())
}

// haste divides the time for which a client may keep a slot for which so many wait.
func haste(waiting int) int { return min(max(waiting, 1), slotParts) }

// turnLocked is how long a turn may last, if it may last for most with one other waiting.
func (s *largeSlot) turnLocked(most time.Duration) time.Duration {
	return most / time.Duration(haste(s.claims.Len()))
}

// isOverdue reports whether the owner's client has taken longer than it may over what is in the slot, by more than a grace, and another wants the
// slot. The most is what it may take if there is one other.
func (s *largeSlot) isOverdue(owner any, most, grace time.Duration) bool {
	h := s.held.Load()
	if h == nil || h.owner != owner {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wanted && !s.sent.IsZero() && time.Since(s.sent) > s.turnLocked(most)+grace
}

// overstays reports whether something has been in the slot for longer than it may, and another wants the slot.
func (s *largeSlot) overstays(owner any, bytes int64, most time.Duration) bool {
	if !s.holds(owner, bytes) {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wanted && time.Since(s.taken) > s.turnLocked(most)
}
