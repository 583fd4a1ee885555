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
	ours, theirs := net.Pipe()
	defer ours.Close()
	s := &service{release: make(chan struct{})}
	server := &Server{options: testOptions(), service: s, services: testServices(), conns: map[*Conn]struct{}{}} // nothing runs that would send
	server.watchdog.wake = make(chan struct{}, 1)
	c := newConn(server, theirs)
	c.client = client{s}
	server.goroutines.Go(c.start)
	burst := bytes.NewBufferString(http2.ClientPreface)
	p := &peer{Conn: ours, t: t, framer: http2.NewFramer(burst, ours)}
	p.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	p.encoder = hpack.NewEncoder(&p.block)
	_ = p.framer.WriteSettings()
	for i := range uint32(burstMax + 1) {
		path := pathEcho
		if i == burstMax {
			path = pathBlock
		}
		p.request(1+2*i, path, 10)
	}
	go func() { _, _ = ours.Write(burst.Bytes()) }() // read in one piece, after the server's settings
	_ = ours.SetReadDeadline(time.Now().Add(20 * time.Second))
	for i := range uint32(burstMax) {
		if st, n := p.outcome(1 + 2*i); st != "0" || n != grpcPrefixBytes+10 {
			t.Fatalf("request %d: status %s, %d bytes", i, st, n)
		}
	}
	close(s.release)
	if st, _ := p.outcome(1 + 2*burstMax); st != "0" {
		t.Errorf("status %s of the last request", st)
	}
	_ = ours.Close()
	server.goroutines.Wait()
}
