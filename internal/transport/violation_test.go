package transport

import (
	"crypto/tls"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// flood sends frames until the server has closed the connection.
func flood(p *peer, frame func() error) {
	go func() { _, _ = io.Copy(io.Discard, p.Conn) }()
	for range 100_000 {
		if frame() != nil {
			return
		}
	}
}

// TestHostileConnectionsEndWithTheirKind: the cause of the end names what the client did, so that logs and metrics can.
func TestHostileConnectionsEndWithTheirKind(t *testing.T) {
	attacks := map[Violation]func(p *peer){
		ViolationProtocol:    func(p *peer) { _ = p.framer.WriteRSTStream(5, http2.ErrCodeCancel) },
		ViolationFlowControl: func(p *peer) { _ = p.framer.WriteWindowUpdate(0, 1<<31-1) },
		ViolationFrameSize:   func(p *peer) { _, _ = p.Write(AppendFrameHeader(nil, 1<<20, http2.FrameData, 0, 1)) },
		ViolationCompression: func(p *peer) {
			_ = p.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte{0xff, 0xff, 0xff, 0xff, 0xff}, EndHeaders: true})
		},
		ViolationSilence:   func(*peer) {},
		ViolationHalfFrame: func(p *peer) { _, _ = p.Write(AppendFrameHeader(nil, 100, http2.FrameData, 0, 1)[:5]) },
		ViolationUnread:    func(p *peer) { unread(p) },
		ViolationContinuation: func(p *peer) {
			_ = p.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: p.headers(pathEcho)})
			flood(p, func() error { return p.framer.WriteContinuation(1, false, make([]byte, 1000)) })
		},
		ViolationEmptyData: func(p *peer) {
			p.open(1, pathEcho)
			flood(p, func() error { return p.framer.WriteData(1, false, nil) })
		},
		ViolationReset: func(p *peer) {
			id := uint32(1)
			flood(p, func() error {
				p.open(id, pathDiscard)
				id += 2
				return p.framer.WriteRSTStream(id-2, http2.ErrCodeCancel)
			})
		},
		ViolationSettings: func(p *peer) { flood(p, func() error { return p.framer.WriteSettingsAck() }) },
		ViolationPing:     func(p *peer) { flood(p, func() error { return p.framer.WritePing(false, [8]byte{}) }) },
		ViolationWindow:   func(p *peer) { flood(p, func() error { return p.framer.WriteWindowUpdate(0, 1) }) },
		ViolationOtherFrames: func(p *peer) {
			flood(p, func() error { return p.framer.WritePriority(1, http2.PriorityParam{StreamDep: 3}) })
		},
	}
	for kind := range Violations {
		attack := attacks[kind]
		if attack == nil {
			continue // TestConnectionsThatAreNoHTTP2EndWithTheirKind, TestHeaderListsThatAreTooLargeAreTold
		}
		t.Run(kind.String(), func(t *testing.T) {
			t.Parallel()
			s, _, address := start(t, func(o *Options) {
				switch kind {
				case ViolationSilence, ViolationHalfFrame:
					o.KeepaliveTime, o.KeepaliveTimeout = 100*time.Millisecond, 100*time.Millisecond
				case ViolationUnread:
					o.ProgressTimeout = 200 * time.Millisecond
				}
			})
			attack(dial(t, address))
			mustEndWith(t, s, kind)
		})
	}
}

// TestAViolationIsTheCauseThoughTheLastRequestEndsBesideIt: while the client is told, the last stream ends, and with it the connection.
func TestAViolationIsTheCauseThoughTheLastRequestEndsBesideIt(t *testing.T) {
	s, server, _ := start(t)
	p := silent(t, server)
	p.request(1, pathLater, 1)
	eventually(t, "the request waits", func() bool { return len(s.waiting()) == 1 })
	_ = p.framer.WriteRSTStream(5, http2.ErrCodeCancel)
	c := onlyConn(t, server)
	eventually(t, "the client is being told", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.out.writing > 0
	})
	s.waiting()[0].Answer(raw("answer"), nil)
	go func() { _, _ = io.Copy(io.Discard, p.Conn) }()
	mustEndWith(t, s, ViolationProtocol)
}

// unread asks for more than the windows allow, and opens none.
func unread(p *peer) {
	p.request(1, pathLarge, 1)
	go func() { _, _ = io.Copy(io.Discard, p.Conn) }()
}

func mustEndWith(t *testing.T, s *service, want Violation) {
	t.Helper()
	eventually(t, "the connection has ended", func() bool { return s.causes.Load() != nil })
	if kind, ok := ViolationOf(*s.causes.Load()); !ok || kind != want {
		t.Errorf("ended with %v (%v, %v), want %v", kind, ok, *s.causes.Load(), want)
	}
}

func TestConnectionsThatAreNoHTTP2EndWithTheirKind(t *testing.T) {
	for kind, begins := range map[Violation]string{ViolationPreface: "GET / HTTP/1.1\r\n\r\n", ViolationHandshake: http2.ClientPreface[:10]} {
		s, _, address := start(t, func(o *Options) { o.HandshakeTimeout = 200 * time.Millisecond })
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		if *overTLS {
			conn = tls.Client(conn, authority(t).client())
		}
		_, _ = io.WriteString(conn, begins)
		mustEndWith(t, s, kind)
		_ = conn.Close()
	}
}

// TestHeaderListsThatAreTooLargeAreTold: a block of 4 KiB that decodes to a megabyte ends its request, and the service is told.
func TestHeaderListsThatAreTooLargeAreTold(t *testing.T) {
	s, _, address := start(t)
	p := dial(t, address)
	var bomb []string
	for range 1000 {
		bomb = append(bomb, "large", strings.Repeat("l", 1000)) // once a literal, then a byte each
	}
	p.open(1, pathEcho, bomb...)
	if st, _ := p.outcome(1); st != "8" || s.headers.Load() != 1 {
		t.Errorf("status %s, %d were told", st, s.headers.Load())
	}
}
