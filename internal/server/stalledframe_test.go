package server

import (
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/config"
)

// sendWithin sends parts of a message on stream 1, each with the beginning of the frame of the next, so that its client is always within a frame, and passes
// a step of time after each. It returns how many were sent when the stream ended, at most all.
func (in *inbound) sendWithin(t *testing.T, r *receiving, message []byte, part, parts int) (sent int) {
	t.Helper()
	next := func() []byte {
		b := frame(frameData, 0, 1, message[:part])
		message = message[part:]
		return b
	}
	const begun = frameHeaderBytes + 1
	at := next()
	follow := func(b []byte) {
		t.Helper()
		if err := in.follow(b); err != nil {
			t.Fatal(err)
		}
	}
	follow(at[:begun])
	for sent < parts {
		r.step.Add(1)
		if in.findStalled() {
			t.Error("a stream has ended within a frame: gRPC may yet get all of its message")
		}
		rest := at[begun:]
		at = next()
		follow(append(rest[:len(rest):len(rest)], at[:begun]...))
		sent++
		if _, open := in.open[1]; !open {
			return sent
		}
	}
	return sent
}

// TestAMessageMustProceedThoughItsClientIsWithinAFrame whenever that is checked: pings are answered by the end of any frame.
func TestAMessageMustProceedThoughItsClientIsWithinAFrame(t *testing.T) {
	const frameBytes, parts, most = 16 << 10, 40, progressBytes / stallSteps
	for name, c := range map[string]struct {
		part           int
		wanted, closed bool // the place is; the windows are
		want           int
	}{
		"too slowly":                  {part: frameBytes, want: stallSteps + 1},
		"two bytes at a time":         {part: 2, want: stallSteps + 1},
		"fast enough":                 {part: most, want: parts},
		"as the windows let it":       {part: frameBytes, closed: true, want: parts},
		"too slowly for the place":    {part: most, wanted: true, want: stallSteps + 1},
		"although it is wanted first": {part: frameBytes, wanted: true, closed: true, want: stallSteps + 1},
	} {
		r := newReceiving(64 << 20)
		in, other := newFollowed(t, r), newFollowedOf(t, r, "other")
		in.answerAll()
		in.change(1, func(m *receivedStream) { m.answered = true })
		message := prefixed(int(r.large.limit/2) + 1)
		if err := in.follow(frame(frameData, 0, 1, message[:100])); err != nil {
			t.Fatal(err)
		}
		if c.wanted && r.beside.take(other, &other.claim, 1) {
			t.Fatal("the place is given twice")
		}
		if in.window = 1 << 30; c.closed {
			in.window = 0
		}
		in.change(1, func(m *receivedStream) { m.window = 1 << 30 })
		if got := in.sendWithin(t, r, message[100:], c.part, parts); got != c.want {
			t.Errorf("%s: %d parts of %d bytes were sent, want %d", name, got, c.part, c.want)
		}
		if ended := c.want < parts; (r.beside.bytes() == 0) != ended || len(in.ending) > 1 || (len(in.ending) == 1) != ended {
			t.Errorf("%s: %d bytes have the place, %d streams end", name, r.beside.bytes(), len(in.ending))
		}
	}
}

// TestACompleteMessageLeavesThePlaceThoughItsClientIsWithinAFrame of the messages after it, while its handler waits for the client.
func TestACompleteMessageLeavesThePlaceThoughItsClientIsWithinAFrame(t *testing.T) {
	for _, waits := range []bool{false, true} {
		r := newReceiving(64 << 20)
		in, other := newFollowed(t, r), newFollowedOf(t, r, "other")
		in.answerAll()
		if !r.beside.take(in, &in.claim, 1<<20) || r.beside.take(other, &other.claim, 1) {
			t.Fatal("the place is not the first one's")
		}
		in.change(1, func(m *receivedStream) {
			m.answered, m.library, m.beside = true, &libraryStream{waits: waits}, true
			m.untaken = []largeMessage{{bytes: 1 << 20, placed: true, step: r.step.Load()}}
		})
		const parts = 20
		want := parts
		if waits {
			want = stallSteps + 1
		}
		var small []byte
		for range parts + 1 {
			small = append(small, prefixed(1)...)
		}
		if got := in.sendWithin(t, r, small, grpcPrefixBytes+1, parts); got != want || (r.beside.bytes() == 0) != waits {
			t.Errorf("its handler waits: %v: it has ended after %d messages, want %d", waits, got, want)
		}
	}
}

// TestAStreamEndsAtTheEndOfAFrameThatBringsTooLittle, with a reason, and its connection goes on.
func TestAStreamEndsAtTheEndOfAFrameThatBringsTooLittle(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Transport, c.MessageTimeout = config.TransportGRPC, 200*time.Millisecond })
	c := h.dialRaw(t)
	message := prefixed(int(h.receiving.large.limit/2) + 1)
	const part, begun = 1 << 10, frameHeaderBytes + 1
	c.begin(1, methodPut, "120S")
	at := frame(frameData, 0, 1, message[:part])
	c.send(at[:begun])
	stop, stopped := make(chan struct{}), make(chan []byte)
	go func() {
		for rest := at[begun:]; ; {
			select {
			case <-stop:
				stopped <- rest
				return
			case <-time.After(10 * time.Millisecond):
			}
			_, _ = c.Write(append(rest[:len(rest):len(rest)], at[:begun]...)) // the next read fails, too
			rest = frame(frameData, 0, 1, make([]byte, part))[begun:]
		}
	}()
	if got := c.reasonOf(t, 1); got != "MESSAGE_INCOMPLETE" {
		t.Errorf("a message that comes too slowly: %q", got)
	}
	close(stop)
	c.send(<-stopped)
	if n := h.receiving.beside.bytes(); n != 0 {
		t.Errorf("it keeps the place: %d bytes", n)
	}
	c.begin(3, "/epochkv.v1.KVService/None", "20S")
	if got := c.reasonOf(t, 3); got != "UNIMPLEMENTED" {
		t.Errorf("the connection does not go on: %q", got)
	}
}
