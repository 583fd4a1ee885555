package auth

import (
	"reflect"
	"sync/atomic"
)

// Ended tells those that follow a user or a token when the newest table does not have it any more: it has changed, or is gone. They follow it
// while they wait or are idle, so that changes of others, which may be many, do not wake them.
type Ended struct {
	done atomic.Pointer[chan struct{}] // made by the first that asks
}

// Done is closed when it has ended.
func (e *Ended) Done() <-chan struct{} {
	if c := e.done.Load(); c != nil {
		return *c
	}
	c := make(chan struct{})
	e.done.CompareAndSwap(nil, &c)
	return *e.done.Load()
}

// closed is the channel of what had ended before anyone asked.
var closed = func() *chan struct{} {
	c := make(chan struct{})
	close(c)
	return &c
}()

func (e *Ended) end() {
	if c := e.done.Swap(closed); c != nil && c != closed {
		close(*c)
	}
}

// Retire ends the users and tokens of t that next, which was published after it, does not have. No later table has them. A change leaves most
// of the maps as they are, and these cost nothing.
func (t *Table) Retire(next *Table) {
	if !same(t.Users, next.Users) {
		for name, u := range t.Users {
			if next.Users[name] != u {
				u.Ended.end()
			}
		}
	}
	for i, tokens := range t.Tokens {
		if same(tokens, next.Tokens[i]) {
			continue
		}
		for hash, k := range tokens {
			if next.Tokens[i][hash] != k {
				k.Ended.end()
			}
		}
	}
}

// same reports whether two maps are one.
func same[K comparable, V any](a, b map[K]V) bool {
	return reflect.ValueOf(a).UnsafePointer() == reflect.ValueOf(b).UnsafePointer()
}
