package clients

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/client"
)

// tally is what one client knows of its increments.
type tally struct{ applied, unknown, refused int }

// add counts the outcome of one increment.
func (n *tally) add(err error) {
	var e *client.Error
	switch {
	case err == nil:
		n.applied++
	case errors.As(err, &e) && !e.OutcomeUnknown():
		n.refused++
	default:
		n.unknown++
	}
}

var (
	onceRounds    = flag.Int("once.rounds", 6, "how often the server is stopped or killed under increments")
	onceTransport = flag.String("once.transport", "direct", "the server's transport: direct or grpc-go")
)

// TestEveryIncrementIsAppliedOnceUnderFaults: increments by Update and by Invoke go over connections that
// break after so many bytes, to a server that is stopped, killed and started again. The client repeats
// them, with the request's id, until it knows the outcome: the sum is exact, and no outcome stays unknown.
func TestEveryIncrementIsAppliedOnceUnderFaults(t *testing.T) {
	t.Parallel()
	s := startServer(t, "--transport", *onceTransport)
	p := startProxy(t, s.endpoint)
	ctx, cancel := context.WithTimeout(t.Context(), time.Duration(*onceRounds)*20*time.Second)
	defer cancel()
	ways := []func(c *client.Client, key []byte) error{
		func(c *client.Client, key []byte) error {
			return c.Update(ctx, func(tx *client.Txn) error {
				v, err := tx.Get(key)
				if err != nil {
					return err
				}
				return tx.Put(key, []byte(strconv.Itoa(number(v)+1)))
			})
		},
		func(c *client.Client, key []byte) error {
			_, err := c.Increment(ctx, key, 1)
			return err
		},
	}
	tallies := make([]tally, 3*len(ways))
	done := make(chan struct{})
	var clients sync.WaitGroup
	for i := range tallies {
		c := s.dial(p.endpoint, client.WithRetry(client.Retry{Attempts: 10_000, Max: 20 * time.Millisecond}))
		clients.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
					err := ways[i%len(ways)](c, fmt.Append(nil, "n", i))
					if tallies[i].add(err); err != nil {
						time.Sleep(20 * time.Millisecond) // the server may be away
					}
				}
			}
		})
	}
	for round := range *onceRounds {
		p.budget.Store(int64(2000 + 3000*(round%6)))
		time.Sleep(150 * time.Millisecond)
		p.cutAll()
		time.Sleep(150 * time.Millisecond)
		s.signal([]syscall.Signal{syscall.SIGTERM, syscall.SIGTERM, syscall.SIGKILL}[round%3])
		s.start()
	}
	p.budget.Store(0)
	close(done)
	clients.Wait()
	reader := s.dial(s.endpoint)
	for i, n := range tallies {
		v, err := reader.Get(ctx, fmt.Append(nil, "n", i))
		if err != nil {
			t.Fatal(err)
		}
		got := number(v)
		t.Logf("client %d: %d, of %+v", i, got, n)
		if got != n.applied || n.unknown > 0 {
			t.Errorf("client %d: %d increments took effect, where %d succeeded and %d are unknown", i, got, n.applied, n.unknown)
		}
		if n.applied == 0 {
			t.Errorf("client %d: nothing succeeded", i)
		}
	}
}

// TestUpdateAcrossStopsIsAppliedOnce: a server that is stopped and started again answers each commit
// that it has executed, so every Update succeeds, and takes effect once.
func TestUpdateAcrossStopsIsAppliedOnce(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	applied := make([]int, 8)
	done := make(chan struct{})
	var clients sync.WaitGroup
	for i := range applied {
		// Enough attempts for the slowest start: an error means that a commit was not answered.
		c := s.dial(s.endpoint, client.WithRetry(client.Retry{Attempts: 10_000, Max: 20 * time.Millisecond}))
		key := fmt.Append(nil, "n", i)
		clients.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				err := c.Update(ctx, func(tx *client.Txn) error {
					v, err := tx.Get(key)
					if err != nil {
						return err
					}
					return tx.Put(key, []byte(strconv.Itoa(number(v)+1)))
				})
				if err != nil {
					t.Errorf("client %d: %v", i, err)
				}
				applied[i]++
			}
		})
	}
	for range 5 {
		time.Sleep(50 * time.Millisecond)
		if code := s.signal(syscall.SIGTERM); code != 0 {
			t.Errorf("exit code %d", code)
		}
		s.start()
	}
	close(done)
	clients.Wait()
	for i, want := range applied {
		v, err := s.dial(s.endpoint).Get(ctx, fmt.Append(nil, "n", i))
		if got := number(v); err != nil || got != want {
			t.Errorf("client %d: %d updates took effect, %d succeeded: %v", i, got, want, err)
		}
	}
}
