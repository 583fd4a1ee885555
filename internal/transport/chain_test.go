package transport

import (
	"bytes"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/epochkv/epochkv/internal/testseed"
)

// TestChainsOfFramesAnswerWhatWasAsked: clients open streams of every kind that answers with what it gets, send messages of any size in frames
// of any size, change windows and settings, some of them to nothing, and reset streams, in a random order. What comes back on a stream is
// what was sent on it, from its begin on, and all of it with status 0 if the stream was not reset.
func TestChainsOfFramesAnswerWhatWasAsked(t *testing.T) {
	seed := testseed.Base(t)
	_, server, address := start(t, func(o *Options) {
		o.HandOverAfter = 50 * time.Microsecond
		o.HandshakeTimeout, o.KeepaliveTime, o.KeepaliveTimeout, o.ProgressTimeout = time.Hour, time.Hour, time.Hour, time.Hour // no check hides what is not sent
	})
	var chains sync.WaitGroup
	for i := range uint64(3) {
		chains.Go(func() {
			c := newFrameChain(t, address, rand.New(rand.NewPCG(seed, i)))
			for range 250 {
				c.step()
			}
			c.finish()
			_ = c.Close()
			<-c.done
		})
	}
	chains.Wait()
	eventually(t, "the connections have ended", func() bool { return server.onlyConn() == nil })
}

// frameChain is a client with random streams.
type frameChain struct {
	*peer
	random *rand.Rand
	next   uint32 // stream

	done    chan struct{} // nothing is read any more
	mu      sync.Mutex    // of the goroutine that reads
	changed sync.Cond
	window  int // what the server takes
	streams map[uint32]*chainStream
	failed  error // of reading
}

type chainStream struct {
	many   bool // messages
	sent   []byte
	rest   []byte // to be sent
	closed bool   // by the client
	reset  bool
	window int // what the server takes

	got   []byte
	ended bool
	code  string
}

func newFrameChain(t *testing.T, address string, random *rand.Rand) *frameChain {
	c := &frameChain{peer: dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: []uint32{0, 1, 1000, 65535, 1 << 24}[random.IntN(5)]}), random: random, next: 1}
	c.changed.L = &c.mu
	c.window, c.streams, c.done = firstWindow, map[uint32]*chainStream{}, make(chan struct{})
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	go c.read()
	return c
}

// read notes what comes.
func (c *frameChain) read() {
	defer close(c.done)
	for {
		f, err := c.framer.ReadFrame()
		c.mu.Lock()
		if c.failed = err; err == nil {
			c.note(f)
		}
		c.changed.Broadcast()
		c.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (c *frameChain) note(f http2.Frame) {
	s := c.streams[f.Header().StreamID]
	switch f := f.(type) {
	case *http2.WindowUpdateFrame:
		if f.StreamID == 0 {
			c.window += int(f.Increment)
		} else {
			s.window += int(f.Increment)
		}
	case *http2.DataFrame:
		s.got = append(s.got, f.Data()...)
		if !bytes.HasPrefix(s.sent, s.got) {
			c.t.Errorf("stream %d: something else than what was sent, within %d bytes", f.StreamID, len(s.got))
		}
	case *http2.MetaHeadersFrame:
		if s.ended = f.StreamEnded(); s.ended {
			for _, h := range f.RegularFields() {
				if h.Name == "grpc-status" {
					s.code = h.Value
				}
			}
		}
	case *http2.GoAwayFrame:
		c.t.Errorf("GOAWAY %v %s", f.ErrCode, f.DebugData())
	}
}

// step does something.
func (c *frameChain) step() {
	switch c.random.IntN(8) {
	case 0:
		c.begin()
	case 1, 2, 3, 4:
		if id, s := c.some(true); s != nil {
			c.send(id, s, 1+c.random.IntN(20_000))
		}
	case 5:
		if id, s := c.some(false); s != nil {
			_ = c.framer.WriteWindowUpdate(id, 1+c.random.Uint32N(50_000))
		}
		_ = c.framer.WriteWindowUpdate(0, 1+c.random.Uint32N(50_000))
	case 6:
		_ = c.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: c.random.Uint32N(100_000)})
	case 7:
		if id, s := c.some(false); s != nil && c.random.IntN(4) == 0 {
			s.reset = true
			_ = c.framer.WriteRSTStream(id, http2.ErrCodeCancel)
		}
	}
}

// begin opens a stream, and decides what it sends.
func (c *frameChain) begin() {
	paths := []string{pathEcho, pathUnary, pathOnce, pathStream, pathChat}
	kind := c.random.IntN(len(paths))
	s := &chainStream{many: kind >= 3, window: testOptions().StreamWindow}
	messages := 1
	if s.many {
		messages = c.random.IntN(8)
	}
	for range messages {
		message := prefixed(c.random.IntN([]int{3, 300, 5_000, 70_000}[c.random.IntN(4)]))
		for i := grpcPrefixBytes; i < len(message); i++ {
			message[i] = byte(c.random.Uint32())
		}
		s.rest = append(s.rest, message...)
	}
	id := c.next
	c.next += 2
	c.mu.Lock()
	s.sent = bytes.Clone(s.rest)
	c.streams[id] = s
	open := 0
	for _, other := range c.streams {
		if !other.reset && !other.ended {
			open++
		}
	}
	if open > testOptions().Streams/2 {
		delete(c.streams, id)
	}
	c.mu.Unlock()
	if open <= testOptions().Streams/2 {
		c.open(id, paths[kind])
	}
}

// some is a stream that has not ended, or one on which the client may send.
func (c *frameChain) some(sends bool) (uint32, *chainStream) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for range 10 {
		id := 1 + 2*c.random.Uint32N(c.next/2+1)
		if s := c.streams[id]; s != nil && !s.ended && !s.reset && !(sends && s.closed) {
			return id, s
		}
	}
	return 0, nil
}

// send sends a part of what a stream has, as far as the windows allow it.
func (c *frameChain) send(id uint32, s *chainStream, most int) {
	c.mu.Lock()
	n := min(most, len(s.rest), s.window, c.window, framePayloadMax)
	s.window -= n
	c.window -= n
	part := s.rest[:n]
	s.rest = s.rest[n:]
	s.closed = len(s.rest) == 0
	c.mu.Unlock()
	if n > 0 || s.closed {
		_ = c.framer.WriteData(id, s.closed, part)
	}
}

// finish sends the rest, takes everything, and looks at it.
func (c *frameChain) finish() {
	_ = c.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 24})
	_ = c.framer.WriteWindowUpdate(0, 1<<29)
	for id, s := range c.streams {
		for !s.closed && !s.reset {
			c.mu.Lock()
			for c.failed == nil && len(s.rest) > 0 && (s.window == 0 || c.window == 0) {
				c.changed.Wait()
			}
			failed := c.failed
			c.mu.Unlock()
			if failed != nil {
				c.t.Errorf("the connection ended: %v", failed)
				return
			}
			c.send(id, s, framePayloadMax)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, s := range c.streams {
		for c.failed == nil && !s.ended && !s.reset {
			c.changed.Wait()
		}
		if !s.reset && (s.code != "0" || !bytes.Equal(s.got, s.sent)) {
			c.t.Errorf("stream %d ended with status %q after %d of %d bytes: %v", id, s.code, len(s.got), len(s.sent), c.failed)
		}
	}
}
