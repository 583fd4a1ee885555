package server

import (
	"bytes"
	"encoding/binary"
	"io"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/epochkv/epochkv/internal/config"
)

// TestAnAnswerKeepsTheRoomOfAMessageThatArrives: the events of a watch are sent while the next request of its client arrives. That counts until it has
// been received.
func TestAnAnswerKeepsTheRoomOfAMessageThatArrives(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with)
		c := h.deafWatch(t, "w", h.put(t, "k", ""))
		framer := http2.NewFramer(io.Discard, c.Conn)
		awaitData := func(part string) {
			t.Helper()
			_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
			for {
				f, err := framer.ReadFrame()
				if err != nil {
					t.Fatal(err)
				}
				if d, ok := f.(*http2.DataFrame); ok && bytes.Contains(d.Data(), []byte(part)) {
					return
				}
			}
		}
		awaitData("") // it watches
		for i, size := range []int64{h.receiving.large.limit / 4, int64(messageBytesMax(&h.config))} {
			if i > 0 {
				_ = c.Close()
				eventually(t, "all is released", func() bool { return h.receiving.reserved() == 0 })
				c = h.deafWatch(t, "w", h.put(t, "k", ""))
				framer = http2.NewFramer(io.Discard, c.Conn)
				awaitData("")
			}
			counted := func() bool { return h.receiving.reserved()+h.receiving.beside.bytes() == size }
			c.send(frame(frameData, 0, 1, append(binary.BigEndian.AppendUint32([]byte{0}, uint32(size)), make([]byte, 3000)...)))
			eventually(t, "the message is being received", counted)
			h.put(t, "wanted", "")
			awaitData("wanted")
			if !counted() {
				t.Errorf("%d bytes are reserved, and %d beside the share, while %d arrive", h.receiving.reserved(), h.receiving.beside.bytes(), size)
			}
		}
	})
}
