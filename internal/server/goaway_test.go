package server

import (
	"encoding/binary"
	"errors"
	"testing"
	"time"

	"golang.org/x/net/http2"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// goAwayOf is a frame that says which stream is the last that the server serves.
func goAwayOf(last uint32) []byte {
	return frame(frameGoAway, 0, 0, append(binary.BigEndian.AppendUint32(nil, last), "\x00\x00\x00\x00max_age"...))
}

// TestStreamsAfterTheLastAreForgotten: gRPC drops them, and does not say so. Those that it has dropped before it says which stream is the last are
// forgotten when it does, with all that was reserved for them; later ones are not counted.
func TestStreamsAfterTheLastAreForgotten(t *testing.T) {
	for cut := 1; cut < 30; cut++ {
		r := newReceiving(4 << 20)
		in := newFollowed(t, r)
		feed := func(b []byte) {
			t.Helper()
			if err := in.follow(b); err != nil {
				t.Fatal(err)
			}
		}
		send := func(b []byte) {
			for ; len(b) > 0; b = b[min(cut, len(b)):] {
				in.answered(b[:min(cut, len(b))])
			}
		}
		begin := func(stream uint32) { feed(frame(frameHeaders, flagEndHeaders, stream, make([]byte, 30))) }
		want := func(when string, streams int, bytes int64) {
			t.Helper()
			if len(in.open) != streams || in.counted != int64(streams) || r.reserved() != bytes {
				t.Fatalf("%s, written by %d bytes: %d streams are open, %d counted, and %d bytes reserved; want %d and %d", when, cut, len(in.open), in.counted, r.reserved(), streams, bytes)
			}
		}
		send(goAwayOf(streamMax))
		for stream := uint32(21); stream <= 27; stream += 2 {
			begin(stream)
		}
		large := frame(frameData, 0, 23, prefixed(100<<10))
		feed(frame(frameData, 0, 25, prefixed(100 << 10)[:1000]))
		feed(large[:2000]) // the rest comes later
		want("after the first GOAWAY", 14, 200<<10)
		send(goAwayOf(21))
		want("after the last one", 11, 0)
		feed(large[2000:])
		feed(frame(frameData, flagEndStream, 25, make([]byte, 1000)))
		for stream := uint32(29); stream < 100; stream += 2 {
			feed(frame(frameHeaders, 0, stream, make([]byte, 30)))
			feed(frame(frameContinued, flagEndHeaders, stream, make([]byte, 30)))
			feed(frame(frameData, 0, stream, prefixed(100<<10)))
		}
		send(append(goAwayOf(199), windowOf(21, 5)...))
		begin(101)
		want("after later streams", 11, 0)
		if got := in.open[21].window; got != streamWindowBytes+5 {
			t.Errorf("the window is %d: what comes after GOAWAY was misread", got)
		}
		send(frame(frameReset, 0, 21, make([]byte, 4)))
		want("after the last has ended", 10, 0)
		if in.end(); r.streams.reserved.Load() != 0 {
			t.Errorf("%d streams are reserved at the end", r.streams.reserved.Load())
		}
	}
}

// TestStreamsWithoutAnEndAreBounded: what is sent may wait in the middle of GOAWAY for a client that reads nothing, while gRPC already drops its streams.
func TestStreamsWithoutAnEndAreBounded(t *testing.T) {
	r := newReceiving(4 << 20)
	r.streams.limit = 100
	in, n := newFollowed(t, r), 0
	in.answered(goAwayOf(19)[:frameHeaderBytes+3])
	var err error
	for ; err == nil && n < 1<<16; n++ {
		err = in.follow(frame(frameHeaders, flagEndHeaders|flagEndStream, uint32(21+2*n), make([]byte, 6)))
	}
	if !errors.Is(err, errOpenStreams) || n < 2*r.streamsOfOne() || n > 20000 {
		t.Errorf("after %d streams: %v", n, err)
	}
	if in.end(); r.streams.reserved.Load() != 0 {
		t.Errorf("%d streams are reserved at the end", r.streams.reserved.Load())
	}
}

// TestStreamsOfAConnectionThatEndsAreNotCounted floods connections to which the server has said that it serves no more streams, when they have become
// old, and when the server stops: it keeps nothing of these streams.
func TestStreamsOfAConnectionThatEndsAreNotCounted(t *testing.T) {
	for name, stops := range map[string]bool{"age": false, "shutdown": true} {
		t.Run(name, func(t *testing.T) {
			if !stops {
				before := keepaliveParams
				t.Cleanup(func() { keepaliveParams = before })
				keepaliveParams.MaxConnectionAge, keepaliveParams.MaxConnectionAgeGrace = 50*time.Millisecond, time.Hour
			}
			h := mustStart(t, overGRPC, func(c *config.Config) { c.DrainTimeout = time.Minute })
			x, end := newExchange(t, h.Address(), patience)
			defer end()
			x.open(1, "/epochkv.v1.KVService/Get", false) // what keeps the connection open
			stopped := make(chan error, 1)
			if stops {
				eventually(t, "the server has the stream", func() bool { return len(h.openStreams()) == 1 })
				go func() { stopped <- h.stop() }()
			}
			ping := x.drainPing(t)
			x.open(3, "/epochkv.v1.KVService/Get", false) // which is still served
			_ = x.framer.WritePing(true, ping)
			if last := x.lastStream(t); last != 3 {
				t.Fatalf("stream %d is the last", last)
			}
			const flood = 3000
			for i := range uint32(flood) {
				x.open(5+2*i, "/epochkv.v1.KVService/Pipeline", i%2 == 0)
			}
			x.awaitRead(t)
			if got := h.openStreams(); len(got) != 2 || !got[1] || !got[3] || h.receiving.streams.reserved.Load() != 0 {
				t.Errorf("%d streams are open, and %d reserved", len(got), h.receiving.streams.reserved.Load())
			}
			for _, stream := range []uint32{1, 3} {
				x.data(stream, true, grpcMessage(t, &pb.GetRequest{Key: []byte("k")}))
				if got := x.outcomeOf(t, stream); got != "200 0 with messages" {
					t.Errorf("stream %d: %s", stream, got)
				}
			}
			if end(); stops {
				if err := <-stopped; err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// lastStream reads until the server has said which stream is the last that it serves.
func (x *exchange) lastStream(t *testing.T) uint32 {
	t.Helper()
	for {
		f, err := x.framer.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		if f, ok := f.(*http2.GoAwayFrame); ok && f.LastStreamID < streamMax {
			return f.LastStreamID
		}
	}
}

// awaitRead returns when the server has read all that was sent.
func (x *exchange) awaitRead(t *testing.T) {
	t.Helper()
	if err := x.framer.WritePing(false, [8]byte{1}); err != nil {
		t.Fatal(err)
	}
	for {
		f, err := x.framer.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		if f, ok := f.(*http2.PingFrame); ok && f.IsAck() {
			return
		}
	}
}

// openStreams are the streams of all connections of the gRPC library.
func (h *harness) openStreams() map[uint32]bool {
	h.connections.mu.Lock()
	defer h.connections.mu.Unlock()
	streams := map[uint32]bool{}
	for conn := range h.connections.all {
		conn.mu.Lock()
		for id := range conn.inbound.open {
			streams[id] = true
		}
		conn.mu.Unlock()
	}
	return streams
}
