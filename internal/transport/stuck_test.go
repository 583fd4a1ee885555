package transport

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestClientThatStopsReadingLosesItsConnection: answers that fill the socket, and wait nowhere else,
// count as answers that the client does not take.
func TestClientThatStopsReadingLosesItsConnection(t *testing.T) {
	for name, path := range map[string]string{"small answers": pathEcho, "calls": pathEndless} {
		t.Run(name, func(t *testing.T) {
			_, server, address := start(t, func(o *Options) {
				o.KeepaliveTime, o.KeepaliveTimeout, o.ProgressTimeout = 300*time.Millisecond, 200*time.Millisecond, 500*time.Millisecond
			})
			p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: windowMax})
			_ = p.framer.WriteWindowUpdate(0, windowMax-firstWindow)
			go func() {
				for i := range uint32(50_000) {
					p.open(2*i+1, path)
					if p.framer.WriteData(2*i+1, true, prefixed(4000)) != nil {
						return
					}
				}
			}()
			eventually(t, "the connection is open", func() bool { return server.onlyConn() != nil })
			eventually(t, "the connection is closed", func() bool { return server.onlyConn() == nil })
		})
	}
}

// TestASocketThatTakesNothingEndsItsConnection: also if little waits for it, and the client sends. The handler that writes would
// never return otherwise.
func TestASocketThatTakesNothingEndsItsConnection(t *testing.T) {
	s, server, _ := start(t, func(o *Options) { o.ProgressTimeout = 100 * time.Millisecond })
	p := silent(t, server, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 8 << 10})
	p.open(1, pathEndless)
	eventually(t, "the connection has ended", func() bool {
		_ = p.framer.WriteWindowUpdate(0, 1) // a sign of life
		return s.clients.Load() == 0
	})
	if cause := *s.causes.Load(); !errors.Is(cause, ErrUnread) {
		t.Errorf("the cause is %v", cause)
	}
}

// TestAConnectionEndsOnceItsServiceSaysThatItIsOverdue, however much its client takes.
func TestAConnectionEndsOnceItsServiceSaysThatItIsOverdue(t *testing.T) {
	s, server, address := start(t, func(*Options) {})
	p := dial(t, address)
	p.open(1, pathEcho)
	eventually(t, "the connection is open", func() bool { return server.onlyConn() != nil })
	s.overdue.Store(true)
	eventually(t, "the connection has ended", func() bool { return s.clients.Load() == 0 })
	if cause := *s.causes.Load(); !errors.Is(cause, ErrUnread) {
		t.Errorf("the cause is %v", cause)
	}
}

// silent is a client that has read the greeting, and reads no more unless its test does. Nothing is between it and the server that takes bytes.
func silent(t *testing.T, server *Server, settings ...http2.Setting) *peer {
	t.Helper()
	ours, theirs := net.Pipe() // a write lasts until it is read
	t.Cleanup(func() { _ = ours.Close() })
	_ = ours.SetDeadline(time.Now().Add(20 * time.Second))
	server.serve(theirs)
	p := &peer{Conn: ours, t: t, framer: http2.NewFramer(ours, ours)}
	p.framer.ReadMetaHeaders = hpack.NewDecoder(headerTableBytes, nil)
	p.encoder = hpack.NewEncoder(&p.block)
	greeted := make(chan error, 1)
	go func() { // until the server has nothing more to say
		for {
			f, err := p.framer.ReadFrame()
			if settings, ok := f.(*http2.SettingsFrame); err != nil || ok && settings.IsAck() {
				greeted <- err
				return
			}
		}
	}()
	_, _ = io.WriteString(ours, http2.ClientPreface)
	_ = p.framer.WriteSettings(settings...)
	if err := <-greeted; err != nil {
		t.Fatal(err)
	}
	return p
}

// waitsToBeSent is how many bytes of a connection's output wait, as soon as a client that takes nothing holds it up.
func (c *Conn) waitsToBeSent(t *testing.T) (bytes int) {
	t.Helper()
	eventually(t, "the output is held up", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		bytes = c.out.writing + len(c.out.buf)
		return c.out.writing > outMax/2
	})
	return bytes
}

