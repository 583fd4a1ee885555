package server

import (
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "epochkv/api/proto/epochkv/v1"
	"epochkv/internal/config"
)

// frame is an HTTP/2 frame.
func frame(kind, flags byte, stream uint32, payload []byte) []byte {
	n := len(payload)
	b := binary.BigEndian.AppendUint32([]byte{byte(n >> 16), byte(n >> 8), byte(n), kind, flags}, stream)
	return append(b, payload...)
}

// prefixed is a gRPC message of so many bytes.
func prefixed(size int) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(size)), make([]byte, size)...)
}

// TestHalfSentMessagesAreReservedByTheirLength: from the prefix on a message counts what is still to come, however its frames and the reads are
// cut, until it is complete, reset or its connection ends.
func TestHalfSentMessagesAreReservedByTheirLength(t *testing.T) {
	const size = 200 << 10
	r := &receiving{limit: 1 << 20}
	in := newInbound(r)
	feed := func(b []byte) {
		t.Helper()
		for len(b) > 0 {
			n := min(len(b), 1+rand.IntN(3000))
			if err := in.follow(b[:n:n]); err != nil {
				t.Fatal(err)
			}
			b = b[n:]
		}
	}
	want := func(n int64) {
		t.Helper()
		if got := r.reserved.Load(); got != n || in.reserved != n {
			t.Fatalf("%d bytes are reserved, %d of them by the connection; want %d", got, in.reserved, n)
		}
	}
	feed([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
	feed(frame(4, 0, 0, make([]byte, 18))) // SETTINGS
	m := prefixed(size)
	feed(frame(frameData, 0, 1, m[:3]))
	want(0)
	feed(frame(frameData, 0, 1, m[3:1005]))
	want(size - 1000)
	feed(frame(frameData, 0, 3, append(prefixed(100), m[:5]...))) // a small one and a large one
	want(2*size - 1000)
	feed(frame(frameData, flagPadded, 1, append(append([]byte{9}, m[1005:2005]...), make([]byte, 9)...)))
	want(2*size - 2000)
	feed(frame(frameReset, 0, 3, make([]byte, 4)))
	want(size - 2000)
	feed(frame(frameData, flagEndStream, 1, m[2005:]))
	want(0)
	feed(frame(frameData, 0, 5, m[:5]))
	feed(frame(frameData, 0, 7, m[:5]))
	want(2 * size)
	in.end()
	want(0)
}

// TestMessagesBeyondTheShareAreGivenAnImpossibleLength: and those after them are followed all the same.
func TestMessagesBeyondTheShareAreGivenAnImpossibleLength(t *testing.T) {
	const size = 200 << 10
	r := &receiving{limit: 500 << 10}
	one, other := newInbound(r), newInbound(r)
	one.skip, other.skip = 0, 0
	m := prefixed(size)
	start := func(in *inbound, stream uint32) (admitted bool) {
		t.Helper()
		b := frame(frameData, 0, stream, m[:10])
		if err := in.follow(b); err != nil {
			t.Fatal(err)
		}
		return b[frameHeaderBytes+1] == 0
	}
	if !start(one, 1) {
		t.Error("the first was refused")
	}
	if start(one, 3) {
		t.Error("one connection got more than half")
	}
	if !start(other, 1) {
		t.Error("another connection was refused")
	}
	third := newInbound(r)
	third.skip = 0
	if start(third, 1) || r.refused.Load() != 2 {
		t.Error("admitted beyond the limit")
	}
	for _, in := range []*inbound{one, other} {
		if err := in.follow(frame(frameData, 0, 1, m[10:])); err != nil {
			t.Fatal(err)
		}
	}
	if r.reserved.Load() != 0 || !start(third, 3) {
		t.Error("what was complete is still reserved")
	}
}

// TestManyLargeMessagesAtOnceAreReceivedInTheirShare: batches that come all at once are received a few at a time; the others are told to try
// again, their connections go on, and small requests are served meanwhile.
func TestManyLargeMessagesAtOnceAreReceivedInTheirShare(t *testing.T) {
	h := mustStart(t, func(c *config.Config) {
		c.Limits.InflightBytes, c.Limits.BatchSize, c.Limits.ValueSize = 32*config.MiB, 8*config.MiB, 8*config.MiB
	})
	var most atomic.Int64
	stop := make(chan struct{})
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		for {
			select {
			case <-stop:
				return
			case <-time.After(100 * time.Microsecond):
				most.Store(max(most.Load(), h.receiving.reserved.Load()))
			}
		}
	}()
	var done sync.WaitGroup
	var accepted, refused atomic.Int64
	conns := []*grpc.ClientConn{h.conn, h.dial(t), h.dial(t), h.dial(t)}
	value := make([]byte, 6<<20)
	for i := range 24 {
		done.Go(func() {
			_, err := pb.NewKVClient(conns[i%4]).Put(testContext(t), &pb.PutRequest{Key: []byte{byte(i)}, Value: value, Durability: pb.Durability_DURABILITY_ASYNC})
			switch status.Code(err) {
			case codes.OK:
				accepted.Add(1)
			case codes.ResourceExhausted:
				refused.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	done.Wait()
	close(stop)
	<-watching
	t.Logf("%d accepted, %d refused, at most %d KiB reserved", accepted.Load(), refused.Load(), most.Load()>>10)
	if accepted.Load() == 0 || h.receiving.refused.Load() == 0 {
		t.Error("nothing was accepted, or nothing refused")
	}
	if limit := h.receiving.limit; most.Load() > limit {
		t.Errorf("%d bytes were being received, more than %d", most.Load(), limit)
	}
	for _, conn := range conns {
		if _, err := pb.NewKVClient(conn).Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Value: value, Durability: pb.Durability_DURABILITY_ASYNC}); err != nil {
			t.Errorf("a connection that was refused something does not go on: %v", err)
		}
	}
	eventually(t, "nothing is reserved", func() bool { return h.receiving.reserved.Load() == 0 })
}
