package storm

import (
	"bytes"
	"context"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"sync"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// journal is what one worker knows of its writes. Every write has a key of its own, so that a write whose outcome is unknown stays
// decidable for ever: the key has its one value, or nothing.
type journal struct {
	name string
	twin bool // each write is a batch of two keys, which must share their fate

	mu     sync.Mutex
	writes []write
}

type write struct {
	round, number int
	state         state
}

type state uint8

const (
	unknown      state = iota // sent, and not acknowledged
	acknowledged              // must be there for ever
	lost                      // was not there after a restart, and must never come back
)

// next begins a write and returns its position in the journal.
func (j *journal) next(round int) (at int, key []byte) {
	j.mu.Lock()
	defer j.mu.Unlock()
	at = len(j.writes)
	j.writes = append(j.writes, write{round: round, number: at})
	return at, j.key(round, at)
}

func (j *journal) acknowledge(at int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.writes[at].state = acknowledged
}

// key has a common prefix with others, as real keys do.
func (j *journal) key(round, at int) []byte {
	return fmt.Appendf(nil, "%s/%06d/%09d", j.name, round, at)
}

func twinOf(key []byte) []byte { return append(bytes.Clone(key), "/twin"...) }

// valueOf is derived from the key: mostly small, now and then large enough for pages of its own.
func valueOf(key []byte) []byte {
	h := fnv.New64a()
	_, _ = h.Write(key) // never fails
	rng := rand.New(rand.NewPCG(h.Sum64(), 1))
	size := 16 + rng.IntN(400)
	if rng.IntN(300) == 0 {
		size = 100 << 10
	}
	value := make([]byte, size)
	for i := range value {
		value[i] = byte('a' + rng.IntN(26))
	}
	return value
}

// check reads back the writes that choose accepts, in every state, and settles those whose outcome was unknown: what was not there after
// a restart must not come back later, and what was there must stay.
func (j *journal) check(ctx context.Context, kv pb.KVClient, choose func(w *write) bool) (checked int, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for i := range j.writes {
		if !choose(&j.writes[i]) {
			continue
		}
		if err := j.checkWrite(ctx, kv, &j.writes[i]); err != nil {
			return checked, err
		}
		checked++
	}
	return checked, nil
}

func (j *journal) checkWrite(ctx context.Context, kv pb.KVClient, w *write) error {
	key := j.key(w.round, w.number)
	one, err := kv.Get(ctx, &pb.GetRequest{Key: key})
	if err != nil {
		return fmt.Errorf("get %s: %w", key, err)
	}
	switch {
	case one.Found && !bytes.Equal(one.Value, valueOf(key)):
		return fmt.Errorf("%s has a value that was never written: %.40q", key, one.Value)
	case w.state == acknowledged && !one.Found:
		return fmt.Errorf("%s was acknowledged and is gone", key)
	case w.state == lost && one.Found:
		return fmt.Errorf("%s was not there after a restart and is there now", key)
	}
	if j.twin {
		other, err := kv.Get(ctx, &pb.GetRequest{Key: twinOf(key)})
		if err != nil {
			return fmt.Errorf("get the twin of %s: %w", key, err)
		}
		if other.Found != one.Found || other.Epoch != one.Epoch {
			return fmt.Errorf("torn batch: %s at %d, its twin at %d", key, one.Epoch, other.Epoch)
		}
	}
	if w.state == unknown {
		w.state = lost
		if one.Found {
			w.state = acknowledged
		}
	}
	return nil
}

// forget drops what was written up to a round, after it was deleted from the store.
func (j *journal) forget(round int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for i := range j.writes {
		if j.writes[i].round <= round {
			j.writes[i].state = lost
		}
	}
}

func (j *journal) count(s state) (n int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for i := range j.writes {
		if j.writes[i].state == s {
			n++
		}
	}
	return n
}
