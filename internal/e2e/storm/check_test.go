package storm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/client"
)

const (
	checkers    = 4   // checks that go on at the same time
	batchKeys   = 256 // keys that one request reads back
	sampleSize  = 500 // writes of an earlier round that are read back, of every journal
	keepRounds  = 3   // the newest rounds stay in the store
	keepEvery   = 8   // and of the older ones every eighth, to the end
	checkMax    = 10 * time.Minute
	deleteAtOne = 20_000 // keys that one request deletes
)

// history says which rounds the store has.
type history struct {
	kept, deleted []int
	last          int  // the round that has just ended; -1 before the first
	ended         bool // no round follows
}

func (h *history) add(round int) { h.kept, h.last = append(h.kept, round), round }

// expire names the rounds that are to be deleted now.
func (h *history) expire() (expired []int) {
	for len(h.kept) > keepRounds {
		i := slices.IndexFunc(h.kept[:len(h.kept)-keepRounds], func(round int) bool { return round%keepEvery != 0 })
		if i < 0 {
			break
		}
		expired = append(expired, h.kept[i])
		h.kept = slices.Delete(h.kept, i, i+1)
	}
	h.deleted = append(h.deleted, expired...)
	return expired
}

// checker reads back what the store must have at a time without load. Its parts run at the same
// time, because one request after another takes longer than the load did.
type checker struct {
	*storm
	history
	client *client.Client
	ctx    context.Context

	slots chan struct{}
	parts sync.WaitGroup

	mu   sync.Mutex
	errs []error
}

// check reads back every write of the last round, a sample of each earlier round and, at the end,
// everything.
func (s *storm) check(ctx context.Context, c *client.Client, h history) error {
	ctx, cancel := context.WithTimeout(ctx, checkMax)
	defer cancel()
	k := &checker{storm: s, history: h, client: c, ctx: ctx, slots: make(chan struct{}, checkers)}
	for _, part := range []func() error{k.checkBank, k.checkCounters} {
		k.begin(part)
	}
	rng := rand.New(rand.NewPCG(s.seed, uint64(h.last)))
	for _, j := range s.journals() {
		k.checkJournal(j, rng)
	}
	k.checkLoads(rng)
	k.parts.Wait()
	return errors.Join(k.errs...)
}

// begin runs a part of the check as soon as a slot is free.
func (k *checker) begin(part func() error) {
	k.slots <- struct{}{}
	k.parts.Go(func() {
		defer func() { <-k.slots }()
		if err := part(); err != nil {
			k.mu.Lock()
			defer k.mu.Unlock()
			k.errs = append(k.errs, err)
		}
	})
}

func (k *checker) checkJournal(j *journal, rng *rand.Rand) {
	for _, round := range k.deleted {
		k.begin(func() error { return k.checkCount(j.prefix(round), 0) })
	}
	for _, round := range k.kept {
		count := j.written(round)
		if round == k.last || k.ended {
			k.checkRound(j, round, count)
			continue
		}
		sample := make([]write, min(count, sampleSize))
		for i := range sample {
			sample[i] = write{round, rng.IntN(count)}
		}
		k.checkWrites(j, sample, func([]write, int) error { return nil })
	}
}

// checkRound reads back all writes of a round and then counts its keys, so that a key that was
// never written is found as well.
func (k *checker) checkRound(j *journal, round, count int) {
	all := make([]write, count)
	for i := range all {
		all[i] = write{round, i}
	}
	var found, left atomic.Int64
	left.Store(int64(count))
	k.checkWrites(j, all, func(batch []write, n int) error {
		found.Add(int64(n))
		if left.Add(-int64(len(batch))) > 0 {
			return nil
		}
		return k.checkCount(j.prefix(round), int(found.Load()))
	})
}

// checkWrites reads writes back in batches, and calls after with each batch and the number of its
// keys that were found.
func (k *checker) checkWrites(j *journal, all []write, after func(batch []write, found int) error) {
	for batch := range slices.Chunk(all, batchKeys) {
		k.begin(func() error {
			found, err := k.checkBatch(j, batch)
			if err != nil {
				return err
			}
			return after(batch, found)
		})
	}
}

func (k *checker) checkBatch(j *journal, writes []write) (found int, err error) {
	var keys [][]byte
	for _, w := range writes {
		if keys = append(keys, j.key(w)); j.twin {
			keys = append(keys, twinOf(j.key(w)))
		}
	}
	values, err := k.client.BatchGet(k.ctx, keys)
	if err != nil {
		return 0, fmt.Errorf("read %s back: %w", j.name, err)
	}
	step := len(keys) / len(writes)
	for i, w := range writes {
		if err := checkWrite(j, w, values[i*step:(i+1)*step]); err != nil {
			return 0, err
		}
		j.decide(w, values[i*step].Found)
		if values[i*step].Found {
			found += step
		}
	}
	return found, nil
}

