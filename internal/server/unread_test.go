package server

import (
	"context"
	"fmt"
	"net"
	"runtime"
	"runtime/debug"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/transport"
	"github.com/epochkv/epochkv/internal/vfs"
)

const unreadTimeout = 400 * time.Millisecond

// mustStartUnread is a server whose share of answers is smaller than two answers of 4 MiB.
func mustStartUnread(t *testing.T, timeout time.Duration) *harness {
	t.Helper()
	h := mustStart(t, func(c *config.Config) {
		c.MessageTimeout, c.Limits.InflightBytes = timeout, 24*config.MiB
		c.Limits.BatchSize, c.Limits.ValueSize = 8*config.MiB, 8*config.MiB
	})
	h.putLarge(t, 1, 4<<20)
	return h
}

var getLarge = &pb.GetRequest{Key: []byte("large/000")}

// TestANewConnectionHasItsTimeToTakeAnswers: its time begins with it, however long the server has been running.
func TestANewConnectionHasItsTimeToTakeAnswers(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Transport, c.MessageTimeout = config.TransportGRPC, time.Hour })
	h.put(t, "k", string(make([]byte, progressBytes/2)))
	h.receiving.step.Add(10 * stallSteps)
	ask(testContext(t), t, h.dialDeaf(t), "Get", &pb.GetRequest{Key: []byte("k")})
	check := func() (waiting, stuck bool) {
		h.connections.mu.Lock()
		defer h.connections.mu.Unlock()
		for conn := range h.connections.all {
			if conn.info.waitingBytes() > 0 {
				_, stuck = conn.checkUnread()
				return true, stuck
			}
		}
		return false, false
	}
	eventually(t, "an answer that waits", func() bool {
		waiting, stuck := check()
		if stuck {
			t.Fatal("a new connection is closed at the first check")
		}
		return waiting
	})
	h.receiving.step.Add(stallSteps + 2)
	if waiting, stuck := check(); !waiting || !stuck {
		t.Error("a connection that takes nothing for its time is not closed")
	}
}

// TestUnreadAnswersEndTheirConnection: a client that takes nothing of its answers, by flow control or
// by not reading at all, loses its connection after --message-timeout although it sends pings. Until
// then large reads of other clients may be refused; afterwards they succeed.
func TestUnreadAnswersEndTheirConnection(t *testing.T) {
	encoded, err := getLarge.MarshalVT()
	if err != nil {
		t.Fatal(err)
	}
	message := append(prefixed(len(encoded))[:grpcPrefixBytes], encoded...)
	for name, leaveUnread := range map[string]func(context.Context, *harness){
		"windows that do not open": func(ctx context.Context, h *harness) {
			deaf := h.dialDeaf(t)
			for range 8 { // one by one: of two at once, neither may find room
				ask(ctx, t, deaf, "Get", getLarge)
				time.Sleep(5 * time.Millisecond)
			}
		},
		"values in chunks": func(ctx context.Context, h *harness) {
			deaf := h.dialDeaf(t)
			for range 8 {
				ask(ctx, t, deaf, "GetStream", &pb.GetStreamRequest{Key: getLarge.Key})
				time.Sleep(5 * time.Millisecond)
			}
		},
		"socket that is not read": func(_ context.Context, h *harness) {
			c := h.dialRaw(t)
			settings := []byte{0, 4, 0x7f, 0xff, 0xff, 0xff} // streams are never blocked
			c.send(frame(4, 0, 0, settings))
			c.send(windowOf(0, 1<<30))
			_ = c.Conn.(*net.TCPConn).SetReadBuffer(64 << 10) //nolint:forcetypeassert // dialRaw dials TCP
			for i := range uint32(40) {                       // the first answers go into the buffers of the kernel
				request := frame(frameHeaders, flagEndHeaders, 2*i+1, requestHeaders(pb.KVService_Get_FullMethodName, "60S"))
				if _, err := c.Write(append(request, frame(frameData, flagEndStream, 2*i+1, message)...)); err != nil {
					return // on a busy machine the connection ends before
				}
				time.Sleep(5 * time.Millisecond)
			}
			_, _ = c.Write(frame(6, 0, 0, make([]byte, 8))) // PING
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := mustStartUnread(t, unreadTimeout)
			ctx, cancel := context.WithCancel(testContext(t))
			defer cancel()
			leaveUnread(ctx, h)
			eventually(t, "large reads of others are refused", func() bool { // or it is over on a busy machine
				_, err := h.kv.Get(ctx, getLarge)
				return status.Code(err) == codes.ResourceExhausted || h.connections.violations[transport.ViolationUnread].Load() == 1
			})
			if _, err := h.kv.Get(ctx, &pb.GetRequest{Key: []byte("none")}); err != nil {
				t.Errorf("a small read: %v", err)
			}
			began := time.Now()
			eventually(t, "the connection is closed", func() bool { return h.connections.violations[transport.ViolationUnread].Load() == 1 })
			t.Logf("closed after %v", time.Since(began))
			eventually(t, "large reads succeed", func() bool {
				_, err := h.kv.Get(ctx, getLarge)
				return err == nil
			})
			for range 10 {
				ended := h.connections.violations[transport.ViolationUnread].Load()
				_, err := h.kv.Get(ctx, getLarge)
				if late := h.connections.violations[transport.ViolationUnread].Load() - ended; err != nil && late == 0 { // else this client, too, was too slow
					t.Error(err)
				}
			}
		})
	}
}

