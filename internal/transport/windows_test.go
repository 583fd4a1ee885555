package transport

import (
	"bytes"
	"net"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/status"
)

// TestStreamsThatEndEarlyGiveTheirWindowBack: after streams that ended in every way before the
// server took what they had sent, a connection carries a large message both ways.
func TestStreamsThatEndEarlyGiveTheirWindowBack(t *testing.T) {
	const streamWindow, connWindow = 64 << 10, 200 << 10
	for name, send := range map[string]func(p *peer, stream uint32){
		"messages that wait, and are reset": func(p *peer, stream uint32) {
			p.open(stream, pathHeld)
			for range 30 {
				_ = p.framer.WriteData(stream, false, prefixed(1000))
			}
			_ = p.framer.WriteRSTStream(stream, http2.ErrCodeCancel)
		},
		"messages that wait before half of one": func(p *peer, stream uint32) {
			p.open(stream, pathHeld)
			for range 30 {
				_ = p.framer.WriteDataPadded(stream, false, prefixed(1000), make([]byte, 100))
			}
			_ = p.framer.WriteData(stream, false, prefixed(1000)[:500])
			_ = p.framer.WriteRSTStream(stream, http2.ErrCodeCancel)
		},
		"half a message of a stream of them": func(p *peer, stream uint32) {
			p.open(stream, pathStream)
			_ = p.framer.WriteData(stream, false, prefixed(60_000)[:16_000])
			_ = p.framer.WriteData(stream, false, make([]byte, 16_000))
			_ = p.framer.WriteRSTStream(stream, http2.ErrCodeCancel)
		},
		"a compressed message after others": func(p *peer, stream uint32) {
			p.open(stream, pathStream)
			b := append(prefixed(10_000), 1, 0, 0, 0, 1, 0)
			_ = p.framer.WriteData(stream, false, b)
			_ = p.framer.WriteData(stream, false, prefixed(8000))
		},
		"half of a request": func(p *peer, stream uint32) {
			p.open(stream, pathEcho)
			_ = p.framer.WriteDataPadded(stream, false, prefixed(60_000)[:16_000], make([]byte, 200))
			_ = p.framer.WriteRSTStream(stream, http2.ErrCodeCancel)
		},
		"more than the stream's window": func(p *peer, stream uint32) {
			p.open(stream, pathHeld)
			for range 5 {
				_ = p.framer.WriteData(stream, false, prefixed(15_995))
			}
		},
		"a handler that reads nothing": func(p *peer, stream uint32) {
			p.open(stream, pathDeaf)
			for range 3 {
				_ = p.framer.WriteData(stream, false, prefixed(10_000))
			}
		},
		"messages that no handler takes": func(p *peer, stream uint32) {
			p.open(stream, pathIdle)
			for range 5 {
				_ = p.framer.WriteDataPadded(stream, false, prefixed(10_000), make([]byte, 50))
			}
			_ = p.framer.WriteRSTStream(stream, http2.ErrCodeCancel)
		},
		"half a message of a call": func(p *peer, stream uint32) {
			p.open(stream, pathChat)
			for range 6 {
				_ = p.framer.WriteData(stream, false, prefixed(90_000)[:15_000])
			}
			_ = p.framer.WriteRSTStream(stream, http2.ErrCodeCancel)
		},
		"a compressed message of a call": func(p *peer, stream uint32) {
			p.open(stream, pathChat)
			_ = p.framer.WriteData(stream, false, append(prefixed(10_000), 1, 0, 0, 0, 1, 0))
			_ = p.framer.WriteData(stream, false, prefixed(8000))
		},
		"data of a stream that has ended": func(p *peer, stream uint32) {
			p.open(stream, pathEcho, "grpc-timeout", "malformed")
			_ = p.framer.WriteData(stream, false, prefixed(10_000))
			_ = p.framer.WriteData(stream, true, prefixed(10_000))
		},
		"data after the end": func(p *peer, stream uint32) {
			p.open(stream, pathDeaf)
			_ = p.framer.WriteData(stream, true, prefixed(10_000))
			_ = p.framer.WriteData(stream, false, prefixed(10_000))
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, server, address := start(t, func(o *Options) { o.StreamWindow, o.ConnWindow = streamWindow, connWindow })
			p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20})
			_ = p.framer.WriteWindowUpdate(0, 1<<20)
			stream := uint32(1)
			for range 30 { // each leaves up to a sixth of the connection's window unused
				send(p, stream)
				stream += 2
				p.request(stream, pathEcho, 1)
				if st, _ := p.outcome(stream); st != "0" {
					t.Fatalf("status %s", st)
				}
				stream += 2
				eventually(t, "all streams have ended", func() bool { return server.onlyConn().openStreams() == 0 })
			}
			c := server.onlyConn()
			c.mu.Lock()
			defer c.mu.Unlock()
			if got := c.connWindow + c.untaken; got != connWindow {
				t.Errorf("the client may send %d bytes, want %d", got, connWindow)
			}
		})
	}
}

