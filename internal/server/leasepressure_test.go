package server

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/testseed"
)

// TestLeasesHoldUnderMemoryPressure: while writers overwrite everything as fast as memory allows,
// each resume token continues in the snapshot in which its scan began, until its time has passed.
// Then nothing is held, and writers go on.
func TestLeasesHoldUnderMemoryPressure(t *testing.T) {
	testseed.SkipUnderRace(t)
	const keys, size, ttl = 300, 8 << 10, time.Second
	h := mustStart(t, func(c *config.Config) {
		c.Memory, c.SnapshotLeaseTTL = 32*config.MiB, ttl
		c.Limits.BatchSize, c.Limits.ValueSize = 4*config.MiB, 1*config.MiB
	})
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	// Each batch gives all keys the same value, so that a snapshot has one value.
	overwrite := func(n int) error {
		batch := &pb.BatchWriteRequest{Durability: pb.Durability_DURABILITY_ASYNC}
		value := bytes.Repeat(fmt.Appendf(nil, "%08d", n), size/8)
		for i := range keys {
			batch.Mutations = append(batch.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "k%04d", i), Value: value})
		}
		_, err := h.kv.BatchWrite(ctx, batch)
		return err
	}
	if err := overwrite(0); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	end, done := time.Now().Add(1500*time.Millisecond), make(chan struct{})
	all.Go(func() {
		defer close(done)
		for n, written := 1, 0; written < 96<<20/(1+3*testseed.RaceDetector) && time.Now().Before(end); n++ {
			switch err := overwrite(n); status.Code(err) {
			case codes.OK:
				written += keys * size
			case codes.ResourceExhausted:
				time.Sleep(10 * time.Millisecond)
			default:
				t.Error(err)
			}
		}
	})
	for n := range 4 {
		all.Go(func() {
			for {
				h.scanByTokens(ctx, t, keys, time.Duration(n)*40*time.Millisecond, ttl)
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	all.Wait()
	eventually(t, "nothing is held", func() bool {
		e := h.store.Stats().Snapshots
		return e.Snapshots == 0 && len(h.store.SnapshotLeases()) == 0
	})
	for n := range 20 {
		if err := overwrite(n); err != nil && status.Code(err) != codes.ResourceExhausted {
			t.Error(err)
		}
	}
}

// scanByTokens reads all keys in scans of 60 entries, each of which continues the one before after a
// pause.
func (h *harness) scanByTokens(ctx context.Context, t *testing.T, keys int, pause, ttl time.Duration) {
	request := &pb.ScanRequest{Limit: 60, Tokens: pb.ResumeTokens_RESUME_TOKENS_ALL}
	var first []byte
	read := 0
	for asked := time.Now(); ; {
		before := asked // the token is not older
		asked = time.Now()
		stream, err := h.kv.Scan(ctx, request)
		if err != nil {
			t.Error(err)
			return
		}
		var token []byte
		for {
			page, err := stream.Recv()
			if err != nil {
				if age := time.Since(before); status.Code(err) == codes.OutOfRange && age < ttl/2 {
					t.Errorf("a token of %v: %v", age, err)
				}
				if read != keys && len(token) == 0 {
					return
				}
				break
			}
			for _, e := range page.Entries {
				if first == nil {
					first = bytes.Clone(e.Value)
				}
				if !bytes.Equal(first, e.Value) {
					t.Errorf("a scan has the values %.8s and %.8s", first, e.Value)
					return
				}
				read++
			}
			token = page.ResumeToken
		}
		if len(token) == 0 {
			break
		}
		request.ResumeToken = token
		time.Sleep(pause)
	}
	if read != keys {
		t.Errorf("%d of %d keys were read", read, keys)
	}
}
