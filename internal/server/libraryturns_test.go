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
}

func (c *endlessConn) Read(b []byte) (int, error) {
	n := copy(b, c.bytes[c.at:])
	c.at = (c.at + n) % len(c.bytes)
	return n, nil
}

// TestConnectionsOfTheLibraryLetOthersRun: however many frames their clients have, which execute nothing, and however large they are.
func TestConnectionsOfTheLibraryLetOthersRun(t *testing.T) {
	for name, payload := range map[string]int{"small": 4, "large": 16 << 10} {
		t.Run(name, func(t *testing.T) {
			frame := make([]byte, 9+payload)
			frame[0], frame[1], frame[2], frame[3] = byte(payload>>16), byte(payload>>8), byte(payload), 0xff // of an unknown type
			conn := newLibraryConn(&countedConn{Conn: &endlessConn{bytes: frame}, info: &connection{}})
			conn.at = frames{} // it has no preface
			const count = 10_000
			header, body := make([]byte, 9), make([]byte, payload)
			ran := testseed.TurnsBeside(func() {
				for range count {
					for _, part := range [][]byte{header, body} {
						for n := 0; n < len(part); {
							m, err := conn.Read(part[n:])
							must(t, err)
							n += m
						}
					}
				}
			})
			if least := int64(max(count/libraryTurnFrames, count*(9+payload)/libraryTurnBytes) / 2); ran < least {
				t.Errorf("others ran %d times while %d frames were read, want %d", ran, count, least)
			}
		})
	}
}
