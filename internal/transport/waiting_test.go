package transport

import (
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// TestMessagesThatWaitAreCounted: what has come on a stream, and was not taken, counts as what is being received.
func TestMessagesThatWaitAreCounted(t *testing.T) {
	for _, path := range []string{pathIdle, pathHeld} {
		for _, refused := range []bool{false, true} {
			s, server, address := start(t)
			p := dial(t, address)
			p.open(1, path)
			const messages, size = 100, 1000
			data := prefixed(size)
			for i := range messages {
				if i == messages/2 && refused {
					c := onlyConn(t, server)
					eventually(t, "the first half has come", func() bool { return c.untakenOf(1) >= (messages/2-1)*len(data) })
					s.refuse.Store(true)
				}
				_ = p.framer.WriteData(1, false, data)
			}
			p.request(3, pathEcho, 1)
			if st, _ := p.outcome(3); st != "0" {
				t.Errorf("%s: %s", path, st)
			}
			n, waits := s.received.Load(), server.onlyConn().untakenOf(1)
			if !refused && (waits < (messages-1)*len(data) || n < int64(waits-receivedBytesMin) || n > int64(waits+2*waitingStep)) {
				t.Errorf("%s: %d bytes wait, %d are counted", path, waits, n)
			}
			if refused && waits > int(n)+receivedBytesMin+waitingStep {
				t.Errorf("%s: %d bytes wait, and only %d are counted", path, waits, n)
			}
			s.refuse.Store(false)
		}
	}
}

// untakenOf is how much of what has come on a stream waits.
func (c *Conn) untakenOf(stream uint32) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.streams[stream]
	switch {
	case s == nil:
		return 0
	case s.call != nil:
		return len(s.call.received)
	}
	return len(s.message.body)
}

// TestAStreamThatHasEndedDoesNotWaitForItsClient: one that takes nothing of the answers on the stream, but those on others. A message that was cut off counts no
// more, and the stream ends when the client has had time to take what it was sent.
func TestAStreamThatHasEndedDoesNotWaitForItsClient(t *testing.T) {
	const large = 100 << 10
	for name, c := range map[string]struct {
		begun  []byte // of the message after the first
		end    bool   // the client ends the stream
		failed int64
	}{
		"within a message":               {prefixed(large)[:grpcPrefixBytes], true, 1},
		"the rest of which did not come": {prefixed(large)[:1000], false, 1},
		"after a message":                {nil, true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s, server, address := start(t, func(o *Options) { o.KeepaliveTime = 1000 * time.Hour })
			p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
			p.open(1, pathStream)
			_ = p.framer.WriteData(1, false, prefixed(1))
			conn, now, next := onlyConn(t, server), time.Now(), uint32(3)
			eventually(t, "an answer waits", func() bool { n, _ := conn.pendingOfStreams(); return n > 0 })
			_ = p.framer.WriteData(1, c.end, c.begun)
			if !c.end {
				eventually(t, "a message is being received", func() bool { return s.received.Load() == large })
			}
			pass := func() {
				p.request(next, pathLarge, 1)
				_ = p.framer.WriteWindowUpdate(0, largeBytes+grpcPrefixBytes)
				_ = p.framer.WriteWindowUpdate(next, largeBytes+grpcPrefixBytes)
				if st, _ := p.outcome(next); st != "0" {
					t.Fatalf("a stream whose answer is taken ended with %s", st)
				}
				next += 2
				now = now.Add(2 * testOptions().ProgressTimeout / 3)
				conn.check(now)
			}
			for range 3 {
				pass()
			}
			eventually(t, "the stream has ended", func() bool {
				conn.mu.Lock()
				defer conn.mu.Unlock()
				one := conn.streams[1]
				return one == nil || one.last
			})
			if n := s.received.Load(); n != 0 || s.failed.Load() != c.failed {
				t.Errorf("%d bytes count; %d streams have failed, want %d", n, s.failed.Load(), c.failed)
			}
			pass()
			if !c.end && conn.openStreams() == 0 {
				t.Error("the client has no time to take the answer to the message before")
			}
			pass()
			pass()
			if n := conn.openStreams(); n != 0 {
				t.Error("the stream waits for its client for ever")
			}
		})
	}
}
