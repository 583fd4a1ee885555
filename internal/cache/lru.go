package cache

import (
	"sync"
	"unsafe"
)

// lru evicts who was used least recently, exactly: a list through the frames, and a lock around it that every hit takes. It is the
// baseline that the others are measured against.
type lru struct {
	words unsafe.Pointer // constant; a resident frame's word is at most coolest, below the cap of every hit

	mu         sync.Mutex // a leaf lock
	prev, next []uint32   // by frame, 1 up; 0 is the list's head: next is the newest, prev the oldest
	tally      tally
}

func (l *lru) resize(frames uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.prev) <= int(frames) {
		l.prev, l.next = append(l.prev, 0), append(l.next, 0)
	}
}

func (l *lru) counts() tally {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.tally
}

func (l *lru) link(n uint32) {
	l.prev[n], l.next[n] = 0, l.next[0]
	l.prev[l.next[0]], l.next[0] = n, n
}

func (l *lru) unlink(n uint32) {
	l.next[l.prev[n]], l.prev[l.next[n]] = l.next[n], l.prev[n]
}

func (l *lru) climb(f, _ uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := wordAt(l.words, f)
	switch w.Load() {
	case absent:
		return
	case unvisited:
		w.Store(coolest)
		l.tally.used++
	}
	l.unlink(f + 1)
	l.link(f + 1)
}

func (l *lru) admit(f, _ uint32, a arrival) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.link(f + 1)
	start := uint32(coolest)
	if a.ahead {
		start = unvisited
	}
	wordAt(l.words, f).Store(start)
}

func (l *lru) remove(f uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.removeLocked(f)
}

func (l *lru) removeLocked(f uint32) {
	l.unlink(f + 1)
	if wordAt(l.words, f).Swap(absent) == unvisited {
		l.tally.wasted++
	}
}

func (l *lru) victims(dst []uint32, n int) []uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	for range n {
		oldest := l.prev[0]
		if oldest == 0 {
			break
		}
		l.removeLocked(oldest - 1)
		l.tally.evicted++
		l.tally.visited++
		dst = append(dst, oldest-1)
	}
	return dst
}
