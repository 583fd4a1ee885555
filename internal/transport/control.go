package transport

import "time"

// controlCount counts control frames, which cost a client little. The reader role guards it.
type controlCount struct {
	frames  int // since the last fast request, at most controlMax
	since   time.Time
	written uint64 // bytes that had been written then
	calls   uint64 // messages that calls had taken then
}

const (
	// controlMax control frames without a fast request are a flood if they come within
	// controlInterval, and the server has sent no more than controlBytes for each, and has read no
	// message of a call for every controlMessage of them. A client that receives a stream
	// widens windows with one frame for some KiB; one that receives short answers sends a ping, and
	// some windows, for each.
	controlMax      = 10_000
	controlInterval = 10 * time.Second
	controlBytes    = 64 // more than the answer to a control frame
	controlMessage  = 16
)

// floods counts a control frame, and reports whether there are too many.
func (c *Conn) floods() bool {
	n := &c.control
	if n.frames++; n.frames <= controlMax {
		return false
	}
	c.mu.Lock()
	written, calls := c.out.written, c.callMessages
	c.mu.Unlock()
	now := time.Now()
	floods := now.Sub(n.since) < controlInterval && written-n.written < controlMax*controlBytes && calls-n.calls < controlMax/controlMessage
	*n = controlCount{since: now, written: written, calls: calls}
	return floods
}
