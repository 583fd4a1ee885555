package server

import (
	"context"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/testseed"
)

// TestWatchesThatComeBackAreWhole: clients with previous values leave at any moment, and come back with the last token that they got,
// that of progress included, while values of every size are written, the memory of the feed is small, and the room for large
// responses is taken at times. Each previous value is what the events before lead to, no event comes twice or after progress at its
// epoch, and in the end each client has the state of the store.
func TestWatchesThatComeBackAreWhole(t *testing.T) {
	const clients, rounds = 3, 25
	seed := testseed.Base(t)
	h := mustStart(t, func(c *config.Config) {
		c.Retention, c.Feed.Memory, c.Feed.CatchUpReaders = time.Hour, config.MiB, 1
	})
	var writing, watching sync.WaitGroup
	ctx, stop := context.WithCancel(testContext(t))
	defer writing.Wait()
	defer stop()
	for writer := range uint64(3) {
		rnd, kv := rand.New(rand.NewPCG(seed, writer)), pb.NewKVServiceClient(h.dial(t))
		writing.Go(func() {
			for ctx.Err() == nil {
				if _, err := kv.BatchWrite(ctx, randomBatch(rnd)); err != nil && ctx.Err() == nil {
					t.Error(err)
					return
				}
			}
		})
	}
	rnd := rand.New(rand.NewPCG(seed, 100))
	writing.Go(func() {
		for ctx.Err() == nil {
			held := h.fillWatches()
			time.Sleep(time.Duration(rnd.IntN(20)) * time.Millisecond)
			held.leave()
			time.Sleep(time.Duration(rnd.IntN(20)) * time.Millisecond)
		}
	})
	all := make([]*returning, clients)
	for i := range all {
		c := &returning{h: &harness{conn: h.dial(t)}, rnd: rand.New(rand.NewPCG(seed, 200+uint64(i))), state: map[string]string{}}
		all[i] = c
		watching.Go(func() {
			for round := 0; round < rounds && c.failure == ""; round++ {
				c.watch(t, 1+c.rnd.IntN(12), math.MaxUint64)
			}
		})
	}
	watching.Wait()
	stop()
	writing.Wait()
	eventually(t, "no write that was cancelled is under way", func() bool {
		requests, _, _ := h.admission.inflight()
		return requests == 0
	})
	last := h.put(t, "last", "v")
	want := h.contents(t)
	for i, c := range all {
		for c.epoch < last && c.failure == "" {
			c.watch(t, 100, last)
		}
		if c.failure != "" || !maps.Equal(c.state, want) {
			t.Errorf("client %d: %s; %d keys, the store has %d", i, c.failure, len(c.state), len(want))
		}
	}
}

func randomBatch(rnd *rand.Rand) *pb.BatchWriteRequest {
	batch := new(pb.BatchWriteRequest)
	for _, i := range rnd.Perm(12)[:1+rnd.IntN(4)] {
		m := &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Append(nil, "k", i)}
		switch rnd.IntN(8) {
		case 0:
			m.Kind = pb.Mutation_KIND_DELETE
		case 1:
			m.Value = make([]byte, rnd.IntN(400<<10))
		default:
			m.Value = make([]byte, 8+rnd.IntN(100))
		}
		for at := 0; at+8 <= len(m.Value); at += 8 + len(m.Value)/2 {
			copy(m.Value[at:], fmt.Appendf(nil, "%08x", rnd.Uint32()))
		}
		batch.Mutations = append(batch.Mutations, m)
	}
	return batch
}

// returning is a client that watches everything, leaves, and comes back.
type returning struct {
	h        *harness
	rnd      *rand.Rand
	token    []byte
	epoch    uint64 // of the newest event or progress
	key      string // of the newest event, if its commit has not ended
	promised uint64 // by progress
	state    map[string]string
	failure  string
}

// watch takes some responses of a new stream, at most up to an epoch.
func (c *returning) watch(t *testing.T, responses int, until uint64) {
	create := &pb.CreateWatch{WatchId: 1, Values: pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS, Start: &pb.CreateWatch_AfterEpoch{}}
	if c.token != nil {
		create.Start = &pb.CreateWatch_ResumeToken{ResumeToken: c.token}
	}
	w := mustWatch(t, c.h, create)
	defer w.cancel()
	for i := 0; i < responses && c.epoch < until; i++ {
		if c.rnd.IntN(2) == 0 {
			_ = w.stream.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Progress{Progress: &pb.RequestProgress{}}})
		}
		m, err := w.stream.Recv()
		if err != nil || m.GetEnded() != nil {
			c.fail("%v %v", err, m.GetEnded())
			return
		}
		c.apply(m)
		c.token = m.ResumeToken
	}
}

func (c *returning) fail(format string, args ...any) {
	if c.failure == "" {
		c.failure = fmt.Sprintf(format, args...)
	}
}

func (c *returning) apply(m *pb.WatchResponse) {
	if p := m.GetProgress(); p != nil {
		if c.promised = max(c.promised, p.Epoch); p.Epoch > c.epoch {
			c.epoch, c.key = p.Epoch, ""
		}
	}
	for _, commit := range m.GetChanges().GetCommits() {
		if commit.Epoch <= c.promised {
			c.fail("commit %d after progress at %d", commit.Epoch, c.promised)
		}
		if commit.Epoch < c.epoch || commit.Epoch == c.epoch && c.key == "" {
			c.fail("commit %d after %d", commit.Epoch, c.epoch)
		}
		if commit.Epoch > c.epoch {
			c.epoch, c.key = commit.Epoch, ""
		}
		for _, e := range commit.Events {
			c.event(commit.Epoch, e)
		}
		if commit.End {
			c.key = ""
		}
	}
}

func (c *returning) event(epoch uint64, e *pb.ChangeEvent) {
	key := string(e.Key)
	if key <= c.key {
		c.fail("commit %d: %q after %q", epoch, key, c.key)
	}
	c.key = key
	if before, had := c.state[key]; e.PreviousUnavailable || had != (e.PreviousValue != nil) || before != string(e.PreviousValue) {
		c.fail("commit %d: %q has a previous value of %d bytes, unavailable %v; the events before lead to %d bytes, present %v",
			epoch, key, len(e.PreviousValue), e.PreviousUnavailable, len(before), had)
	}
	if e.Kind == pb.EventKind_EVENT_KIND_DELETE {
		delete(c.state, key)
	} else {
		c.state[key] = string(e.Value)
	}
}