// TestRefusalsOfABurstAreSentInParts: a header block of a few bytes names a field of some KiB in the table, and its request is refused. The
// answers to all of one read of the socket do not wait for the last of them, nor are they as long as what the client has sent.
func TestRefusalsOfABurstAreSentInParts(t *testing.T) {
	for name, field := range map[string][2]string{
		"a deadline": {"grpc-timeout", strings.Repeat("\x80", 4000)}, "a content type": {"content-type", strings.Repeat("%", 4000)},
	} {
		t.Run(name, func(t *testing.T) {
			_, server, _ := start(t)
			p := silent(t, server)
			const post, http, root, newest = 0x83, 0x86, 0x84, hpackIndexed | hpackFirstDynamic
			block := appendString(appendString([]byte{post, http, root, hpackIncremental}, field[0]), field[1])
			burst := append(AppendFrameHeader(nil, len(block), http2.FrameHeaders, http2.FlagHeadersEndHeaders|http2.FlagHeadersEndStream, 1), block...)
			for id := uint32(3); len(burst) < inputBytes; id += 2 {
				block = []byte{post, http, root, newest}
				burst = append(AppendFrameHeader(burst, len(block), http2.FrameHeaders, http2.FlagHeadersEndHeaders|http2.FlagHeadersEndStream, id), block...)
			}
			go func() { _, _ = p.Write(burst) }()
			if n := onlyConn(t, server).waitsToBeSent(t); n > 2*outMax {
				t.Errorf("%d bytes wait to be sent", n)
			}
			if f, err := p.framer.ReadFrame(); err != nil || f.Header().Length > 1000 {
				t.Errorf("the first answer is %v, %v", f, err)
			}
		})
	}
}

// TestRequestsThatFailTogetherCountUntilTheyAreTold: what has waited for one sync may fail at once, each request with a status of some KiB.
func TestRequestsThatFailTogetherCountUntilTheyAreTold(t *testing.T) {
	const requests = 100
	s, server, _ := start(t)
	p := silent(t, server)
	for i := range uint32(requests) {
		p.request(2*i+1, pathLater, 1)
	}
	eventually(t, "all wait", func() bool { return len(s.waiting()) == requests })
	st := status.New(codes.FailedPrecondition, strings.Repeat("m", 4000))
	for _, r := range s.waiting() {
		if !r.Fail(st) || r.Fail(st) {
			t.Error("a request does not fail once")
		}
	}
	go s.waiting()[0].Flush()
	c := onlyConn(t, server)
	if n := c.waitsToBeSent(t); n > 2*outMax {
		t.Errorf("%d bytes wait to be sent", n)
	}
	c.mu.Lock()
	if sent := 2 * outMax / len(st.Message()); c.open < requests-sent {
		t.Errorf("%d streams are open", c.open)
	}
	c.mu.Unlock()
	for i := range uint32(requests) {
		if got, _ := p.outcome(2*i + 1); got != "9" {
			t.Errorf("stream %d ended with %s", 2*i+1, got)
		}
	}
}

// TestUnsentAnswersOfCallsCount: a stream counts until its answer is sent, also when its
// handler has returned. A client that hardly takes it loses the stream.
func TestUnsentAnswersOfCallsCount(t *testing.T) {
	_, server, address := start(t, func(o *Options) { o.Streams = 10 })
	p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
	for i := range uint32(50) {
		p.request(2*i+1, pathText, 1)
		time.Sleep(time.Millisecond)
	}
	p.request(201, pathEcho, 0)
	if st, _ := p.outcome(201); st != "RST REFUSED_STREAM" {
		t.Errorf("got %s", st)
	}
	c := server.onlyConn()
	c.mu.Lock()
	open, all := len(c.streams), c.streams[1].pending.bytes
	c.mu.Unlock()
	if open > 10 {
		t.Errorf("%d streams have answers that were not sent", open)
	}
	now := time.Now()
	for i := range 3 { // a byte now and then is no progress
		_ = p.framer.WriteWindowUpdate(1, 1)
		eventually(t, "a byte is sent", func() bool {
			c.mu.Lock()
			defer c.mu.Unlock()
			s := c.streams[1]
			return s != nil && s.last && s.pending.bytes < all-i
		})
		now = now.Add(testOptions().ProgressTimeout * 2 / 3)
		c.check(now)
	}
	if st, _ := p.outcome(1); st != "RST CANCEL" {
		t.Errorf("got %s", st)
	}
}

// TestBurstOfAnswersIsSentInParts: the answers to the requests of one read of the socket do not
// wait for the last of them.
func TestBurstOfAnswersIsSentInParts(t *testing.T) {
	for name, send := range map[string]func(p *peer, i uint32) error{
		"requests": func(p *peer, i uint32) error {
			p.open(2*i+1, pathKiB)
			return p.framer.WriteData(2*i+1, true, prefixed(0))
		},
		"messages": func(p *peer, i uint32) error {
			if i == 0 {
				p.open(1, pathKiBs)
			}
			return p.framer.WriteData(1, false, bytes.Repeat(prefixed(0), 1000))
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, server, address := start(t)
			p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: windowMax})
			_ = p.framer.WriteWindowUpdate(0, windowMax-firstWindow)
			go func() {
				for i := uint32(0); send(p, i) == nil && i < 100_000; i++ {
				}
			}()
			eventually(t, "the connection is open", func() bool { return server.onlyConn() != nil })
			c, most := server.onlyConn(), 0
			for range 200 {
				c.mu.Lock()
				most = max(most, c.out.writing+cap(c.out.buf)+cap(c.out.spare))
				for _, s := range c.streams {
					most = max(most, s.pending.held())
				}
				c.mu.Unlock()
				time.Sleep(time.Millisecond)
			}
			if most > 6*outMax {
				t.Errorf("%d bytes wait to be sent", most)
			}
		})
	}
}