// TestAnswersThatTheClientDoesNotHoldBackEndNoConnection: answers that wait for the disk, buffers of
// cancelled streams that gRPC has lost, and answers that the client takes slowly are not stuck.
func TestAnswersThatTheClientDoesNotHoldBackEndNoConnection(t *testing.T) {
	inTimeOf(t, unreadTimeout, func(timeout time.Duration) error { return slowAnswersEndNoConnection(t, timeout) })
}

// slowAnswersEndNoConnection returns an error if a connection was closed, or lost buffers were not looked for: on a busy machine the client that
// reads slowly may be too slow, and the server may not have come to its checks.
func slowAnswersEndNoConnection(t *testing.T, timeout time.Duration) error {
	h := mustStartUnread(t, timeout)
	slow, err := h.dialDeaf(t).NewStream(testContext(t), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, pb.KVService_Pipeline_FullMethodName)
	if err != nil {
		t.Fatal(err)
	}
	const slowAnswers = 30
	h.putValue(t, "medium", 100<<10)
	for i := range uint64(slowAnswers) {
		if err := slow.SendMsg(getRequest(i, "medium")); err != nil {
			return fmt.Errorf("a client that has read nothing yet: %w", err)
		}
	}

	stuck := h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Delay: 4 * timeout})
	defer stuck.Remove()
	held := make(chan error, 2)
	waiting := h.dial(t)
	go func() {
		_, err := pb.NewKVServiceClient(waiting).Put(testContext(t), &pb.PutRequest{Key: []byte("held"), Value: make([]byte, 100<<10)})
		held <- err
	}()
	eventually(t, "the value is visible", func() bool { return h.store.Visible() > h.store.Durable() })
	go func() {
		_, err := pb.NewKVServiceClient(waiting).Get(testContext(t), &pb.GetRequest{Key: []byte("held")})
		held <- err
	}()
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // from here on only the server looks for lost buffers
	runtime.GC()
	h.connections.mu.Lock()
	for conn := range h.connections.all {
		lost, err := h.admission.charge(conn.info, 1<<20, true)
		if err != nil {
			t.Fatal(err)
		}
		lost.of(new(pb.GetResponse))
	}
	h.connections.mu.Unlock()
	for end := time.Now().Add(4 * timeout); time.Now().Before(end); time.Sleep(timeout / 6) {
		if err := slow.RecvMsg(new(pb.PipelineResponse)); err != nil {
			return fmt.Errorf("a client that reads slowly: %w", err)
		}
	}
	for range 2 {
		if err := <-held; err != nil {
			return fmt.Errorf("an answer that waits for the disk: %w", err)
		}
	}
	if n := h.connections.violations[transport.ViolationUnread].Load(); n != 0 {
		return fmt.Errorf("%d connections were closed", n)
	}
	if _, _, answers := h.admission.inflight(); answers >= 1<<20 {
		return fmt.Errorf("%d bytes are counted: lost buffers were not looked for", answers)
	}
	return nil
}

func (h *harness) putValue(t *testing.T, key string, size int) {
	t.Helper()
	if _, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte(key), Value: make([]byte, size)}); err != nil {
		t.Fatal(err)
	}
}
