package transport

import (
	"net"
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// TestSettingsAreTheFirstFrame, also of a server that stops before a connection has begun: a client takes anything else for another protocol, and does
// not try again.
func TestSettingsAreTheFirstFrame(t *testing.T) {
	server := &Server{options: testOptions(), service: new(service), services: testServices(), conns: map[*Conn]struct{}{}}
	server.watchdog.wake = make(chan struct{}, 1)
	ours, theirs := net.Pipe()
	defer ours.Close()
	defer theirs.Close()
	c := newConn(server, ours)
	c.client = server.service.Connect(c)
	go c.drain()
	_ = theirs.SetReadDeadline(time.Now().Add(10 * time.Second))
	framer := http2.NewFramer(nil, theirs)
	for i, want := range []http2.FrameType{http2.FrameSettings, http2.FrameWindowUpdate, http2.FrameGoAway} {
		f, err := framer.ReadFrame()
		if err != nil || f.Header().Type != want {
			t.Fatalf("frame %d is %v, %v; want %v", i, f, err, want)
		}
	}
}