// TestCancelledRequestsCountWhileTheyAreExecuted: a client that cancels what waits cannot make the
// server execute more than it allows streams.
func TestCancelledRequestsCountWhileTheyAreExecuted(t *testing.T) {
	const streams = 10
	s, _, address := start(t, func(o *Options) { o.Streams = streams })
	p := dial(t, address)
	for i := range uint32(4 * streams) {
		p.request(2*i+1, pathBlock, 1)
		_ = p.framer.WriteRSTStream(2*i+1, http2.ErrCodeCancel)
	}
	p.request(501, pathEcho, 1)
	if st, _ := p.outcome(501); st != "RST REFUSED_STREAM" {
		t.Errorf("got %s", st)
	}
	if n := s.executed.Load(); n > streams+1 {
		t.Errorf("%d requests are executed at once", n)
	}
	close(s.release)
	eventually(t, "another request is served", func() bool {
		p := dial(t, address)
		p.request(1, pathEcho, 1)
		st, _ := p.outcome(1)
		return st == "0"
	})
}

// TestSmallerHeaderTablesAreAnnounced: a client that makes its table smaller expects the server to
// say so in the next block, and ends the connection otherwise.
func TestSmallerHeaderTablesAreAnnounced(t *testing.T) {
	_, _, address := start(t)
	p := dial(t, address)
	p.framer.ReadMetaHeaders = nil
	block := func(stream uint32) []byte {
		for {
			f, err := p.framer.ReadFrame()
			if err != nil {
				t.Fatal(err)
			}
			if h, ok := f.(*http2.HeadersFrame); ok && h.StreamID == stream {
				return h.HeaderBlockFragment()
			}
		}
	}
	p.request(1, pathEcho, 1)
	if b := block(1); b[0] != hpackStatus200 {
		t.Errorf("the first block begins with %x", b[0])
	}
	_ = p.framer.WriteSettings(http2.Setting{ID: http2.SettingHeaderTableSize, Val: 1024})
	p.request(3, pathEcho, 1)
	const update, mask = 0x20, 0xe0
	if b := block(3); b[0]&mask != update {
		t.Errorf("the block after the settings begins with %x", b[0])
	}
}

// TestAClientsOwnWindowEndsNoMessageUnlessItIsWanted: a message cannot come while the window of the connection is used up, by messages of other streams
// that are not taken, which its client may cause. That is no reason to end it, unless others are refused because of it.
func TestAClientsOwnWindowEndsNoMessageUnlessItIsWanted(t *testing.T) {
	const window, part, large = 128 << 10, 16 << 10, 64 << 10
	s, server, address := start(t, func(o *Options) {
		o.StreamWindow, o.ConnWindow, o.ProgressTimeout, o.KeepaliveTime = window/2, window, time.Hour, 1000*time.Hour
	})
	p := dial(t, address)
	p.open(1, pathEcho)
	_ = p.framer.WriteData(1, false, prefixed(large)[:part])
	eventually(t, "the message is being received", func() bool { return s.received.Load() == large })
	c, now := onlyConn(t, server), time.Now()
	for stream := uint32(3); ; stream += 2 {
		c.mu.Lock()
		left := c.connWindow
		c.mu.Unlock()
		if left == 0 {
			break
		}
		p.open(stream, pathIdle)
		n := min(left, part)
		_ = p.framer.WriteData(stream, false, make([]byte, n)) // messages of no bytes, and perhaps a part of one
		eventually(t, "it has come", func() bool {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.connWindow == left-n
		})
	}
	pass := func(checks int) (received int64) {
		for range checks {
			now = now.Add(40 * time.Minute)
			c.check(now)
		}
		return s.received.Load()
	}
	all := s.received.Load()
	if pass(10) != all {
		t.Error("a message that the client could not send was ended")
	}
	s.wanted.Store(true)
	if pass(1) != all {
		t.Error("a message was ended before its time")
	}
	if pass(2) != all-large {
		t.Fatal("a message that others want to end was not ended")
	}
	if st, _ := p.outcome(1); st != "8" {
		t.Errorf("got %s", st)
	}
}
