package transport

import (
	"bytes"
	"io"
	"net"
	"testing"
	"testing/iotest"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/epochkv/epochkv/internal/testseed"
)

// TestAReaderLetsOthersRun: whatever its client sends, as fast as the server takes it. The frames execute little, and cost much.
func TestAReaderLetsOthersRun(t *testing.T) {
	fields := bytes.Repeat([]byte{0x80 | 2}, 8<<10) // of the static table
	small := bytes.Repeat(make([]byte, grpcPrefixBytes), 3000)
	for _, c := range []struct {
		name  string
		send  func(*peer)
		reads func(io.Reader) io.Reader // nil: as much as there is
		turns int64
	}{
		{"headers of many fields", func(p *peer) {
			for i := range uint32(100) {
				_ = p.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1 + 2*i, BlockFragment: fields, EndHeaders: true, EndStream: true})
			}
		}, nil, 100},
		{"settings", func(p *peer) {
			for range 100 {
				_ = p.framer.WriteSettings(make([]http2.Setting, 8<<10/6)...)
			}
		}, nil, 100},
		{"reads of a byte", func(p *peer) {
			for range 100 {
				_ = p.framer.WriteRawFrame(0xff, 0, 0, make([]byte, 1<<10))
			}
		}, iotest.OneByteReader, 100 << 10 / yieldFrames},
		{"small messages", func(p *peer) {
			p.open(1, pathStream)
			for range 10 {
				_ = p.framer.WriteData(1, false, small)
			}
		}, nil, 10 * 3000 * MessageFrames / yieldFrames},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &service{release: make(chan struct{})}
			server := &Server{options: testOptions(), service: s, services: testServices(), conns: map[*Conn]struct{}{}}
			server.watchdog.wake = make(chan struct{}, 1)
			var sent bytes.Buffer
			sent.WriteString(http2.ClientPreface)
			p := &peer{framer: http2.NewFramer(&sent, nil)}
			p.encoder = hpack.NewEncoder(&p.block)
			_ = p.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: windowMax})
			_ = p.framer.WriteWindowUpdate(0, 1<<30)
			c.send(p)
			var reader io.Reader = &sent
			if c.reads != nil {
				reader = c.reads(reader)
			}
			ours, theirs := net.Pipe()
			t.Cleanup(func() { _ = ours.Close() })
			conn := newConn(server, readyConn{theirs, reader})
			conn.client = client{s}
			if turns := testseed.TurnsBeside(conn.start); turns < c.turns/2 {
				t.Errorf("others ran %d times, want %d", turns, c.turns)
			}
			if sent.Len() > 0 {
				t.Errorf("%d bytes were not read", sent.Len())
			}
		})
	}
}

// TestAListIsNotDecodedWhenItIsTooLarge: beyond the limit nothing is made of the fields of a block, and the next block is decoded again.
func TestAListIsNotDecodedWhenItIsTooLarge(t *testing.T) {
	var h headers
	h.init(1 << 10)
	many := bytes.Repeat([]byte{0x80 | 2}, 1000) // :method GET
	list, err := h.decode(many)
	if err != nil {
		t.Fatal(err)
	}
	if size := 42 * (1<<10/42 + 1); !list.tooLarge() || list.size != size {
		t.Errorf("a size of %d was counted, want %d", list.size, size)
	}
	list, err = h.decode(many[:1])
	if err != nil {
		t.Fatal(err)
	}
	if list.tooLarge() || list.method != "GET" {
		t.Errorf("after it %+v was decoded", list)
	}
}

// TestYieldingConnectionsLetOthersRun: before each read, also when it is their end that is read.
func TestYieldingConnectionsLetOthersRun(t *testing.T) {
	const size = 1000
	conn := YieldingConn{readyConn{nil, iotest.OneByteReader(bytes.NewReader(make([]byte, size)))}}
	if turns := testseed.TurnsBeside(func() {
		if n, err := io.Copy(io.Discard, conn); n != size || err != nil {
			t.Errorf("%d bytes, %v", n, err)
		}
	}); turns < size/2 {
		t.Errorf("others ran %d times", turns)
	}
}
