package server

import (
	"encoding/binary"
	"math/rand/v2"
	"net"
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
	for _, stream := range []uint32{1, 3, 5, 7} {
		feed(frame(frameHeaders, 4, stream, make([]byte, 30)))
	}
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
	one.received.skip, other.received.skip = 0, 0
	m := prefixed(size)
	start := func(in *inbound, stream uint32) (admitted bool) {
		t.Helper()
		if err := in.follow(frame(frameHeaders, 4, stream, nil)); err != nil {
			t.Fatal(err)
		}
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
	third.received.skip = 0
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

// rawClient speaks HTTP/2 by itself: it does only what it is told to.
type rawClient struct {
	net.Conn
	t      testing.TB
	frames frames
}

func (h *harness) dialRaw(t testing.TB) *rawClient {
	t.Helper()
	conn, err := net.Dial("tcp", h.Address())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	c := &rawClient{Conn: conn, t: t}
	c.send([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
	c.send(frame(4, 0, 0, nil))
	return c
}

func (c *rawClient) send(b []byte) {
	c.t.Helper()
	if _, err := c.Write(b); err != nil {
		c.t.Fatal(err)
	}
}

// begin opens a stream with a deadline.
func (c *rawClient) begin(stream uint32, method, timeout string) {
	c.t.Helper()
	var block []byte
	for _, s := range []string{
		":method", "POST", ":scheme", "http", ":path", method, ":authority", "test", "content-type", "application/grpc",
		"te", "trailers", "grpc-timeout", timeout,
	} {
		if s[0] == ':' && len(s) > 1 || s == "content-type" || s == "te" || s == "grpc-timeout" {
			block = append(block, 0) // a literal field that is not indexed
		}
		block = append(append(block, byte(len(s))), s...)
	}
	c.send(frame(frameHeaders, 4, stream, block))
}

// awaitEnd reads until the server has ended the stream.
func (c *rawClient) awaitEnd(stream uint32) {
	c.t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	b := make([]byte, 1)
	for {
		if _, err := c.Read(b); err != nil {
			c.t.Fatal(err)
		}
		if _, begins := c.frames.next(b); !begins {
			continue
		}
		f := &c.frames
		f.skip = f.length()
		if f.stream() == stream && (f.kind() == frameReset || f.flags()&flagEndStream != 0) {
			return
		}
	}
}

// TestMessagesOfStreamsThatTheServerEndsAreForgotten: a client need not reset a stream that the server has ended, and what it did not send of a
// message is not reserved any more; nor is what was on its way then.
func TestMessagesOfStreamsThatTheServerEndsAreForgotten(t *testing.T) {
	h := mustStart(t)
	c := h.dialRaw(t)
	m := prefixed(200 << 10)
	c.begin(1, "/epochkv.v1.KV/Put", "100m")
	c.send(frame(frameData, 0, 1, m[:1000]))
	eventually(t, "the message is being received", func() bool { return h.receiving.reserved.Load() > 0 })
	c.awaitEnd(1)
	eventually(t, "nothing is reserved", func() bool { return h.receiving.reserved.Load() == 0 })
	c.begin(3, "/epochkv.v1.KV/None", "10S")
	c.awaitEnd(3)
	c.send(frame(frameData, 0, 3, m[:1000]))
	c.send(frame(6, 0, 0, make([]byte, 8))) // PING
	c.begin(5, "/epochkv.v1.KV/None", "10S")
	c.awaitEnd(5)
	if n := h.receiving.reserved.Load(); n != 0 {
		t.Errorf("%d bytes of a stream that the server has ended are reserved", n)
	}
}

// TestInboundAgreesWithAModel: whatever is sent, in frames cut and padded anywhere, read in pieces of any size, with streams ended by either side
// at any moment, what is reserved is what is to come of the large messages of open streams.
func TestInboundAgreesWithAModel(t *testing.T) {
	type stream struct {
		data []byte // to be sent
		sent int
		ends []int // of its messages in data
		size []int // of each of them, without prefix
	}
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 1))
		r := &receiving{limit: 1 << 40}
		in := newInbound(r)
		model := map[uint32]*stream{}
		next := uint32(1)
		reserved := func() (n int64) {
			for _, s := range model {
				for i, end := range s.ends {
					if begin := end - s.size[i] - grpcPrefixBytes; s.size[i] >= receivedBytesMin && s.sent >= begin+grpcPrefixBytes && s.sent < end {
						n += int64(end - s.sent)
					}
				}
			}
			return n
		}
		feed := func(b []byte) {
			for len(b) > 0 {
				n := min(len(b), 1+random.IntN(1+random.IntN(40_000)))
				if err := in.follow(b[:n:n]); err != nil {
					t.Fatal(err)
				}
				b = b[n:]
			}
		}
		feed([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
		for step := range 60 {
			var id uint32
			for id = range model {
				break
			}
			s := model[id]
			switch what := random.IntN(12); {
			case s == nil || what == 0:
				s = new(stream)
				for range 1 + random.IntN(4) {
					size := []int{0, 1, 100, receivedBytesMin - 1, receivedBytesMin, 100_000}[random.IntN(6)]
					s.data = append(s.data, prefixed(size)...)
					s.ends, s.size = append(s.ends, len(s.data)), append(s.size, size)
				}
				feed(frame(frameHeaders, 0, next, make([]byte, random.IntN(50))))
				feed(frame(9, 4, next, make([]byte, random.IntN(50)))) // CONTINUATION
				model[next] = s
				next += 2
			case what == 1: // the client resets
				feed(frame(frameReset, 0, id, make([]byte, 4)))
				delete(model, id)
			case what == 2: // the server ends
				b := append(frame(frameData, 0, id, make([]byte, random.IntN(20))), frame(frameHeaders, 5, id, make([]byte, random.IntN(20)))...)
				for len(b) > 0 {
					n := 1 + random.IntN(len(b))
					in.answered(b[:n])
					b = b[n:]
				}
				delete(model, id)
			case what == 3: // trailers of the client
				feed(frame(frameHeaders, 5, id, make([]byte, 10)))
				delete(model, id)
			default:
				part := s.data[s.sent:min(len(s.data), s.sent+random.IntN(1+random.IntN(70_000)))]
				flags, payload := byte(0), part
				if random.IntN(3) == 0 {
					pad := random.IntN(256)
					flags, payload = flagPadded, append(append([]byte{byte(pad)}, part...), make([]byte, pad)...)
				}
				if random.IntN(10) == 0 {
					flags |= flagEndStream
				}
				b := frame(frameData, flags, id, payload)
				if random.IntN(6) == 0 { // the server ends within the frame, whose rest comes all the same
					n := random.IntN(len(b))
					feed(b[:n])
					in.answered(frame(frameReset, 0, id, make([]byte, 4)))
					feed(b[n:])
					delete(model, id)
					break
				}
				feed(b)
				if s.sent += len(part); flags&flagEndStream != 0 {
					delete(model, id)
				}
			}
			if got, want := r.reserved.Load(), reserved(); got != want || in.reserved != want || len(in.open) != len(model) {
				t.Fatalf("seed %d, step %d: %d bytes are reserved, %d of them by the connection, in %d streams; want %d in %d", seed, step, got, in.reserved, len(in.open), want, len(model))
			}
		}
		if in.end(); r.reserved.Load() != 0 || in.reserved != 0 || len(in.open) != 0 {
			t.Fatalf("seed %d: %d bytes are reserved by a closed connection", seed, r.reserved.Load())
		}
	}
}
