package transport

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// slowConn takes so long to write that handlers have made something else meanwhile.
type slowConn struct{ net.Conn }

func (c slowConn) Write(p []byte) (int, error) {
	time.Sleep(100 * time.Microsecond)
	return c.Conn.Write(p)
}

// writesSlowly lets a connection write slowly.
func (c *Conn) writesSlowly(t *testing.T) {
	eventually(t, "the connection writes nothing", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.out.flushing {
			return false
		}
		c.raw = slowConn{c.raw}
		return true
	})
}

// TestStreamsThatAlwaysSendHoldUpNoOther: neither the reader nor a handler goes on writing what other
// streams add meanwhile, which has no end if the client's windows are large.
func TestStreamsThatAlwaysSendHoldUpNoOther(t *testing.T) {
	const senders = 3
	var sent [senders]atomic.Int64
	var begun atomic.Int64
	services := testServices()
	services.RegisterService(&grpc.ServiceDesc{ServiceName: "always", Streams: []grpc.StreamDesc{{
		StreamName: "Send", ServerStreams: true, ClientStreams: true,
		Handler: func(_ any, stream grpc.ServerStream) error {
			count := &sent[begun.Add(1)-1]
			for m := raw(make([]byte, 16<<10)); ; count.Add(1) {
				if err := stream.SendMsg(m); err != nil {
					return err
				}
			}
		},
	}}}, nil)
	allGoOn := func(t *testing.T) {
		eventually(t, "all handlers go on", func() bool {
			for i := range sent {
				if sent[i].Load() < 100 {
					return false
				}
			}
			return true
		})
	}
	begin := func(t *testing.T, window uint32) (*peer, *Conn) {
		begun.Store(0)
		for i := range sent {
			sent[i].Store(0)
		}
		_, server, address := startWith(t, services)
		p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: window})
		_ = p.framer.WriteWindowUpdate(0, windowMax-firstWindow)
		c := onlyConn(t, server)
		c.writesSlowly(t)
		for i := range uint32(senders) {
			p.open(2*i+1, "/always/Send")
		}
		return p, c
	}
	t.Run("handlers", func(t *testing.T) {
		p, _ := begin(t, windowMax)
		go func() { _, _ = io.Copy(io.Discard, p.Conn) }()
		allGoOn(t)
	})
	t.Run("reader", func(t *testing.T) {
		p, c := begin(t, 0)
		eventually(t, "the handlers wait for their windows", func() bool {
			c.mu.Lock()
			defer c.mu.Unlock()
			for i := range uint32(senders) {
				if s := c.streams[2*i+1]; s == nil || s.pending.bytes < callPendingMax {
					return false
				}
			}
			return true
		})
		_ = p.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: windowMax})
		for i := range uint32(20) { // the reader may write now, and must read on
			p.request(101+2*i, pathEcho, 1)
			if st, _ := p.outcome(101 + 2*i); st != "0" {
				t.Fatalf("status %s", st)
			}
		}
		go func() { _, _ = io.Copy(io.Discard, p.Conn) }()
		allGoOn(t)
	})
}

// TestViolationEndsAConnectionWhoseStreamsAlwaysSend: and the connection's cause is the violation.
func TestViolationEndsAConnectionWhoseStreamsAlwaysSend(t *testing.T) {
	_, server, address := start(t)
	p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: windowMax})
	_ = p.framer.WriteWindowUpdate(0, windowMax-firstWindow)
	c := onlyConn(t, server)
	c.writesSlowly(t)
	for i := range uint32(3) {
		p.open(2*i+1, pathEndless)
	}
	_ = p.framer.WriteData(0, false, nil)
	if code, sent := p.goneAway(); code != http2.ErrCodeProtocol || !sent {
		t.Errorf("GOAWAY %v, sent %v", code, sent)
	}
	eventually(t, "the connection has ended", func() bool { return server.onlyConn() == nil })
	if kind, ok := ViolationOf(c.cause); !ok || kind != ViolationProtocol {
		t.Errorf("the connection has ended for %v", c.cause)
	}
}

// TestResetStreamsGiveTheirWindowBack: also while their handlers have not returned, which could stop
// the other streams of the connection.
func TestResetStreamsGiveTheirWindowBack(t *testing.T) {
	release := make(chan struct{})
	let := sync.OnceFunc(func() { close(release) })
	services := testServices()
	services.RegisterService(&grpc.ServiceDesc{ServiceName: "busy", Streams: []grpc.StreamDesc{{
		StreamName: "Wait", ServerStreams: true, ClientStreams: true,
		Handler: func(_ any, stream grpc.ServerStream) error {
			err := stream.RecvMsg(new(raw))
			<-release
			return errors.Join(err, context.Canceled)
		},
	}}}, nil)
	s, server, address := startWith(t, services)
	t.Cleanup(let) // before the server is closed
	p := dial(t, address)
	p.open(1, "/busy/Wait")
	_ = p.framer.WriteData(1, false, prefixed(receivedBytesMin))
	for range 3 {
		_ = p.framer.WriteData(1, false, prefixed(10_000))
	}
	c := onlyConn(t, server)
	eventually(t, "the handler has a message", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.callMessages == 1
	})
	_ = p.framer.WriteRSTStream(1, http2.ErrCodeCancel)
	eventually(t, "the client may send as much as before", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.streams) == 0 && c.connWindow+c.untaken == testOptions().ConnWindow
	})
	if n := s.received.Load(); n != receivedBytesMin {
		t.Errorf("%d bytes count of the message that the handler has", n)
	}
	let()
	eventually(t, "the handler has returned", func() bool { return s.streams.Load() == 0 })
}

// TestStatusOfAFailedCallArrives: messages that were sent before are not cut off by the status, from
// which clients of gRPC would make another one.
func TestStatusOfAFailedCallArrives(t *testing.T) {
	const size = 200 << 10 // more than the windows
	services := testServices()
	returned := make(chan error, 1)
	services.RegisterService(&grpc.ServiceDesc{ServiceName: "fails", Streams: []grpc.StreamDesc{{
		StreamName: "Later", ServerStreams: true, ClientStreams: true,
		Handler: func(_ any, stream grpc.ServerStream) error {
			err := errors.Join(stream.RecvMsg(new(raw)), stream.SendMsg(raw(make([]byte, size))))
			if err == nil {
				err = stream.RecvMsg(new(raw))
			}
			if stream.RecvMsg(new(raw)) == nil || stream.SendMsg(raw("more")) == nil || stream.Context().Err() == nil {
				err = errors.New("a call that has failed goes on")
			}
			returned <- err
			return status.Error(codes.Unknown, "dropped")
		},
	}}}, nil)
	s, _, address := startWith(t, services)
	stream, _ := chat(t, dialCalls(t, address), "/fails/Later")
	if err := stream.SendMsg(raw("small")); err != nil {
		t.Fatal(err)
	}
	s.refuse.Store(true)
	if err := stream.SendMsg(raw(make([]byte, receivedBytesMin))); err != nil {
		t.Fatal(err)
	}
	if err := <-returned; status.Code(err) != codes.ResourceExhausted {
		t.Errorf("the handler got %v", err)
	}
	var m raw
	if err := stream.RecvMsg(&m); err != nil || len(m) != size {
		t.Errorf("%d bytes: %v", len(m), err)
	}
	if err := stream.RecvMsg(&m); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("the client got %v", err)
	}
	eventually(t, "the stream has ended", func() bool { return s.streams.Load() == 0 })
}
