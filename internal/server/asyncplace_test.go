//go:build invariants

package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// An ASYNC write is answered once it is visible. If a neighbour with an older epoch is still being
// installed, the goroutine that has executed the write waits for that in its place.

// heldNeighbour stops a commit between its epoch and its installation, so that no commit after it
// becomes visible before release.
func (h *harness) heldNeighbour(t *testing.T) (release func()) {
	t.Helper()
	x, err := h.store.Session()
	if err != nil {
		t.Fatal(err)
	}
	held, released, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	x.PauseReserved(func() {
		close(held)
		<-released
	})
	go func() {
		w := mvcc.Write{Durability: mvcc.DurabilityAsync}
		w.Set([]byte("of a neighbour"), nil)
		_, err := x.Commit(context.Background(), &w)
		done <- err
	}()
	<-held
	release = sync.OnceFunc(func() {
		close(released)
		if err := <-done; err != nil {
			t.Error(err)
		}
		x.Close()
	})
	t.Cleanup(release) // before the harness stops
	return release
}

const async = pb.Durability_DURABILITY_ASYNC

// versions counts what is in the memtables, visible or not.
func (h *harness) versions() (n int64) {
	for _, g := range h.store.Stats().Storage.Generations {
		n += g.Versions
	}
	return n
}

// quiet expects that nothing comes for a moment.
func quiet[T any](t *testing.T, what string, from <-chan T) {
	t.Helper()
	select {
	case got := <-from:
		t.Errorf("%s: %v before the neighbour was installed", what, got)
	case <-time.After(20 * time.Millisecond):
	}
}

// TestAsyncAnswersKeepTheirOrderAndSeeTheirWrites: the requests of a pipeline after an ASYNC write that
// is not visible yet are answered in their order, each sees the writes before it, and nothing is
// answered early. After the answer of a unary write, another connection sees it. Pipelines over grpc-go answer in any order.
func TestAsyncAnswersKeepTheirOrderAndSeeTheirWrites(t *testing.T) {
	h := mustStart(t, withDirect)
	stream := h.pipeline(t, testContext(t))
	mustSend(t, stream, getRequest(0, "warm"))
	mustRecv(t, stream)
	release := h.heldNeighbour(t)
	const writes = 50
	answers := make(chan *pb.PipelineResponse, 2*writes)
	go func() {
		defer close(answers)
		for range 2 * writes {
			got, err := stream.Recv()
			if err != nil {
				t.Error(err)
				return
			}
			answers <- got
		}
	}()
	for i := range uint64(writes) {
		mustSend(t, stream, putRequest(2*i, "k", fmt.Sprint(i), async), getRequest(2*i+1, "k"))
	}
	unary := make(chan error, 1)
	go func() {
		_, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("unary"), Value: []byte("1"), Durability: async})
		unary <- err
	}()
	quiet(t, "an answer of the pipeline", answers)
	quiet(t, "the answer of a unary write", unary)
	if got := h.get(t, "k"); got.Found { // on the same connection, and does not wait
		t.Errorf("a write that is not visible was read: %q", got.Value)
	}
	release()
	next := uint64(0)
	for got := range answers {
		if got.Id != next {
			t.Fatalf("answer %d instead of %d", got.Id, next)
		}
		if want := fmt.Sprint(next / 2); next%2 == 1 && string(got.GetGet().GetValue()) != want {
			t.Errorf("the read after write %s got %q", want, got.GetGet().GetValue())
		}
		next++
	}
	if err := <-unary; err != nil {
		t.Fatal(err)
	}
	other := pb.NewKVServiceClient(h.dial(t))
	if got, err := other.Get(testContext(t), &pb.GetRequest{Key: []byte("unary")}); err != nil || !got.Found {
		t.Errorf("after the answer another connection reads %v, %v", got, err)
	}
}

