package server

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
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

func (r *receiving) reserved() int64 { return r.large.reserved.Load() + r.small.reserved.Load() }

func newReceiving(inflight int64) *receiving {
	r := new(receiving)
	r.init(inflight, 1<<20, 64<<20)
	return r
}

// newFollowed is a connection in which streams 1 to 19 are open.
func newFollowed(t *testing.T, r *receiving) *inbound {
	t.Helper()
	return newFollowedOf(t, r, "client")
}

// newFollowedOf is newFollowed of a client.
func newFollowedOf(t *testing.T, r *receiving, client string) *inbound {
	t.Helper()
	in := newInbound(r, r.clients.enter(client))
	in.received.skip = 0
	for stream := uint32(1); stream < 20; stream += 2 {
		if err := in.follow(frame(frameHeaders, 4, stream, make([]byte, 30))); err != nil {
			t.Fatal(err)
		}
	}
	return in
}

// windowOf is a frame that widens a stream's window.
func windowOf(stream uint32, increment int) []byte {
	return frame(frameWindow, 0, stream, binary.BigEndian.AppendUint32(nil, uint32(increment)))
}

// TestMessagesCountUntilTheyAreTaken: from the prefix on a message counts with the length that it
// declares, however its frames and the reads are cut, until the server has answered it, it is
// reset, or its connection ends.
func TestMessagesCountUntilTheyAreTaken(t *testing.T) {
	const size, small = 200 << 10, 60 << 10
	r := newReceiving(4 << 20)
	in := newFollowed(t, r)
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
		if got := r.reserved(); got != n || in.large+in.small != n {
			t.Fatalf("%d bytes are reserved, %d of them by the connection; want %d", got, in.large+in.small, n)
		}
	}
	m := prefixed(size)
	feed(frame(frameData, 0, 1, m[:3]))
	want(0)
	feed(frame(frameData, 0, 1, m[3:1005]))
	want(size)
	feed(frame(frameData, 0, 3, append(prefixed(100), m[:500]...))) // a small one and a large one
	want(2 * size)
	feed(frame(frameData, flagPadded, 1, append(append([]byte{9}, m[1005:2005]...), make([]byte, 9)...)))
	in.answered(frame(frameHeaders, 0, 1, nil)) // headers before the message is complete
	want(2 * size)
	feed(frame(frameReset, 0, 3, make([]byte, 4)))
	want(size)
	feed(frame(frameData, flagEndStream, 1, m[2005:]))
	want(size) // complete, but not decoded
	in.answered(frame(frameData, 0, 1, nil))
	want(size) // a part of an answer to a message before
	in.took(1, size)
	want(size)
	in.answered(frame(frameData, 0, 1, nil))
	want(0)
	half := prefixed(small)
	feed(frame(frameData, 0, 5, half[:600]))
	want(small + grpcPrefixBytes) // with all that it declares
	feed(frame(frameData, 0, 5, half[600:]))
	want(small + grpcPrefixBytes) // complete, but not decoded
	in.answered(append(windowOf(5, 1<<20), frame(frameData, 0, 5, nil)...))
	want(small + grpcPrefixBytes)
	feed(frame(frameData, 0, 7, m[:1000]))
	want(small + grpcPrefixBytes + size)
	in.answered(frame(frameReset, 0, 5, make([]byte, 4)))
	want(size)
	in.end()
	want(0)
}