// onlyConn is the only connection.
func (t *Server) onlyConn() *Conn {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.conns {
		return c
	}
	return nil
}

func (c *Conn) openStreams() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.open + len(c.streams)
}

// TestLongStreamsAreNoFlood: a client that receives a large stream widens its windows as often as
// it wants to.
func TestLongStreamsAreNoFlood(t *testing.T) {
	_, _, address := start(t)
	p := dial(t, address)
	p.open(1, pathEndless)
	_ = p.framer.WriteData(1, true, nil)
	for frames := 0; frames < 3*controlMax; {
		f, err := p.framer.ReadFrame()
		if err != nil {
			t.Fatalf("after %d frames: %v", frames, err)
		}
		switch f := f.(type) {
		case *http2.GoAwayFrame:
			t.Fatalf("after %d frames: %v %s", frames, f.ErrCode, f.DebugData())
		case *http2.DataFrame:
			for n := uint32(len(f.Data())); n > 0; frames += 2 {
				part := min(n, 1000)
				_ = p.framer.WriteWindowUpdate(0, part)
				_ = p.framer.WriteWindowUpdate(1, part)
				n -= part
			}
		}
	}
}

// TestSendersTakeTurns: the streams that have much to send share a connection, however much of it
// the output takes at once.
func TestSendersTakeTurns(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	c := newConn(&Server{options: testOptions(), service: &service{}}, a)
	c.client = client{new(service)}
	c.sendWindow = windowMax
	const streams, waits = 7, 1 << 20
	for i := range uint32(streams) {
		s := c.newStreamLocked(2*i + 1)
		s.sendWindow = windowMax
		s.pending.push(make([]byte, waits), nil)
		c.queueLocked(s)
	}
	for range streams * 4 {
		c.pumpLocked()
		c.out.buf = c.out.buf[:0]
	}
	for id, s := range c.streams {
		const all = streams * 4 * outMax
		if sent := waits - s.pending.bytes; sent < all/streams/2 {
			t.Errorf("stream %d has sent %d bytes of %d", id, sent, all)
		}
	}
}

// TestStreamsThatFailAreReported: the service learns of every stream of messages that has begun and
// did not end by itself.
func TestStreamsThatFailAreReported(t *testing.T) {
	s, _, address := start(t)
	p := dial(t, address)
	p.open(1, pathStream, "grpc-timeout", "50m")
	p.open(3, pathStream)
	_ = p.framer.WriteData(3, false, []byte{1, 0, 0, 0, 1, 0})
	p.open(5, pathStream)
	_ = p.framer.WriteRSTStream(5, http2.ErrCodeCancel)
	p.open(7, pathStream)
	_ = p.framer.WriteData(7, true, prefixed(10)[:7])
	eventually(t, "two streams are cancelled, and two have failed", func() bool { return s.cancelled.Load() == 2 && s.failed.Load() == 2 })
}

// TestIdleConnectionsKeepLittle: after a burst of large answers a connection gives back its buffers, also if its client goes on to send a little.
func TestIdleConnectionsKeepLittle(t *testing.T) {
	for name, sends := range map[string]bool{"idle": false, "a frame now and then": true} {
		t.Run(name, func(t *testing.T) { idleConnectionKeepsLittle(t, sends) })
	}
}

func idleConnectionKeepsLittle(t *testing.T, sends bool) {
	_, server, address := start(t, func(o *Options) { o.HandshakeTimeout = time.Second })
	p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20})
	_ = p.framer.WriteWindowUpdate(0, 1<<30)
	for i := range uint32(50) {
		p.request(2*i+1, pathLarge, 1000)
	}
	p.outcome(99)
	eventually(t, "the buffers are gone", func() bool {
		if sends {
			_ = p.framer.WriteWindowUpdate(0, 1)
		}
		c := server.onlyConn()
		c.mu.Lock()
		defer c.mu.Unlock()
		return cap(c.out.buf)+cap(c.out.spare) == 0 && c.free == nil && c.streamsMost == 0
	})
	p.request(1001, pathEcho, 1)
	if st, _ := p.outcome(1001); st != "0" {
		t.Errorf("status %s afterwards", st)
	}
}

