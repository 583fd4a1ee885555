package server

import (
	"net"
	"testing"

	"github.com/epochkv/epochkv/internal/testseed"
)

// endlessConn always has the same bytes to read.
type endlessConn struct {
	net.Conn
	bytes []byte
	at    int
	most  int // bytes of a read
}

func (c *endlessConn) Read(b []byte) (int, error) {
	n := copy(b[:min(len(b), c.most)], c.bytes[c.at:])
	c.at = (c.at + n) % len(c.bytes)
	return n, nil
}

// TestConnectionsOfTheLibraryLetOthersRun: however many frames their clients have, which execute nothing, however large they are, in however small records
// of TLS they come, and however many fields they have.
func TestConnectionsOfTheLibraryLetOthersRun(t *testing.T) {
	const unknown = 0xff
	for _, c := range []struct {
		name                       string
		kind                       byte
		payload, most, count, turn int // the payload and the most of a read, in bytes; frames, and of them in a turn
	}{
		{"small", unknown, 4, 16 << 10, 10_000, 64},
		{"large", unknown, 16 << 10, 16 << 10, 10_000, 2},
		{"a byte in a record", unknown, 16 << 10, 1, 100, 1},
		{"headers", frameHeaders, 8 << 10, 16 << 10, 1_000, 1},
		{"more headers", frameContinued, 8 << 10, 16 << 10, 1_000, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			frame := make([]byte, 9+c.payload)
			frame[0], frame[1], frame[2], frame[3] = byte(c.payload>>16), byte(c.payload>>8), byte(c.payload), c.kind
			conn := newLibraryConn(&countedConn{Conn: &endlessConn{bytes: frame, most: c.most}, info: &connection{}})
			conn.at = frames{} // it has no preface
			header, body := make([]byte, 9), make([]byte, c.payload)
			ran := testseed.TurnsBeside(func() {
				for range c.count {
					for _, part := range [][]byte{header, body} {
						for n := 0; n < len(part); {
							m, err := conn.Read(part[n:])
							must(t, err)
							n += m
						}
					}
				}
			})
			if least := int64(c.count / c.turn / 2); ran < least {
				t.Errorf("others ran %d times while %d frames were read, want %d", ran, c.count, least)
			}
		})
	}
}