// TestSmallMessagesThatWaitCount: a stream that is not served holds a window of small messages,
// which count together; one too many is refused, and with it its stream. What the server takes does not count.
// That it has answered, or has widened windows, says nothing about that.
func TestSmallMessagesThatWaitCount(t *testing.T) {
	const size, limit = 1 << 10, 400 << 10
	r := newReceiving(2 * limit)
	in := newFollowed(t, r)
	send := func(stream uint32) (refused bool) {
		t.Helper()
		b := frame(frameData, 0, stream, prefixed(size))
		if err := in.follow(b); err != nil {
			t.Fatal(err)
		}
		return b[frameHeaderBytes+1] != 0
	}
	for i := range 5000 {
		if send(1) || send(3) {
			t.Fatal("a stream that is served was refused")
		}
		if i%50 == 0 {
			for range 50 {
				in.took(1, size)
				in.took(3, size)
			}
		}
	}
	for range 49 {
		in.took(1, size)
		in.took(3, size)
	}
	if n := r.reserved(); n != 0 {
		t.Errorf("%d bytes are reserved after everything was taken", n)
	}
	n := 0
	for !send(uint32(5 + n%2*2)) {
		n++
	}
	before := in.small
	if in.answered(append(windowOf(5, 1<<20), frame(frameData, 0, 5, nil)...)); in.small != before {
		t.Error("an answer, or a window, took messages")
	}
	if n < 150 || n > 250 {
		t.Errorf("message %d was refused; half of the limit is 200", n)
	}
	if in.end(); r.reserved() != 0 {
		t.Errorf("%d bytes are reserved at the end", r.reserved())
	}
}

// TestMessagesInSmallFramesEndTheirConnection: small frames count more than their payload, which a
// message that has been admitted cannot hide.
func TestMessagesInSmallFramesEndTheirConnection(t *testing.T) {
	for _, size := range []int{1, smallFrameBytes} {
		r := newReceiving(4 << 20)
		in := newFollowed(t, r)
		m, frames := prefixed(500<<10), 0
		err := in.follow(frame(frameData, 0, 1, m[:5]))
		for m = m[5:]; err == nil && len(m) > size; m = m[size:] {
			err = in.follow(frame(frameData, 0, 1, m[:size]))
			frames++
		}
		if size == 1 && (!errors.Is(err, errSmallFrames) || int64(frames)*frameOverhead > r.small.limit/2+2*smallFramesMax) || size > 1 && err != nil {
			t.Errorf("after %d frames of %d bytes: %v", frames, size, err)
		}
		if in.end(); r.reserved() != 0 {
			t.Errorf("%d bytes are reserved at the end", r.reserved())
		}
	}
}

// TestARefusedMessageInSmallFramesEndsItsRequestOnly: some clients send the prefix of a message alone.
func TestARefusedMessageInSmallFramesEndsItsRequestOnly(t *testing.T) {
	r := newReceiving(4 << 20)
	r.small.limit = 1
	r.small.reserved.Add(1) // others have all of it
	in, m := newFollowed(t, r), prefixed(smallFramesMax+1)
	first := frame(frameData, 0, 1, m[:grpcPrefixBytes])
	if err := in.follow(first); err != nil || first[frameHeaderBytes+1] != 0xff {
		t.Fatalf("%v, %x", err, first)
	}
	if err := in.follow(frame(frameData, 0, 3, prefixed(1))); err != nil {
		t.Error(err)
	}
}

// TestMessagesAboveTheShareAreGivenAnImpossibleLength: and those after them are followed all the
// same.
func TestMessagesAboveTheShareAreGivenAnImpossibleLength(t *testing.T) {
	for _, size := range []int{60 << 10, 200 << 10} {
		limit := int64(size)*3 + 64
		r := newReceiving(1)
		r.large.limit, r.small.limit = limit, limit
		r.beside.take(r, nil, 1) // so that what finds no room in the share is refused
		one, other, third := newFollowed(t, r), newFollowedOf(t, r, "other"), newFollowedOf(t, r, "third")
		m := prefixed(size)
		start := func(in *inbound, stream uint32) (admitted bool) {
			t.Helper()
			b := frame(frameData, 0, stream, m[:1000])
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
		if start(third, 1) || r.refused.Load() != 2 {
			t.Error("admitted beyond the limit")
		}
		for _, in := range []*inbound{one, other} {
			if err := in.follow(frame(frameData, 0, 1, m[1000:])); err != nil {
				t.Fatal(err)
			}
		}
		if start(third, 3) {
			t.Error("what is not decoded was not reserved")
		}
		for _, in := range []*inbound{one, other} {
			in.took(1, int64(size))
			in.answered(frame(frameData, 0, 1, nil))
		}
		if r.reserved() != 0 || !start(third, 5) {
			t.Errorf("%d bytes of what was answered are still reserved", r.reserved())
		}
	}
}

// TestManyLargeMessagesAtOnceAreReceivedInTheirShare: batches that come all at once are received a
// few at a time; the others are told to try again, their connections go on, and small requests are
// served meanwhile.
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
				most.Store(max(most.Load(), h.receiving.large.reserved.Load()))
			}
		}
	}()
	var done sync.WaitGroup
	var accepted, refused atomic.Int64
	conns := []*grpc.ClientConn{h.conn, h.dial(t), h.dial(t), h.dial(t)}
	value := make([]byte, 6<<20)
	for i := range 24 {
		done.Go(func() {
			_, err := pb.NewKVServiceClient(conns[i%4]).Put(testContext(t), &pb.PutRequest{Key: []byte{byte(i)}, Value: value, Durability: pb.Durability_DURABILITY_ASYNC})
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
	if limit := h.receiving.large.limit; most.Load() > limit {
		t.Errorf("%d bytes were being received, more than %d", most.Load(), limit)
	}
	for _, conn := range conns {
		eventually(t, "a connection that was refused something goes on, in its turn", func() bool {
			_, err := pb.NewKVServiceClient(conn).Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Value: value, Durability: pb.Durability_DURABILITY_ASYNC})
			if err != nil && status.Code(err) != codes.ResourceExhausted {
				t.Fatal(err)
			}
			return err == nil
		})
	}
	eventually(t, "nothing is reserved", func() bool { return h.receiving.reserved() == 0 })
}