// TestAsyncWaitsEndWithTheirClients: clients that go away, or no longer wait, end the waits of their
// ASYNC writes, which are neither lost nor half done. Pipelines over grpc-go have executed later requests by then.
func TestAsyncWaitsEndWithTheirClients(t *testing.T) {
	for name, request := range map[string]func(ctx context.Context, kv pb.KVServiceClient) error{
		"unary": func(ctx context.Context, kv pb.KVServiceClient) error {
			_, err := kv.Put(ctx, &pb.PutRequest{Key: []byte("k"), Value: []byte("v"), Durability: async})
			return err
		},
		"pipeline": func(ctx context.Context, kv pb.KVServiceClient) error {
			stream, err := kv.Pipeline(ctx)
			if err != nil {
				return err
			}
			if err := errors.Join(stream.Send(putRequest(1, "k", "v", async)), stream.Send(putRequest(2, "never", "v", async))); err != nil {
				return err
			}
			out, err := stream.Recv()
			if err == nil {
				err = status.ErrorProto(out.GetError()) // the server's deadline may come before the client's
			}
			return err
		},
	} {
		for _, how := range []string{"connection", "cancel", "deadline"} {
			t.Run(name+", "+how, func(t *testing.T) {
				h := mustStart(t, withDirect)
				conn := h.dial(t)
				kv := pb.NewKVServiceClient(conn)
				if _, err := kv.Get(testContext(t), &pb.GetRequest{Key: []byte("warm")}); err != nil {
					t.Fatal(err)
				}
				release := h.heldNeighbour(t)
				before := h.versions()
				ctx, cancel := context.WithCancel(testContext(t))
				defer cancel()
				if how == "deadline" {
					ctx, cancel = context.WithTimeout(ctx, 100*time.Millisecond)
					defer cancel()
				}
				done := make(chan error, 1)
				go func() { done <- request(ctx, kv) }()
				eventually(t, "the write waits", func() bool { return h.versions() > before })
				switch how {
				case "connection":
					_ = conn.Close()
				case "cancel":
					cancel()
				}
				if err := <-done; err == nil {
					t.Error("the write was answered before it was visible")
				}
				eventually(t, "nothing waits", func() bool {
					requests, _, _ := h.admission.inflight()
					return requests == 0 && h.counters.streams.Load() == 0
				})
				release()
				if got := h.get(t, "k"); string(got.Value) != "v" {
					t.Errorf("the write that was executed is lost: %v", got)
				}
				if h.get(t, "never").Found {
					t.Error("a request of a pipeline that has ended was executed")
				}
			})
		}
	}
}

// TestDrainWaitsForAsyncAnswers: an ASYNC write that waits in its place when the server begins to drain
// is answered, and is there after the next start. A request after it in the pipeline is there only if it was answered. It is
// never executed by the direct transport; grpc-go may have executed it before the drain began.
func TestDrainWaitsForAsyncAnswers(t *testing.T) {
	h := mustStart(t)
	stream := h.pipeline(t, testContext(t))
	mustSend(t, stream, getRequest(0, "warm"))
	mustRecv(t, stream)
	release := h.heldNeighbour(t)
	before := h.versions()
	unary := make(chan error, 1)
	go func() {
		_, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("unary"), Value: []byte("v"), Durability: async})
		unary <- err
	}()
	mustSend(t, stream, putRequest(1, "pipelined", "v", async))
	eventually(t, "both writes wait", func() bool { return h.versions() > before+1 })
	mustSend(t, stream, putRequest(2, "later", "v", async))
	stopped := make(chan error, 1)
	go func() { stopped <- h.stop() }()
	eventually(t, "the server drains", h.drain.active.Load)
	quiet(t, "the server stopped", stopped)
	release()
	answered := map[uint64]bool{}
	for {
		got, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			failureOf(t, err).want(t, codes.Unavailable, pb.ErrorReason_ERROR_REASON_SHUTTING_DOWN)
			break
		}
		if answered[got.Id] = true; got.GetPut() == nil {
			t.Errorf("the pipeline answers %v", got)
		}
	}
	if !answered[1] {
		t.Error("the write that waited was not answered")
	}
	if answered[2] && h.config.Transport == config.TransportDirect {
		t.Error("a request was executed in the drain")
	}
	if err := <-unary; err != nil {
		t.Error(err)
	}
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	again := mustStartOn(t, h.disk)
	for key, want := range map[string]bool{"unary": true, "pipelined": true, "later": answered[2]} {
		if got := again.get(t, key).Found; got != want {
			t.Errorf("%s: found %v, want %v", key, got, want)
		}
	}
}

// TestAnAsyncWriteOfABrokenPipelineHasItsLine: its receiver waits for a neighbour when the client goes away.
func TestAnAsyncWriteOfABrokenPipelineHasItsLine(t *testing.T) {
	h, lines := startAudited(t, withBlockingAudit)
	release := h.heldNeighbour(t)
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	stream := h.pipeline(t, ctx)
	before := h.versions()
	mustSend(t, stream, putRequest(1, "sync", "v", pb.Durability_DURABILITY_SYNC), putRequest(2, "async", "v", async))
	eventually(t, "both are written", func() bool { return h.versions() >= before+2 })
	cancel()
	eventually(t, "the stream has ended", func() bool { return h.counters.streams.Load() == 0 })
	release()
	wantOneLineEach(t, lines(), "sync", "async")
}