// checkWrite compares the journal with what was read: one value, or the two of a batch.
func checkWrite(j *journal, w write, values []client.Value) error {
	key, one, known := j.key(w), values[0], j.state(w)
	switch {
	case one.Found && !bytes.Equal(one.Data, valueOf(key)):
		return fmt.Errorf("%s has a value that was never written: %.40q", key, one.Data)
	case known == acknowledged && !one.Found:
		return fmt.Errorf("%s was acknowledged and is gone", key)
	case known == lost && one.Found:
		return fmt.Errorf("%s was not there after a restart and is there now", key)
	}
	if other := values[len(values)-1]; other.Found != one.Found || other.Epoch != one.Epoch {
		return fmt.Errorf("torn batch: %s at %d, its twin at %d", key, one.Epoch, other.Epoch)
	}
	return nil
}

func (k *checker) checkCount(prefix []byte, want int) error {
	n, _, err := k.client.Count(k.ctx, client.Prefix(prefix), client.ScanOptions{})
	if err == nil && n != uint64(want) {
		err = fmt.Errorf("a scan of %s finds %d keys, not %d", prefix, n, want)
	}
	return err
}

// checkLoads counts the keys of the last round's loads, of those of one earlier round and, at the
// end, of all.
func (k *checker) checkLoads(rng *rand.Rand) {
	for _, round := range k.deleted {
		k.begin(func() error { return k.checkCount(loadsPrefix(round), 0) })
	}
	if len(k.kept) == 0 {
		return
	}
	chosen := k.kept
	if !k.ended {
		chosen = []int{k.last, k.kept[rng.IntN(len(k.kept))]}
	}
	for _, round := range chosen {
		k.begin(func() error { return k.checkLoadsOf(round) })
	}
}

// checkLoadsOf counts the keys of every load of a round: all or none, and all if the load was
// acknowledged.
func (k *checker) checkLoadsOf(round int) error {
	k.loads.mu.Lock()
	loads := slices.Clone(k.loads.acked[round])
	k.loads.mu.Unlock()
	for _, number := range loads {
		if err := k.checkCount(loadPrefix(round, number), loadKeys); err != nil {
			return fmt.Errorf("a load was acknowledged: %w", err)
		}
	}
	total, _, err := k.client.Count(k.ctx, client.Prefix(loadsPrefix(round)), client.ScanOptions{})
	if err == nil && total%loadKeys != 0 {
		err = fmt.Errorf("%d keys of loads in round %d: %d belong to half of a load", total, round, total%loadKeys)
	}
	return err
}

func (k *checker) checkBank() error {
	sum := int64(0)
	err := k.client.View(k.ctx, func(tx *client.Txn) error {
		sum = 0
		for i := range accounts {
			n, err := readInt(tx, account(i))
			if err != nil {
				return err
			}
			sum += n
		}
		return nil
	})
	if err == nil && sum != accounts*balance {
		err = fmt.Errorf("the accounts hold %d together, not %d", sum, accounts*balance)
	}
	return err
}

func (k *checker) checkCounters() error {
	for i := range counters {
		v, err := k.client.Get(k.ctx, counter(i))
		if err != nil {
			return err
		}
		n := int64(0)
		if v.Found {
			if n, err = strconv.ParseInt(string(v.Data), 10, 64); err != nil {
				return err
			}
		}
		if low, high := k.incremented[i].Load(), k.increments[i].Load(); n < low || n > high {
			return fmt.Errorf("counter %d is %d; %d increments were acknowledged and %d sent", i, n, low, high)
		}
	}
	return nil
}

// deleteRound removes a round from the store and from the journals, so that the store does not only
// grow.
func (s *storm) deleteRound(ctx context.Context, c *client.Client, round int) error {
	prefixes := [][]byte{loadsPrefix(round)}
	for _, j := range s.journals() {
		prefixes = append(prefixes, j.prefix(round))
		j.remove(round)
	}
	for _, prefix := range prefixes {
		for more := true; more; {
			deleted, err := c.DeleteRange(ctx, client.Prefix(prefix), deleteAtOne, client.Sync())
			if err != nil {
				return fmt.Errorf("delete %s: %w", prefix, err)
			}
			more = deleted.More
		}
	}
	s.loads.mu.Lock()
	defer s.loads.mu.Unlock()
	delete(s.loads.acked, round)
	return nil
}
