package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/epochkv/epochkv/client"
)

const (
	latencyPrefix = "kvctl-check/"
	// latencyFor is how long each latency is measured: some hundred durable puts even on a slow disk.
	latencyFor = 2 * time.Second
)

// Milliseconds at the 99th percentile. A round trip within a data centre takes a fraction of one; a durable put adds one sync,
// for which the bars of the disk hold.
var (
	roundTripBars = bars{warn: 5, fail: 100}
	syncPutBars   = bars{warn: syncBars.warn + 5, fail: syncBars.fail + 100}
)

// checkLatency measures requests to the server, each kind for so long.
func checkLatency(ctx context.Context, c *client.Client, length time.Duration) ([]finding, error) {
	key := fmt.Appendf(nil, "%s%016x", latencyPrefix, rand.Uint64())
	trip, err := timed(length, func() error {
		_, err := c.Get(ctx, key)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("round trip: %w", err)
	}
	put, err := timed(length, func() error {
		_, err := c.Put(ctx, key, key, client.Sync())
		return err
	})
	if _, cleanUp := c.Delete(context.WithoutCancel(ctx), key, client.Async()); cleanUp != nil {
		err = errors.Join(err, fmt.Errorf("clean up %s: %w", key, cleanUp))
	}
	if err != nil {
		return nil, fmt.Errorf("durable put: %w", err)
	}
	return []finding{
		judgeLatency("round trip", trip, roundTripBars, advice{
			pass: "the network and an idle server answer fast",
			warn: "the network is slow, or client or server are short of processor time: single requests in a row will feel it, pipelines less",
			fail: "the server is far away or overloaded: compare with ping, and look at the server's processors",
		}),
		judgeLatency("durable put", put, syncPutBars, advice{
			pass: "a lone writer waits about as long as one sync of the disk takes",
			warn: "the server's disk syncs slowly, or others use it: kvctl check disk on the server tells which",
			fail: "durable writes will stall: give the data directory a disk of its own, with a write cache that survives power loss",
		}),
	}, nil
}
