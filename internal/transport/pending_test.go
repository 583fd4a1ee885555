package transport

import (
	"bytes"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
)

// pending is how much the streams of a connection have pending, and whether the connection counts as much.
func (c *Conn) pendingOfStreams() (bytes int, right bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	unsent := 0
	for _, s := range c.streams {
		if bytes += s.pending.bytes; s.messages != nil {
			unsent += s.pending.small
		}
	}
	return bytes, bytes == c.pending && unsent == c.unsent
}

// held is how many bytes the arrays of what is pending have.
func (p *pending) held() int {
	n := cap(p.first.rest)
	for _, later := range p.later {
		n += cap(later.rest)
	}
	return n
}

// TestSmallMessagesOfManyStreamsHaveABoundTogether: what the streams of a client that takes nothing have pending is bounded for the
// connection, beside a little for each stream. When the client takes it, each stream goes on to its end.
func TestSmallMessagesOfManyStreamsHaveABoundTogether(t *testing.T) {
	const streams, messages, size = 60, 40, 1000
	for name, c := range map[string]struct {
		path   string
		answer int // to a message
	}{"streams of messages": {pathKiBs, 3 << 10}, "calls": {pathChat, size}} {
		t.Run(name, func(t *testing.T) {
			_, server, address := start(t, func(o *Options) { o.ConnWindow = 16 << 20 })
			p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
			for i := range uint32(streams) {
				p.open(2*i+1, c.path)
				for k := range messages {
					_ = p.framer.WriteData(2*i+1, k == messages-1, prefixed(size))
				}
			}
			most := pendingMax + streams*(pendingLeast+c.answer+grpcPrefixBytes)
			last, same := 0, 0
			eventually(t, "the answers have filled the bound, and no more come", func() bool {
				conn := server.onlyConn()
				if conn == nil {
					return false
				}
				bytes, right := conn.pendingOfStreams()
				if bytes > most || !right {
					t.Fatalf("%d bytes are pending; %d would be the most, and are counted: %v", bytes, most, right)
				}
				if same++; bytes != last {
					last, same = bytes, 0
				}
				return bytes > pendingMax && same > 100
			})
			_ = p.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: windowMax})
			_ = p.framer.WriteWindowUpdate(0, windowMax-firstWindow)
			data, ended := 0, 0
			for ended < streams {
				f, err := p.framer.ReadFrame()
				if err != nil {
					t.Fatalf("after %d bytes, and %d streams: %v", data, ended, err)
				}
				switch f := f.(type) {
				case *http2.MetaHeadersFrame:
					if f.StreamEnded() {
						ended++
					}
				case *http2.DataFrame:
					data += len(f.Data())
				}
			}
			if want := streams * messages * (c.answer + grpcPrefixBytes); data != want {
				t.Errorf("%d bytes have come, want %d", data, want)
			}
			if bytes, right := server.onlyConn().pendingOfStreams(); bytes != 0 || !right {
				t.Errorf("%d bytes are pending, and are counted: %v", bytes, right)
			}
		})
	}
}

// TestPendingBytesOfStreamsThatEndAreForgotten, of whichever kind and however they end.
func TestPendingBytesOfStreamsThatEndAreForgotten(t *testing.T) {
	_, server, address := start(t)
	p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 100})
	paths := []string{pathEcho, pathLarge, pathKiB, pathKiBs, pathChat, pathText, pathEndless, pathUnary}
	for i, path := range paths {
		p.request(uint32(2*i+1), path, 2000)
	}
	eventually(t, "answers are pending", func() bool {
		conn := server.onlyConn()
		if conn == nil {
			return false
		}
		bytes, right := conn.pendingOfStreams()
		if !right {
			t.Fatalf("%d bytes are pending, and not as many are counted", bytes)
		}
		return bytes > largeBytes
	})
	for i := range paths {
		_ = p.framer.WriteRSTStream(uint32(2*i+1), http2.ErrCodeCancel)
	}
	eventually(t, "nothing is pending", func() bool {
		bytes, right := server.onlyConn().pendingOfStreams()
		if !right {
			t.Fatalf("%d bytes are pending, and not as many are counted", bytes)
		}
		return bytes == 0
	})
}

