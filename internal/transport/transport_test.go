package transport

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// TestOneRequestThatWaitsDelaysNoOther: requests and messages of the same connection are executed
// while one of them waits.
func TestOneRequestThatWaitsDelaysNoOther(t *testing.T) {
	s, _, address := start(t)
	p := dial(t, address)
	for i := range uint32(3) {
		p.request(1+2*i, pathBlock, 10)
	}
	p.request(7, pathEcho, 10)
	if st, n := p.outcome(7); st != "0" || n != grpcPrefixBytes+10 {
		t.Errorf("status %s, %d bytes", st, n)
	}
	p.open(9, pathStream)
	_ = p.framer.WriteData(9, true, prefixed(20))
	if st, n := p.outcome(9); st != "0" || n != grpcPrefixBytes+20 {
		t.Errorf("status %s, %d bytes", st, n)
	}
	close(s.release)
	if st, _ := p.outcome(5); st != "0" {
		t.Errorf("status %s of a request that has waited", st)
	}
}

// TestAnswersFollowWindows: an answer is sent as far as the client's windows allow, and no further.
func TestAnswersFollowWindows(t *testing.T) {
	s, _, address := start(t)
	p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
	p.request(1, pathLarge, 0)
	p.request(3, pathEcho, 5) // waits for its window as well
	eventually(t, "the answers exist", func() bool { return s.executed.Load() == 2 })
	_ = p.framer.WriteWindowUpdate(3, 10)
	if st, n := p.outcome(3); st != "0" || n != 10 {
		t.Errorf("status %s, %d bytes", st, n)
	}
	if s.held.Load() != 1 {
		t.Error("the answer that was not sent is not counted any more")
	}
	total := grpcPrefixBytes + largeBytes
	_ = p.framer.WriteWindowUpdate(1, uint32(total))
	_ = p.framer.WriteWindowUpdate(0, uint32(total))
	if st, n := p.outcome(1); st != "0" || n != total {
		t.Errorf("status %s, %d bytes of %d", st, n, total)
	}
	eventually(t, "the answer is released", func() bool { return s.held.Load() == 0 })
}

// TestWhatDoesNotProceedEnds: a message that does not come, an answer that is not taken, a client
// that is silent within a frame, and a connection that does not begin lose what they hold.
func TestWhatDoesNotProceedEnds(t *testing.T) {
	s, server, address := start(t, func(o *Options) {
		o.ProgressTimeout, o.HandshakeTimeout, o.KeepaliveTime, o.KeepaliveTimeout = 300*time.Millisecond, 300*time.Millisecond, 500*time.Millisecond, 300*time.Millisecond
	})
	t.Run("half a message", func(t *testing.T) {
		p := dial(t, address)
		p.open(1, pathEcho)
		_ = p.framer.WriteData(1, false, prefixed(100 << 10)[:1000])
		eventually(t, "the message is counted", func() bool { return s.received.Load() > 0 })
		if st, _ := p.outcome(1); st != "8" {
			t.Errorf("status %s", st)
		}
	})
	t.Run("an answer that is not taken", func(t *testing.T) {
		p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 10})
		p.request(1, pathLarge, 0)
		p.goneAway()
		eventually(t, "the answer is released", func() bool { return s.held.Load() == 0 })
	})
	t.Run("half a frame", func(t *testing.T) {
		p := dial(t, address)
		p.request(1, pathEcho, 1)
		p.outcome(1)
		_, _ = p.Write([]byte{0, 0, 100, 0})
		p.goneAway()
	})
	t.Run("no preface", func(t *testing.T) {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := io.Copy(io.Discard, conn); err != nil {
			t.Errorf("the connection is open: %v", err)
		}
	})
	eventually(t, "no connection is left", func() bool {
		server.mu.Lock()
		defer server.mu.Unlock()
		return len(server.conns) == 0
	})
}

