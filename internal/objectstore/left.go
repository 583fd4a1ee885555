package objectstore

import (
	"fmt"
	"sync"
)

// Each call that was left keeps a thread of the system, until the kernel returns from it. So where many were left, no other one begins, and what has
// begun can always be left: nothing waits for the kernel. With those that run when the device stops to answer, they are a few more than the bounds.
const (
	leftOfStoreMax = 16 // calls of a store: beside one that does not answer, the others are used
	leftStoresMax  = 4  // stores that have any
)

// leftCalls are the calls that were left and have not returned.
type leftCalls struct {
	mu sync.Mutex
	of map[string]int // by the store; none is zero
}

var left = leftCalls{of: map[string]int{}}

// room returns nil if a call of a store may begin. Its error is a failure that may be over soon.
func (l *leftCalls) room(store string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch n := l.of[store]; {
	case n >= leftOfStoreMax:
		return fmt.Errorf("%w: the device does not answer: %d calls to %s have not returned", errTemporary, n, store)
	case n == 0 && len(l.of) >= leftStoresMax:
		return fmt.Errorf("%w: %s is not used while calls to %d others have not returned, whose devices do not answer", errTemporary, store, len(l.of))
	}
	return nil
}

func (l *leftCalls) add(store string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.of[store]++
}

func (l *leftCalls) remove(store string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of[store]--; l.of[store] == 0 {
		delete(l.of, store)
	}
}
