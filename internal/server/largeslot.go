package server

import "sync/atomic"

// largeSlot is a place beside a share, for one thing of any size that the share has no room for: a client that is alone may send and
// read the largest there is, and takes nothing of the share from others with it. What is in the slot is known by its owner and its size:
// of two things that are alike in both, in the slot and in the share, either may leave the slot.
type largeSlot struct{ held atomic.Pointer[largeHeld] }

type largeHeld struct {
	owner any // a pointer: to a connection, or to what it counts
	bytes int64
}

// take takes the slot, unless it is taken.
func (s *largeSlot) take(owner any, bytes int64) bool {
	return s.held.Load() == nil && s.held.CompareAndSwap(nil, &largeHeld{owner, bytes})
}

// leave frees the slot. It reports false if something else is in it, or nothing.
func (s *largeSlot) leave(owner any, bytes int64) bool {
	h := s.held.Load()
	return h != nil && *h == largeHeld{owner, bytes} && s.held.CompareAndSwap(h, nil)
}

// drop frees the slot if it is the owner's.
func (s *largeSlot) drop(owner any) {
	if h := s.held.Load(); h != nil && h.owner == owner {
		s.held.CompareAndSwap(h, nil)
	}
}

// bytes is the size of what is in the slot.
func (s *largeSlot) bytes() int64 {
	if h := s.held.Load(); h != nil {
		return h.bytes
	}
	return 0
}