// TestDrainServesWhatIsOpen: clients are told to open no more streams, and those that are open end.
func TestDrainServesWhatIsOpen(t *testing.T) {
	s, server, address := start(t)
	p := dial(t, address)
	p.request(1, pathBlock, 1)
	eventually(t, "the request is executed", func() bool { return s.executed.Load() == 1 })
	drained := make(chan error, 1)
	go func() { drained <- server.Drain(context.Background()) }()
	for answered := false; !answered; {
		f, err := p.framer.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		if ping, ok := f.(*http2.PingFrame); ok {
			_ = p.framer.WritePing(true, ping.Data)
			answered = true
		}
	}
	select {
	case err := <-drained:
		t.Fatalf("drained with an open request: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	close(s.release)
	st := "GOAWAY"
	for strings.HasPrefix(st, "GOAWAY") {
		st, _ = p.outcome(1)
	}
	if st != "0" {
		t.Errorf("status %s", st)
	}
	if err := <-drained; err != nil {
		t.Error(err)
	}
	p.goneAway()
}

// TestLastAnswersArriveThoughTheClientSends: what a client sends at the end of a drain does not reset
// its connection, so that answers which wait in the socket are not lost.
func TestLastAnswersArriveThoughTheClientSends(t *testing.T) {
	s, server, address := start(t)
	p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20})
	socket := p.Conn
	if encrypted, ok := socket.(*tls.Conn); ok {
		socket = encrypted.NetConn()
	}
	_ = socket.(*net.TCPConn).SetReadBuffer(4 << 10) // so the answer waits at the server
	_ = p.framer.WriteWindowUpdate(0, 1<<20)
	const size = 80_000 // more than the client's system takes
	p.open(1, pathEcho)
	for rest := prefixed(size); len(rest) > 0; {
		n := min(len(rest), framePayloadMax)
		_ = p.framer.WriteData(1, n == len(rest), rest[:n])
		rest = rest[n:]
	}
	eventually(t, "the request is executed", func() bool { return s.executed.Load() == 1 })
	drained := make(chan error, 1)
	go func() { drained <- server.Drain(context.Background()) }()
	eventually(t, "the drain has begun", server.isClosing)
	_ = p.framer.WritePing(true, [8]byte{7: drainPing})
	time.Sleep(50 * time.Millisecond) // the server has nothing more to say
	_ = p.framer.WriteWindowUpdate(0, 1)
	time.Sleep(5 * time.Millisecond) // a reset would have arrived
	st, n := p.outcome(1)
	for strings.HasPrefix(st, "GOAWAY") {
		var more int
		st, more = p.outcome(1)
		n += more
	}
	if st != "0" || n != grpcPrefixBytes+size {
		t.Errorf("status %s, %d bytes", st, n)
	}
	p.goneAway()
	_ = p.Close()
	if err := <-drained; err != nil {
		t.Error(err)
	}
}

// TestMessagesInManyFrames: a message is the same however it is cut.
func TestMessagesInManyFrames(t *testing.T) {
	_, _, address := start(t)
	p := dial(t, address)
	for i, size := range []int{1, 4, 5, 100, 5000, 40000} {
		for j, path := range []string{pathEcho, pathStream} {
			stream := uint32(4*i + 2*j + 1)
			p.open(stream, path)
			b := prefixed(500)
			for len(b) > size {
				_ = p.framer.WriteDataPadded(stream, false, b[:size], make([]byte, i))
				b = b[size:]
			}
			_ = p.framer.WriteData(stream, false, b)
			_ = p.framer.WriteData(stream, true, nil)
			if st, n := p.outcome(stream); st != "0" || n != grpcPrefixBytes+500 {
				t.Errorf("%s in frames of %d: status %s, %d bytes", path, size, st, n)
			}
		}
	}
}

// TestLargeMessagesPassTheWindow: a message may be larger than the window, if it is admitted.
func TestLargeMessagesPassTheWindow(t *testing.T) {
	s, _, address := start(t, func(o *Options) { o.StreamWindow, o.ConnWindow = 70_000, 80_000 })
	for refused, want := range []string{"0", "8"} {
		s.refuse.Store(refused == 1)
		for _, path := range []string{pathEcho, pathStream} {
			t.Run(fmt.Sprint(path, refused), func(t *testing.T) {
				p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20})
				_ = p.framer.WriteWindowUpdate(0, 1<<20)
				p.open(1, path)
				windows := map[uint32]int{0: 65535, 1: 65535}
				const length = 500_000
				b := prefixed(length)
				for len(b) > 0 {
					if n := min(len(b), 16<<10, windows[0], windows[1]); n > 0 {
						_ = p.framer.WriteData(1, n == len(b), b[:n])
						b = b[n:]
						windows[0] -= n
						windows[1] -= n
						continue
					}
					f, err := p.framer.ReadFrame()
					if err != nil {
						t.Fatal(err)
					}
					switch f := f.(type) {
					case *http2.WindowUpdateFrame:
						windows[f.StreamID] += int(f.Increment)
					case *http2.SettingsFrame:
						if v, ok := f.Value(http2.SettingInitialWindowSize); ok {
							windows[1] += int(v) - 65535
						}
					case *http2.MetaHeadersFrame:
						if f.StreamEnded() && refused == 1 {
							return
						}
						if f.StreamEnded() {
							t.Fatalf("ended early: %v", f.Fields)
						}
					}
				}
				if st, n := p.outcome(1); st != want || n != grpcPrefixBytes+length {
					t.Errorf("status %s, %d bytes", st, n)
				}
			})
		}
	}
}
