package transport

import "time"

// controlCount counts control frames, which cost a client little. The reader role guards it.
type controlCount struct {
	frames  int // since the last fast request, at most controlMax
	since   time.Time
	written uint64 // bytes that had been written then
}

const (
	// controlMax control frames without a fast request are a flood if they come within
	// controlInterval, and the server has sent no more than controlBytes for each. A client that
	// receives a stream widens windows with one frame for some KiB.
	controlMax      = 10_000
	controlInterval = 10 * time.Second
	controlBytes    = 64 // more than the answer to a control frame
)

// floods counts a control frame, and reports whether there are too many.
func (c *Conn) floods() bool {
	n := &c.control
	if n.frames++; n.frames <= controlMax {
		return false
	}
	c.mu.Lock()
	written := c.out.written
	c.mu.Unlock()
	now := time.Now()
	floods := now.Sub(n.since) < controlInterval && written-n.written < controlMax*controlBytes
	*n = controlCount{since: now, written: written}
	return floods
}
