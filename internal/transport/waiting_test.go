package transport

import (
	"testing"
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
