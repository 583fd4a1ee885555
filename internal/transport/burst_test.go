package transport

import (
	"bytes"
	"net"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// TestAnswersOfALongBurstAreSentInParts: of requests that come at once, the first burstMax are answered while a later one is still executed.
func TestAnswersOfALongBurstAreSentInParts(t *testing.T) {
	s, server, p, burst := unsent(t)
	for i := range uint32(burstMax + 1) {
		path := pathEcho
		if i == burstMax {
			path = pathBlock
		}
		p.request(1+2*i, path, 10)
	}
	go func() { _, _ = p.Write(burst.Bytes()) }() // read in one piece, after the server's settings
	for i := range uint32(burstMax) {
		if st, n := p.outcome(1 + 2*i); st != "0" || n != grpcPrefixBytes+10 {
			t.Fatalf("request %d: status %s, %d bytes", i, st, n)
		}
	}
	close(s.release)
	if st, _ := p.outcome(1 + 2*burstMax); st != "0" {
		t.Errorf("status %s of the last request", st)
	}
	_ = p.Close()
	server.goroutines.Wait()
}

// TestAnswersAreSentWhenTheReaderIsRelieved: of requests that come at once, the first is answered while those after it are executed, each until
// another goroutine gets the role of the reader.
func TestAnswersAreSentWhenTheReaderIsRelieved(t *testing.T) {
	s, server, p, burst := unsent(t)
	p.request(1, pathEcho, 10)
	p.request(3, pathBlock, 10)
	p.request(5, pathBlock, 10)
	go func() { _, _ = p.Write(burst.Bytes()) }()
	for _, kind := range []http2.FrameType{http2.FrameSettings, http2.FrameWindowUpdate} {
		if f, err := p.framer.ReadFrame(); err != nil || f.Header().Type != kind {
			t.Fatalf("a frame of the greeting is %v, %v", f, err)
		}
	}
	eventually(t, "the first two are executed", func() bool { return s.executed.Load() == 2 })
	for range 2 {
		server.watchdog.tick()
	}
	if st, n := p.outcome(1); st != "0" || n != grpcPrefixBytes+10 {
		t.Errorf("status %s, %d bytes", st, n)
	}
	close(s.release)
	p.outcome(5)
	_ = p.Close()
	server.goroutines.Wait()
}

// TestAnswersAreSentWhileMessagesWait: of messages that come at once, the first is answered while the next one is executed, although nothing comes
// after which the reader would send the answer.
func TestAnswersAreSentWhileMessagesWait(t *testing.T) {
	waits := append(prefixed(4)[:grpcPrefixBytes], "wait"...)
	for name, frames := range map[string]int{"in one frame": 1, "in two frames": 2} {
		t.Run(name, func(t *testing.T) {
			s, server, p, burst := unsent(t)
			server.options.HandOverAfter = 1 // every message takes longer
			p.open(1, pathStream)
			for i := range frames {
				_ = p.framer.WriteData(1, i == frames-1, bytes.Repeat(waits, 2/frames))
			}
			go func() { _, _ = p.Write(burst.Bytes()) }()
			answered := make(chan error)
			go func() {
				for {
					f, err := p.framer.ReadFrame()
					if _, is := f.(*http2.DataFrame); is || err != nil {
						answered <- err
						return
					}
				}
			}()
			var c *Conn
			eventually(t, "everything is read", func() bool {
				w := &server.watchdog
				w.tick()
				w.mu.Lock()
				defer w.mu.Unlock()
				if len(w.list) > 0 {
					c = w.list[0].conn
				}
				return c != nil && c.reads.Load() == uint64(2+frames)
			})
			s.release <- struct{}{}
			if err := <-answered; err != nil {
				t.Fatal(err)
			}
			close(s.release)
			if st, n := p.outcome(1); st != "0" || n != len(waits) {
				t.Errorf("status %s, %d bytes after the first answer", st, n)
			}
			_ = p.Close()
			server.goroutines.Wait()
		})
	}
}

// unsent is a connection of a server of which nothing runs that would send by itself. What its client sends is in the buffer first.
func unsent(t *testing.T) (*service, *Server, *peer, *bytes.Buffer) {
	t.Helper()
	ours, theirs := net.Pipe()
	t.Cleanup(func() { _ = ours.Close() })
	_ = ours.SetDeadline(time.Now().Add(20 * time.Second))
	s := &service{release: make(chan struct{})}
	server := &Server{options: testOptions(), service: s, services: testServices(), conns: map[*Conn]struct{}{}}
	server.watchdog.wake = make(chan struct{}, 1)
	c := newConn(server, theirs)
	c.client = client{s}
	server.goroutines.Go(c.start)
	burst := bytes.NewBufferString(http2.ClientPreface)
	p := &peer{Conn: ours, t: t, framer: http2.NewFramer(burst, ours)}
	p.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	p.encoder = hpack.NewEncoder(&p.block)
	_ = p.framer.WriteSettings()
	return s, server, p, burst
}