// TestIdleStreamsKeepLittle: what a stream of messages has sent does not stay in memory until its next answer.
func TestIdleStreamsKeepLittle(t *testing.T) {
	_, server, address := start(t, func(o *Options) { o.HandshakeTimeout = time.Second })
	p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
	const messages = 15
	p.open(1, pathKiBs)
	_ = p.framer.WriteData(1, false, bytes.Repeat(prefixed(0), messages))
	c, want := onlyConn(t, server), messages*(threeKiB.SizeVT()+grpcPrefixBytes)
	eventually(t, "the answers wait", func() bool { n, _ := c.pendingOfStreams(); return n == want })
	_ = p.framer.WriteWindowUpdate(1, windowMax/2)
	for data := 0; data < want; {
		f, err := p.framer.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		if d, ok := f.(*http2.DataFrame); ok {
			data += len(d.Data())
		}
	}
	eventually(t, "their memory is given back", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.streams[1].pending.held() == 0 && cap(c.out.buf)+cap(c.out.spare)+cap(c.senders) == 0
	})
	_ = p.framer.WriteData(1, true, prefixed(0))
	if st, n := p.outcome(1); st != "0" || n != want/messages {
		t.Errorf("%d bytes and status %s afterwards", n, st)
	}
}

// TestSettingsCostNoLookAtEveryStream: a frame of settings looks at the open streams once.
func TestSettingsCostNoLookAtEveryStream(t *testing.T) {
	_, server, address := start(t, func(o *Options) { o.Streams = 1000 })
	p := dial(t, address)
	for i := range uint32(1000) {
		p.open(2*i+1, pathStream)
	}
	eventually(t, "the streams are open", func() bool { c := server.onlyConn(); return c != nil && c.openStreams() >= 2000 })
	settings := make([]http2.Setting, framePayloadMax/6)
	for i := range settings {
		settings[i] = http2.Setting{ID: http2.SettingInitialWindowSize, Val: uint32(i)}
	}
	const frames = 300
	for range frames {
		_ = p.framer.WriteSettings(settings...)
	}
	begin := time.Now()
	p.request(2001, pathEcho, 1) // is refused after the settings
	if st, _ := p.outcome(2001); st != "RST REFUSED_STREAM" {
		t.Errorf("got %s", st)
	}
	if d := time.Since(begin); d > 5*time.Second { // 800 M looks at a stream took 20 s
		t.Errorf("%d frames of settings took %v", frames, d)
	}
}

// TestRequestsOnOldStreamsEndTheConnection: a request has a new stream.
func TestRequestsOnOldStreamsEndTheConnection(t *testing.T) {
	_, _, address := start(t)
	for _, stream := range []uint32{3, 5} {
		p := dial(t, address)
		p.request(5, pathEcho, 1)
		p.outcome(5)
		p.request(stream, pathEcho, 1)
		if code, sent := p.goneAway(); !sent || code != http2.ErrCodeProtocol {
			t.Errorf("stream %d: %v (sent: %v)", stream, code, sent)
		}
	}
}

// TestEndedConnectionsOpenNoStream: frames that were read before the end of their connection open no
// streams, which nothing would end.
func TestEndedConnectionsOpenNoStream(t *testing.T) {
	a, b := net.Pipe()
	defer b.Close()
	s := &service{}
	c := newConn(&Server{options: testOptions(), service: s, services: testServices(), conns: map[*Conn]struct{}{}}, a)
	c.client = client{s}
	c.close(errAllSent)
	block := appendLiteral(appendString([]byte{0x83, 0x86, 0x04}, pathDiscard), "content-type", "application/grpc")
	if err := c.handleBlock(1, block, false); err == nil {
		t.Error("a stream was opened")
	}
	if n := c.openStreams(); n != 0 {
		t.Errorf("%d streams are open", n)
	}
	c.server.goroutines.Wait()
}

// TestWatchdogMissesNoRequest: a request that begins while the watchdog takes its connection from
// the list is watched.
func TestWatchdogMissesNoRequest(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	server := &Server{options: testOptions(), service: &service{}}
	server.watchdog.wake = make(chan struct{}, 1)
	c := newConn(server, a)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 300_000 {
			for range i % 64 { // rests for a moment, which the watchdog notices
				_ = c.watched.Load()
			}
			if !c.execute(watched{t, c}, execution{}) || t.Failed() {
				return
			}
		}
	}()
	for {
		select {
		case <-done:
			return
		default:
			server.watchdog.mu.Lock()
			for _, at := range server.watchdog.list { // each looks as if it proceeds or rests, so no role is taken
				at.role = c.role.Load() &^ 1
			}
			server.watchdog.mu.Unlock()
			server.watchdog.tick()
		}
	}
}

// watched is a lane whose requests expect to be watched, soon.
type watched struct {
	t *testing.T
	c *Conn
}

func (watched) Rest() {}

func (w watched) Execute(Request, []byte) {
	for begin := time.Now(); !w.c.watched.Load(); {
		if time.Since(begin) > 30*time.Second {
			w.t.Error("a request is executed and not watched")
			return
		}
	}
}

// heldStream executes its first message, and then waits for a Resume that does not come.
type heldStream struct{}

func (heldStream) Execute(Lane, []byte) bool { return false }

func (heldStream) End(*status.Status) {}
