package server

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/config"
)

// TestALargeMessageThatIsCutOffEndsItsStream: nothing of it counts any more, whether the server has answered, or the client takes answers, or not.
func TestALargeMessageThatIsCutOffEndsItsStream(t *testing.T) {
	large := prefixed(33 << 20)[:100]
	for name, c := range map[string]struct{ first, end []byte }{
		"with its last frame":           {end: frame(frameData, flagEndStream, 1, large)},
		"with an empty frame":           {first: frame(frameData, 0, 1, large), end: frame(frameData, flagEndStream, 1, nil)},
		"with padding":                  {first: frame(frameData, 0, 1, large), end: frame(frameData, flagEndStream|flagPadded, 1, []byte{1, 0})},
		"with trailers":                 {first: frame(frameData, 0, 1, large), end: frame(frameHeaders, flagEndHeaders|flagEndStream, 1, nil)},
		"one that has room":             {end: frame(frameData, flagEndStream, 1, prefixed(1 << 20)[:100])},
		"one after a complete message":  {first: frame(frameData, 0, 1, prefixed(100)), end: frame(frameData, flagEndStream, 1, large)},
		"one that is refused with that": {end: frame(frameData, flagEndStream, 1, prefixed(65 << 20)[:100])},
	} {
		for _, answered := range []bool{false, true} {
			r := newReceiving(64 << 20)
			in := newFollowed(t, r)
			in.change(1, func(m *receivedStream) { m.answered, m.library = answered, &libraryStream{waits: true} })
			for _, b := range [][]byte{c.first, c.end} {
				if err := in.follow(append([]byte(nil), b...)); err != nil {
					t.Fatal(err)
				}
			}
			_, open := in.open[1]
			if n := r.reserved(); n != 0 || r.beside.bytes() != 0 || open || len(in.ending) != 1 || len(in.telling) == 0 {
				t.Errorf("%s: %d bytes, and the place: %d; the stream is open: %v; %d streams end", name, n, r.beside.bytes(), open, len(in.ending))
			}
		}
	}
}

// TestASmallMessageThatIsCutOffIsLeftToTheLibrary, which has a status for it.
func TestASmallMessageThatIsCutOffIsLeftToTheLibrary(t *testing.T) {
	r := newReceiving(64 << 20)
	in := newFollowed(t, r)
	for stream, part := range map[uint32]int{1: 2, 3: 100} {
		if err := in.follow(frame(frameData, flagEndStream, stream, prefixed(receivedBytesMin - 1)[:part])); err != nil {
			t.Fatal(err)
		}
		if _, open := in.open[stream]; !open || len(in.ending) > 0 {
			t.Errorf("after %d bytes the stream was ended", part)
		}
	}
}

// TestAMessageThatIsCutOffKeepsNoPlace: its client takes nothing of the answers before, so that its end would wait as long as the client likes.
func TestAMessageThatIsCutOffKeepsNoPlace(t *testing.T) {
	before := keepaliveParams
	t.Cleanup(func() { keepaliveParams = before })
	keepaliveParams.Time = time.Hour // the client answers no pings
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with, func(c *config.Config) { c.MessageTimeout = time.Hour })
		c := h.deafWatchAtItsWindow(t, "w")
		prefix := binary.BigEndian.AppendUint32([]byte{0}, uint32(messageBytesMax(&h.config)))
		c.send(frame(frameData, 0, 1, prefix))
		if h.config.Transport == config.TransportGRPC { // the other one counts a message when its handler takes it
			eventually(t, "it has the place", func() bool { return h.receiving.beside.bytes() > 0 })
		}
		c.send(frame(frameData, flagEndStream, 1, nil))
		eventually(t, "the place is free", func() bool { return h.receiving.beside.bytes() == 0 && h.receiving.reserved() == 0 })
		eventually(t, "the stream has ended", func() bool { return h.feed.streams.Load() == 0 })
	})
}