// TestPendingIsWhatWasAdded: everything is taken in the order in which it was added. A message that counts is given back once, when its last byte was taken.
func TestPendingIsWhatWasAdded(t *testing.T) {
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 1))
		var p pending
		var added, taken []byte
		given := map[int]int{} // how often the message that ends there was given back
		ends := []int{}
		for range 200 {
			switch n := 1 + random.IntN(100); random.IntN(4) {
			case 0:
				n *= 100
				b := bytes.Repeat([]byte{byte(random.Int())}, n)
				added = append(added, b...)
				end := len(added)
				ends = append(ends, end)
				p.push(b, func() { given[end]++; clear(b) })
			case 1:
				b := p.extend(n)
				for i := range b {
					b[i] = byte(random.Int())
				}
				added = append(added, b...)
			default:
				n = min(p.bytes, n*random.IntN(60))
				taken = p.appendTo(taken, n)
			}
			if p.bytes != len(added)-len(taken) {
				t.Fatalf("seed %d: %d bytes are pending of %d, of which %d were taken", seed, p.bytes, len(added), len(taken))
			}
			for _, end := range ends {
				want := 0
				if end <= len(taken) {
					want = 1
				}
				if given[end] != want {
					t.Fatalf("seed %d: the message that ends at %d was given back %d times after %d bytes", seed, end, given[end], len(taken))
				}
			}
		}
		if !bytes.HasPrefix(added, taken) {
			t.Fatalf("seed %d: other bytes were taken than added", seed)
		}
		p.drop()
		for _, end := range ends {
			if given[end] != 1 {
				t.Fatalf("seed %d: the message that ends at %d was given back %d times in the end", seed, end, given[end])
			}
		}
		if p.bytes != 0 || p.held() != 0 || p.later != nil {
			t.Fatalf("seed %d: %d bytes are left in %d", seed, p.bytes, p.held())
		}
	}
}

// TestWhatFollowsALargeMessageKeepsNoneOfIt: a client takes a large message, and no more. What was counted for it is given back, and so is its memory.
func TestWhatFollowsALargeMessageKeepsNoneOfIt(t *testing.T) {
	const large = 1 << 20
	var sent atomic.Int64
	services := testServices()
	services.RegisterService(&grpc.ServiceDesc{ServiceName: "large", Streams: []grpc.StreamDesc{{
		StreamName: "Send", ServerStreams: true, ClientStreams: true,
		Handler: func(_ any, stream grpc.ServerStream) error {
			for _, m := range []any{countedRaw{raw: make([]byte, large), sent: &sent}, raw("small")} {
				if err := stream.SendMsg(m); err != nil {
					return err
				}
			}
			<-stream.Context().Done()
			return nil
		},
	}}}, nil)
	s, server, address := startWith(t, services)
	p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: large})
	_ = p.framer.WriteWindowUpdate(0, windowMax-firstWindow)
	p.open(1, "/large/Send")
	c := onlyConn(t, server)
	small := raw("small").SizeVT() + grpcPrefixBytes
	eventually(t, "the end of the large message and all of the small one wait", func() bool { n, _ := c.pendingOfStreams(); return n == grpcPrefixBytes+small })
	if sent.Load() != 0 {
		t.Error("the large message does not count, and not all of it was sent")
	}
	_ = p.framer.WriteWindowUpdate(1, grpcPrefixBytes)
	eventually(t, "the small one waits", func() bool { n, _ := c.pendingOfStreams(); return n == small })
	c.mu.Lock()
	if n := c.streams[1].pending.held(); n > 100 || sent.Load() != 1 {
		t.Errorf("%d bytes wait in %d; the large message was given back %d times", small, n, sent.Load())
	}
	c.mu.Unlock()
	_ = p.framer.WriteRSTStream(1, http2.ErrCodeCancel)
	eventually(t, "the handler has returned", func() bool { return s.streams.Load() == 0 })
}
