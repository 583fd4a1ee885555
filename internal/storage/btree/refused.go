package btree

import (
	"bytes"
	"fmt"
	"slices"
	"sync"

	"github.com/epochkv/epochkv/internal/keys"
)

// An entry that no page can hold, or that is out of order, concerns its key alone. The merge skips
// all input of the key and continues to the end, so that its RefusedError names every such key. The
// caller then removes those keys from the input and tries again.

// Refused is a key of the input that the tree does not accept.
type Refused struct {
	Key []byte
	Err error // wraps ErrKeySize or ErrInputOrder
}

// RefusedError ends a merge whose input had entries that the tree does not accept. It unwraps to
// the first key's error.
type RefusedError struct {
	Entries []Refused // by key, each key once; at most RefusedMax
	Total   int       // number of refused keys, including those that are not in Entries
}

// RefusedMax bounds the list in a RefusedError.
const RefusedMax = 4096

func (e *RefusedError) Error() string {
	return fmt.Sprintf("the tree refuses %d keys of the input, first %.40q: %v", e.Total, e.Entries[0].Key, e.Entries[0].Err)
}

func (e *RefusedError) Unwrap() error { return e.Entries[0].Err }

// refused collects the keys that a merge skips.
type refused struct {
	mu      sync.Mutex
	entries []Refused
	total   int
}

// add records a key. A key that two workers find is recorded once.
func (r *refused) add(key []byte, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if slices.ContainsFunc(r.entries, func(o Refused) bool { return bytes.Equal(o.Key, key) }) {
		return
	}
	if r.total++; len(r.entries) < RefusedMax {
		r.entries = append(r.entries, Refused{Key: key, Err: err})
	}
}

// err is a RefusedError, or nil.
func (r *refused) err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.total == 0 {
		return nil
	}
	slices.SortFunc(r.entries, func(a, b Refused) int { return bytes.Compare(a.Key, b.Key) })
	return &RefusedError{Entries: r.entries, Total: r.total}
}

// Retained reports for each version of one key, given their epochs, newest first, whether a
// snapshot can see it.
func (p *Policy) Retained(key []byte, epochs []keys.Epoch) []bool {
	h := p.begin(key)
	kept := make([]bool, len(epochs))
	for i, e := range epochs {
		kept[i] = p.retains(&h, e)
	}
	return kept
}
