package transport

import (
	"bytes"
	"testing"
)

// TestALargeMessageHasItsMemoryOnce: a buffer that grew with it would be in memory twice each time. Of a message of which little has come
// there is little, whatever length it declares.
func TestALargeMessageHasItsMemoryOnce(t *testing.T) {
	const all, part = 8 << 20, 16 << 10
	var b []byte
	payload := bytes.Repeat([]byte("m"), part)
	moved, room := 0, 0
	for n := part; n <= all; n += part {
		if b = appendPart(b, payload, all); cap(b) != room {
			if room = cap(b); n > all/8 {
				moved++
			}
		}
		if n < all/8 && cap(b) > all/4 {
			t.Fatalf("there are %d bytes for %d that have come", cap(b), n)
		}
	}
	if len(b) != all || cap(b) != all || moved > 1 {
		t.Errorf("%d bytes are in %d, which were moved %d times after an eighth had come", len(b), cap(b), moved)
	}
}

// TestAStreamKeepsNoLargeRequest: its answer may wait for as long as the client likes.
func TestAStreamKeepsNoLargeRequest(t *testing.T) {
	s, server, address := start(t, func(o *Options) { o.StreamWindow, o.ConnWindow = 1<<20, 1<<20 })
	p := dial(t, address)
	_ = p.framer.WriteWindowUpdate(0, 1<<20)
	p.open(1, pathLater)
	message := prefixed(300 << 10)
	c := onlyConn(t, server)
	for len(message) > 0 {
		n := min(len(message), framePayloadMax)
		if err := p.framer.WriteData(1, n == len(message), message[:n]); err != nil {
			t.Fatal(err)
		}
		message = message[n:]
	}
	eventually(t, "it is executed", func() bool { return len(s.waiting()) == 1 })
	c.mu.Lock()
	if body := c.streams[1].message.body; cap(body) > freeBytesMax {
		t.Errorf("the stream keeps %d bytes", cap(body))
	}
	c.mu.Unlock()
	s.waiting()[0].Answer(raw("answer"), nil)
	s.waiting()[0].Flush()
	if status, _ := p.outcome(1); status != "0" {
		t.Errorf("status %q", status)
	}
}
