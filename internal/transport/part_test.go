package transport

import (
	"bytes"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
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
	if b = append(b, payload[1:]...); len(b) != all+part-1 || cap(b) != room || room > all+part+all/100 || moved > 1 {
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

// TestTheBeginningOfTheNextMessageKeepsNoLargeOne: it may wait for as long as a message may take, and as many streams as there may be have one.
func TestTheBeginningOfTheNextMessageKeepsNoLargeOne(t *testing.T) {
	const large = 200 << 10
	one := prefixed(10)
	few := bytes.Repeat(one, 500) // about what the buffer of the large message has room for
	for name, test := range map[string]struct {
		path         string
		before, next []byte // the large message
		waits        int
		refused      bool // the rest of the large message does not come
	}{
		"a byte on a stream of messages":       {path: pathStream, next: few[:1], waits: 1},
		"messages that wait":                   {path: pathHeld, next: few, waits: len(few)},
		"a byte on a stream of a call":         {path: pathChat, next: few[:1], waits: 1},
		"messages after one that is answered":  {path: pathChat, next: few, waits: len(few) - len(one)}, // the answer waits, after that to the large one
		"messages before one that is given up": {path: pathIdle, before: few, waits: len(few), refused: true},
	} {
		t.Run(name, func(t *testing.T) {
			_, server, address := start(t)
			p := dial(t, address)
			p.open(1, test.path)
			data := append(append(bytes.Clone(test.before), prefixed(large)...), test.next...)
			waits := test.waits
			if test.refused {
				data = data[:len(data)-1]
				waits = len(data)
			}
			for rest := data; len(rest) > 0; {
				n := len(rest)
				if n > framePayloadMax {
					n = min(framePayloadMax, n-framePayloadMax/2) // the end is in one frame with what follows
				}
				_ = p.framer.WriteData(1, false, rest[:n])
				rest = rest[n:]
			}
			c := onlyConn(t, server)
			eventually(t, "everything has come, and the large message is taken", func() bool { return c.untakenOf(1) == waits })
			c.mu.Lock()
			defer c.mu.Unlock()
			s := c.streams[1]
			rest := s.message.body
			if k := s.call; k != nil {
				if test.refused {
					k.refuseRestLocked(status.New(codes.Canceled, "the rest does not come"))
				}
				rest = k.received
			}
			if len(rest) != test.waits || cap(rest) > 2*len(rest)+len(one) {
				t.Errorf("%d bytes wait, and have room for %d; want %d in an array of their own", len(rest), cap(rest), test.waits)
			}
		})
	}
}

// TestSmallMessagesOfOneBufferAreRarelyMoved: each is taken from the beginning of what waits. The array has little else at any time, and what was copied in all
// is no more than it was.
func TestSmallMessagesOfOneBufferAreRarelyMoved(t *testing.T) {
	const all, size = 256 << 10, 100
	rest, array, before := make([]byte, all), all, 0
	moves, moved := 0, 0
	for i := range rest {
		rest[i] = byte(i / size)
	}
	for i := 0; len(rest) > size; i++ {
		if rest[0] != byte(i) || rest[size-1] != byte(i) {
			t.Fatalf("message %d is another", i)
		}
		last := &rest[len(rest)-1]
		before += size
		rest = ownArray(rest[size:], &before)
		if &rest[len(rest)-1] != last {
			array = cap(rest)
			moves, moved = moves+1, moved+len(rest)
		}
		if before+cap(rest) != array || array > 2*len(rest)+framePayloadMax {
			t.Fatalf("%d bytes wait in an array of %d, of which %d are known", len(rest), array, before+cap(rest))
		}
	}
	if rest = ownArray(rest[:0], &before); rest != nil || before != 0 || moved > all || moves > 10 {
		t.Errorf("%d moves of %d bytes in all; %d bytes are left", moves, moved, before)
	}
}
