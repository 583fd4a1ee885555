package transport

import (
	"testing"

	"golang.org/x/net/http2"
)

// pending is how much the streams of a connection have pending, and whether the connection counts as much.
func (c *Conn) pendingOfStreams() (bytes int, right bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.streams {
		bytes += len(s.pending)
	}
	return bytes, bytes == c.pending
}

// TestSmallMessagesOfManyStreamsHaveABoundTogether: what the streams of a client that takes nothing have pending is bounded for the
// connection, beside a little for each stream. When the client takes it, each stream goes on to its end.
func TestSmallMessagesOfManyStreamsHaveABoundTogether(t *testing.T) {
	const streams, messages, size = 60, 40, 1000
	for name, c := range map[string]struct {
		path   string
		answer int // to a message
	}{"streams of messages": {pathKiBs, 3 << 10}, "calls": {pathChat, size}} {
		t.Run(name, func(t *testing.T) {
			_, server, address := start(t, func(o *Options) { o.ConnWindow = 16 << 20 })
			p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
			for i := range uint32(streams) {
				p.open(2*i+1, c.path)
				for k := range messages {
					_ = p.framer.WriteData(2*i+1, k == messages-1, prefixed(size))
				}
			}
			most := pendingMax + streams*(pendingLeast+c.answer+grpcPrefixBytes)
			last, same := 0, 0
			eventually(t, "the answers have filled the bound, and no more come", func() bool {
				conn := server.onlyConn()
				if conn == nil {
					return false
				}
				bytes, right := conn.pendingOfStreams()
				if bytes > most || !right {
					t.Fatalf("%d bytes are pending; %d would be the most, and are counted: %v", bytes, most, right)
				}
				if same++; bytes != last {
					last, same = bytes, 0
				}
				return bytes > pendingMax && same > 100
			})
			_ = p.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: windowMax})
			_ = p.framer.WriteWindowUpdate(0, windowMax-firstWindow)
			data, ended := 0, 0
			for ended < streams {
				f, err := p.framer.ReadFrame()
				if err != nil {
					t.Fatalf("after %d bytes, and %d streams: %v", data, ended, err)
				}
				switch f := f.(type) {
				case *http2.MetaHeadersFrame:
					if f.StreamEnded() {
						ended++
					}
				case *http2.DataFrame:
					data += len(f.Data())
				}
			}
			if want := streams * messages * (c.answer + grpcPrefixBytes); data != want {
				t.Errorf("%d bytes have come, want %d", data, want)
			}
			if bytes, right := server.onlyConn().pendingOfStreams(); bytes != 0 || !right {
				t.Errorf("%d bytes are pending, and are counted: %v", bytes, right)
			}
		})
	}
}

// TestPendingBytesOfStreamsThatEndAreForgotten, of whichever kind and however they end.
func TestPendingBytesOfStreamsThatEndAreForgotten(t *testing.T) {
	_, server, address := start(t)
	p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 100})
	paths := []string{pathEcho, pathLarge, pathKiB, pathKiBs, pathChat, pathText, pathEndless, pathUnary}
	for i, path := range paths {
		p.request(uint32(2*i+1), path, 2000)
	}
	eventually(t, "answers are pending", func() bool {
		conn := server.onlyConn()
		if conn == nil {
			return false
		}
		bytes, right := conn.pendingOfStreams()
		if !right {
			t.Fatalf("%d bytes are pending, and not as many are counted", bytes)
		}
		return bytes > largeBytes
	})
	for i := range paths {
		_ = p.framer.WriteRSTStream(uint32(2*i+1), http2.ErrCodeCancel)
	}
	eventually(t, "nothing is pending", func() bool {
		bytes, right := server.onlyConn().pendingOfStreams()
		if !right {
			t.Fatalf("%d bytes are pending, and not as many are counted", bytes)
		}
		return bytes == 0
	})
}
