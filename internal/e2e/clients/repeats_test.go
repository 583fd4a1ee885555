package clients

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/client"
)

var repeatedIncrements = flag.Int("once.increments", 400, "increments of TestRepeatsOnSeveralConnectionsAreAppliedOnce")

// repeater increments a counter by requests that it sends several times, on several connections at once.
type repeater struct {
	t       *testing.T
	rng     *rand.Rand
	key     []byte
	clients []*client.Client // each has a connection of its own, and sends every request once
	direct  *client.Client

	applied, fenced, repeated, agreed int
}

// increment sends an increment until some answer tells its outcome, or until it asks for that and forbids the increment if it was not
// applied.
func (r *repeater) increment(ctx context.Context) {
	id, epoch := r.direct.NewRequestID(), client.Epoch(0)
	for ctx.Err() == nil {
		if epoch = r.attempts(ctx, id, epoch, 1+r.rng.IntN(4)); epoch != 0 {
			break
		}
		if r.rng.IntN(3) > 0 {
			continue
		}
		state, at, err := r.direct.Outcome(ctx, id, true)
		switch {
		case err != nil: // the context has ended
		case state == client.Cancelled:
			r.fenced++
			if e := r.attempts(ctx, id, 0, 2); e != 0 {
				r.t.Errorf("%s: a request that was cancelled was applied at epoch %d", id, e)
			}
			return
		case state == client.Applied:
			epoch = at
		default:
			r.t.Errorf("%s: the outcome with a fence is %v", id, state)
			return
		}
	}
	if epoch == 0 {
		return
	}
	r.applied++
	if r.rng.IntN(4) == 0 { // later, perhaps after a restart
		r.attempts(ctx, id, epoch, 1)
	}
}

// attempts sends a request so many times, and returns the epoch at which it was applied; zero if no answer tells it. All that tell it
// tell the same.
func (r *repeater) attempts(ctx context.Context, id client.RequestID, known client.Epoch, n int) client.Epoch {
	epochs := make([]client.Epoch, n)
	var all sync.WaitGroup
	for i := range n {
		c, pause := r.clients[r.rng.IntN(len(r.clients))], time.Duration(r.rng.IntN(3000))*time.Microsecond
		within := time.Duration(1+r.rng.IntN(200)) * time.Millisecond
		all.Go(func() {
			time.Sleep(pause)
			ctx, cancel := context.WithTimeout(ctx, within)
			defer cancel()
			if _, epoch, err := c.Invoke(ctx, client.Increment(r.key, 1), client.As(id)); err == nil {
				epochs[i] = epoch
			}
		})
	}
	all.Wait()
	r.repeated += n - 1
	for _, e := range epochs {
		switch {
		case e == 0:
		case known == 0:
			known = e
		case e != known:
			r.t.Errorf("%s was applied at epoch %d and at epoch %d", id, known, e)
		default:
			r.agreed++
		}
	}
	return known
}

// TestRepeatsOnSeveralConnectionsAreAppliedOnce: increments are sent up to four times at once, on connections that break, while the
// server is killed, stopped and started again. Their sum is the number of those that some answer, or GetOutcome, calls applied.
func TestRepeatsOnSeveralConnectionsAreAppliedOnce(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	p := startProxy(t, s.endpoint)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute+time.Duration(*repeatedIncrements)*50*time.Millisecond)
	defer cancel()
	var done atomic.Int64
	var workers sync.WaitGroup
	repeaters := make([]*repeater, 6)
	for i := range repeaters {
		r := &repeater{t: t, rng: rand.New(rand.NewPCG(uint64(i), 15)), key: fmt.Append(nil, "n", i)}
		for range 3 {
			r.clients = append(r.clients, s.dial(p.endpoint, client.WithRetry(client.Retry{Attempts: 1})))
		}
		r.direct = s.dial(s.endpoint, client.WithRetry(client.Retry{Attempts: 10_000, Max: 20 * time.Millisecond}))
		repeaters[i] = r
		workers.Go(func() {
			for ctx.Err() == nil && done.Add(1) <= int64(*repeatedIncrements) {
				r.increment(ctx)
			}
		})
	}
	ended := make(chan struct{})
	go func() { workers.Wait(); close(ended) }()
	kills := killUntil(s, p, ended)
	if ctx.Err() != nil {
		t.Fatal("the increments take too long")
	}
	var sum repeater
	for i, r := range repeaters {
		v, err := r.direct.Get(ctx, r.key)
		if err != nil {
			t.Fatal(err)
		}
		if got := number(v); got != r.applied {
			t.Errorf("counter %d is at %d, and %d increments were applied", i, got, r.applied)
		}
		sum.applied, sum.fenced, sum.repeated, sum.agreed = sum.applied+r.applied, sum.fenced+r.fenced, sum.repeated+r.repeated, sum.agreed+r.agreed
	}
	t.Logf("%d applied, %d cancelled by a fence, %d attempts more, of which %d told what another one had told; %d stops and kills",
		sum.applied, sum.fenced, sum.repeated, sum.agreed, kills)
	if sum.applied < *repeatedIncrements/2 || sum.agreed == 0 || kills == 0 {
		t.Error("the test tests little")
	}
}

// killUntil breaks connections, and stops or kills the server, until ended is closed.
func killUntil(s *server, p *proxy, ended <-chan struct{}) (kills int) {
	for {
		p.budget.Store(int64(2000 + 3000*(kills%6)))
		select {
		case <-ended:
			return kills
		case <-time.After(time.Duration(50+100*(kills%4)) * time.Millisecond):
		}
		p.cutAll()
		s.signal([]syscall.Signal{syscall.SIGKILL, syscall.SIGKILL, syscall.SIGTERM}[kills%3])
		s.start()
		kills++
	}
}
