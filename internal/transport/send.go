package transport

import (
	"slices"

	"golang.org/x/net/http2"
)

// queueLocked puts a stream into the queue of senders if it has something to send.
func (c *Conn) queueLocked(s *stream) {
	if !s.queued && !s.gone && s.sends() {
		s.queued = true
		c.senders = append(c.senders, s)
	}
}

// sends reports whether the stream has something to send that its own window allows.
func (s *stream) sends() bool {
	return s.pending.bytes > 0 && s.sendWindow > 0 || s.pending.bytes == 0 && s.last
}

// pumpLocked moves what windows allow from the streams into the output, a frame of each in turn,
// until the output is full.
func (c *Conn) pumpLocked() {
	for len(c.senders) > 0 && len(c.out.buf) < outMax {
		before := len(c.out.buf)
		kept := c.senders[:0]
		for i, s := range c.senders {
			if len(c.out.buf) >= outMax {
				sent := len(kept)
				kept = append(kept, c.senders[i:]...)
				rotate(kept, sent) // those that had no turn are the next
				break
			}
			s.queued = false
			c.sendFrameLocked(s)
			if s.queued = !s.gone && s.sends(); s.queued {
				kept = append(kept, s)
			}
		}
		clear(c.senders[len(kept):])
		if c.senders = kept; len(c.out.buf) == before {
			return // the connection's window is used up
		}
	}
}

// rotate moves the first n streams to the end.
func rotate(streams []*stream, n int) {
	slices.Reverse(streams[:n])
	slices.Reverse(streams[n:])
	slices.Reverse(streams)
}

// sendFrameLocked sends the next frame of a stream.
func (c *Conn) sendFrameLocked(s *stream) {
	if n := min(s.pending.bytes, s.sendWindow, c.sendWindow, c.framePayload); n > 0 {
		c.out.buf = AppendFrameHeader(c.out.buf, n, http2.FrameData, 0, s.id)
		small := s.pending.small
		c.out.buf = s.pending.appendTo(c.out.buf, n)
		c.pending -= n
		s.sendWindow -= n
		c.sendWindow -= n
		s.progressLocked(n * len(c.streams)) // they share what the client takes
		c.liveness.answered = true
		if m := s.messages; m != nil {
			c.countUnsentLocked(s.pending.small - small)
			if m.full && s.pending.bytes == 0 {
				m.full = false
				c.resumeLocked(s)
			}
		}
		if s.call != nil {
			s.call.sentLocked()
		}
	}
	if s.pending.bytes > 0 || !s.last {
		return
	}
	switch {
	case s.trailers == nil:
		c.out.buf = c.appendEndLocked(c.out.buf, s)
	case len(s.trailers) == 0:
		c.out.buf = AppendFrameHeader(c.out.buf, 0, http2.FrameData, http2.FlagDataEndStream, s.id)
	default:
		c.sendBlockLocked(s, append(c.encoder.begin(nil), s.trailers...), true)
	}
	c.removeLocked(s)
}