// rawClient speaks HTTP/2 by itself: it does only what it is told to.
type rawClient struct {
	net.Conn
	t      testing.TB
	frames frames
	framer *http2.Framer // of reasonOf

	windows map[uint32]int // of sendWhole
}

func (h *harness) dialRaw(t testing.TB) *rawClient {
	t.Helper()
	return h.dialRawFrom(t, "127.0.0.1")
}

// dialRawFrom is dialRaw from another address of this host.
func (h *harness) dialRawFrom(t testing.TB, address string) *rawClient {
	t.Helper()
	from := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	conn, err := from.Dial("tcp", h.Address())
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
	c.send(frame(frameHeaders, flagEndHeaders, stream, requestHeaders(method, timeout)))
}

func requestHeaders(method, timeout string) (block []byte) {
	fields := []string{
		":method", "POST", ":scheme", "http", ":path", method, ":authority", "test", "content-type", "application/grpc",
		"te", "trailers", "grpc-timeout", timeout,
	}
	if *usersFlag {
		fields = append(fields, "authorization", "Bearer "+testUser)
	}
	for i, s := range fields {
		if i%2 == 0 {
			block = append(block, 0) // a literal field that is not indexed
		}
		block = append(append(block, byte(len(s))), s...)
	}
	return block
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

// TestMessagesOfStreamsThatTheServerEndsCountNoLonger: a client need not reset a stream that the
// server has ended, and what it did not send of a message is not reserved any more; nor is what was
// on its way then.
func TestMessagesOfStreamsThatTheServerEndsCountNoLonger(t *testing.T) {
	h := mustStart(t)
	c := h.dialRaw(t)
	m := prefixed(200 << 10)
	c.begin(1, "/epochkv.v1.KVService/Put", "100m")
	c.send(frame(frameData, 0, 1, m[:1000]))
	eventually(t, "the message is being received", func() bool { return h.receiving.reserved() > 0 })
	c.awaitEnd(1)
	eventually(t, "nothing is reserved", func() bool { return h.receiving.reserved() == 0 })
	c.begin(3, "/epochkv.v1.KVService/None", "10S")
	c.awaitEnd(3)
	c.send(frame(frameData, 0, 3, m[:1000]))
	c.send(frame(6, 0, 0, make([]byte, 8))) // PING
	c.begin(5, "/epochkv.v1.KVService/None", "10S")
	c.awaitEnd(5)
	if n := h.receiving.reserved(); n != 0 {
		t.Errorf("%d bytes of a stream that the server has ended are reserved", n)
	}
}

// modelled is a stream as a model of inbound has it: it knows messages and frames, and nothing of
// how they are cut, padded and read.
type modelled struct {
	data   []byte // to be sent
	sent   int
	ends   []int   // of its messages in data
	size   []int   // of each of them, without prefix
	frames []int64 // the cost of small frames that each of them alone has
	took   int     // messages that the server has taken
	closed bool

	large, small, waiting, raw int64
	frame                      int64 // of the largest since raw was zero
}

func newModelled(random *rand.Rand) *modelled {
	s := new(modelled)
	for range 1 + random.IntN(6) {
		size := []int{0, 1, 100, 3000, receivedBytesMin - 1, receivedBytesMin, 100_000}[random.IntN(7)]
		s.data = append(s.data, prefixed(size)...)
		s.ends, s.size, s.frames = append(s.ends, len(s.data)), append(s.size, size), append(s.frames, 0)
	}
	return s
}

func (s *modelled) cost() int64 {
	cost := s.waiting
	for _, n := range s.frames {
		cost += n
	}
	return cost
}

func (s *modelled) reserve() {
	if s.cost()-s.small >= smallStep {
		s.small = s.cost()
	}
}

// receive takes in a frame with the next n bytes and so many of padding.
func (s *modelled) receive(n, padding int) {
	for i, end := range s.ends {
		body := end - s.size[i]
		small, known := s.size[i] < receivedBytesMin, s.sent < body && s.sent+n >= body
		switch {
		case known && small:
			s.waiting, s.raw = s.waiting+s.frames[i]+int64(s.size[i])+grpcPrefixBytes, s.raw+grpcPrefixBytes
			s.frames[i] = 0
			s.reserve()
		case known:
			s.large = max(s.large, int64(s.size[i]))
		}
		if small {
			s.raw += int64(max(0, min(s.sent+n, end)-max(s.sent, body)))
		}
	}
	before := s.sent
	s.sent += n
	s.frame = max(s.frame, int64(n+padding))
	if all := n + padding; all > 0 && all < smallFrameBytes {
		*s.counts(before) += frameOverhead
		s.reserve()
	}
}

// counts is where a small frame counts that began there: with the message that has begun, unless that is known to be small, or with a large one that
// has ended in the frame, or with small ones.
func (s *modelled) counts(before int) *int64 {
	begin := 0
	for i, end := range s.ends {
		large := s.size[i] >= receivedBytesMin
		if s.sent > begin && s.sent < end && (large || s.sent < end-s.size[i]) {
			return &s.frames[i]
		}
		begin = end
	}
	for i, end := range s.ends {
		if s.size[i] >= receivedBytesMin && before < end && s.sent >= end {
			return &s.frames[i]
		}
	}
	return &s.waiting
}

// withinLarge reports whether a large message has begun, so that its length is known, and has not ended.
func (s *modelled) withinLarge() bool {
	return slices.ContainsFunc(s.ends, func(end int) bool {
		size := s.size[slices.Index(s.ends, end)]
		return size >= receivedBytesMin && s.sent >= end-size && s.sent < end
	})
}

// next is the size of the next message to be taken, if it has come. Large ones have counted apart.
func (s *modelled) next() (size int, ok bool) {
	if ok = s.took < len(s.ends) && s.sent >= s.ends[s.took]; ok {
		size = s.size[s.took]
	}
	return size, ok
}

// taken is what an answer tells, or that the server takes the next message.
func (s *modelled) taken(answer bool) {
	large, left := int64(0), int64(0) // of the message that is being received
	for i, end := range s.ends {
		if body := end - s.size[i]; s.sent >= body && s.sent < end {
			if large = int64(s.size[i]); large < receivedBytesMin {
				large, left = 0, int64(end-s.sent)
			}
		}
	}
	if answer {
		for i := s.took; i < len(s.ends); i++ {
			if s.size[i] >= receivedBytesMin && s.sent >= s.ends[i] {
				large = max(large, int64(s.size[i]))
			}
		}
		s.large = large
		return
	}
	size, ok := s.next()
	if !ok {
		return
	}
	if s.took++; size >= receivedBytesMin {
		s.frames[s.took-1] = 0
	} else if bytes := min(int64(size)+grpcPrefixBytes, s.raw); bytes == s.raw {
		s.raw, s.waiting, s.frame = 0, left, 0
	} else {
		rest := s.waiting - (s.waiting-left)*bytes/s.raw
		s.waiting = max(rest, min(s.waiting, s.frame)) // of the frame in which it came
		s.raw -= bytes
	}
	if s.small = min(s.small, s.cost()); s.cost() < smallStep {
		s.small = 0
	}
}

// TestInboundAgreesWithAModel: whatever is sent, in frames cut and padded anywhere, read in pieces
// of any size, with answers, windows and ends of streams by either side at any moment, what is
// reserved is what the model says.
func TestInboundAgreesWithAModel(t *testing.T) {
	for seed := range uint64(300 / exhaustiveStep) {
		random := rand.New(rand.NewPCG(seed, 1))
		r := newReceiving(1 << 40)
		in := newInbound(r, r.clients.enter("client"))
		model := map[uint32]*modelled{}
		next := uint32(1)
		feed := func(b []byte) {
			for len(b) > 0 {
				n := min(len(b), 1+random.IntN(1+random.IntN(40_000)))
				if err := in.follow(b[:n:n]); err != nil {
					t.Fatal(err)
				}
				b = b[n:]
			}
		}
		send := func(b []byte) {
			for len(b) > 0 {
				n := 1 + random.IntN(len(b))
				in.answered(b[:n])
				b = b[n:]
			}
		}
		feed([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
		for step := range 100 {
			var id uint32
			for id = range model {
				break
			}
			s := model[id]
			switch what := random.IntN(16); {
			case s == nil || what == 0:
				feed(frame(frameHeaders, 0, next, make([]byte, random.IntN(50))))
				feed(frame(9, 4, next, make([]byte, random.IntN(50)))) // CONTINUATION
				model[next] = newModelled(random)
				next += 2
			case what == 1: // the client resets
				feed(frame(frameReset, 0, id, make([]byte, 4)))
				delete(model, id)
			case what == 2: // the server ends
				send(append(frame(frameData, 0, id, make([]byte, random.IntN(20))), frame(frameHeaders, 5, id, make([]byte, random.IntN(20)))...))
				delete(model, id)
			case what == 3: // trailers of the client
				feed(frame(frameHeaders, 5, id, make([]byte, 10)))
				if s.closed = true; s.withinLarge() {
					delete(model, id)
				}
			case what == 4: // the server answers
				send(frame([]byte{frameData, frameHeaders}[random.IntN(2)], 0, id, make([]byte, random.IntN(20))))
				s.taken(true)
			case what == 5: // the server takes
				send(append(windowOf(0, 1<<20), windowOf(id, 1+random.IntN(1<<17))...)) // which says nothing about messages
				for range random.IntN(4) {
					if size, ok := s.next(); ok {
						in.took(id, int64(size))
						s.taken(false)
					}
				}
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
				if random.IntN(8) == 0 { // the server ends within the frame, whose rest comes all the same
					n := random.IntN(len(b))
					feed(b[:n])
					in.answered(frame(frameReset, 0, id, make([]byte, 4)))
					feed(b[n:])
					delete(model, id)
					break
				}
				feed(b)
				if !s.closed {
					s.receive(len(part), len(payload)-len(part))
					if s.closed = flags&flagEndStream != 0; s.closed && s.withinLarge() {
						delete(model, id)
					}
				}
			}
			var large, small int64
			for _, s := range model {
				large, small = large+s.large, small+s.small
			}
			if gotLarge, gotSmall := r.large.reserved.Load(), r.small.reserved.Load(); gotLarge != large || gotSmall != small ||
				in.large != large || in.small != small || len(in.open) != len(model) {
				t.Fatalf("seed %d, step %d: %d and %d bytes are reserved, %d and %d of them by the connection, in %d streams; want %d and %d in %d",
					seed, step, gotLarge, gotSmall, in.large, in.small, len(in.open), large, small, len(model))
			}
		}
		if in.end(); r.reserved() != 0 || in.large != 0 || in.small != 0 || len(in.open) != 0 {
			t.Fatalf("seed %d: %d bytes are reserved by a closed connection", seed, r.reserved())
		}
	}
}
