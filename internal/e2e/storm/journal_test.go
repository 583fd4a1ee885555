package storm

import (
	"bytes"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"sync"
)

// journal records the writes of one kind of load. Every write has a key of its own, so that a write
// whose outcome is unknown stays decidable: the key has its one value, or nothing.
type journal struct {
	name string
	twin bool // each write is a batch of two keys: both exist or neither

	mu           sync.Mutex
	rounds       map[int][]state // the state of every write, by round; a round that was deleted from the store is dropped
	acknowledged int             // how many writes were acknowledged, in all rounds
}

// write names a write: its key is derived from it.
type write struct{ round, number int }

type state uint8

const (
	unknown      state = iota // sent, and not acknowledged
	acknowledged              // must be there for ever
	lost                      // was not there after a restart, and must never come back
)

func newJournal(name string) *journal { return &journal{name: name, rounds: map[int][]state{}} }

// next begins a write.
func (j *journal) next(round int) (w write, key []byte) {
	j.mu.Lock()
	defer j.mu.Unlock()
	w = write{round: round, number: len(j.rounds[round])}
	j.rounds[round] = append(j.rounds[round], unknown)
	return w, j.key(w)
}

func (j *journal) acknowledge(w write) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.rounds[w.round][w.number] = acknowledged
	j.acknowledged++
}

func (j *journal) written(round int) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.rounds[round])
}

func (j *journal) state(w write) state {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.rounds[w.round][w.number]
}

// decide decides a write whose outcome was unknown: what was not there after a restart must not
// come back later, and what was there must stay.
func (j *journal) decide(w write, found bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case j.rounds[w.round][w.number] != unknown:
	case found:
		j.rounds[w.round][w.number] = acknowledged
	default:
		j.rounds[w.round][w.number] = lost
	}
}

// remove removes a round that was deleted from the store.
func (j *journal) remove(round int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.rounds, round)
}

func (j *journal) count() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.acknowledged
}

// prefix is that of all keys of a round.
func (j *journal) prefix(round int) []byte { return fmt.Appendf(nil, "%s/%06d/", j.name, round) }

// key has a common prefix with others, as real keys do.
func (j *journal) key(w write) []byte { return fmt.Appendf(j.prefix(w.round), "%09d", w.number) }

func twinOf(key []byte) []byte { return append(bytes.Clone(key), "/twin"...) }

// valueOf is derived from the key: mostly small, sometimes large enough for overflow pages.
func valueOf(key []byte) []byte {
	h := fnv.New64a()
	_, _ = h.Write(key) // never fails
	rng := rand.New(rand.NewPCG(h.Sum64(), 1))
	size := 16 + rng.IntN(400)
	if rng.IntN(300) == 0 {
		size = 100 << 10
	}
	value := make([]byte, size+8)
	for i := 0; i < size; i += 8 {
		for at, bits := i, rng.Uint64(); at < i+8; at, bits = at+1, bits>>8 {
			value[at] = byte('a' + bits&15)
		}
	}
	return value[:size]
}
