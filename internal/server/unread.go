package server

import (
	"runtime"
	"time"

	"github.com/epochkv/epochkv/internal/transport"
)

// unread watches the answers of one connection that wait for the transport. A client that takes
// less than progressBytes of them within --message-timeout loses its connection, whatever else it
// sends: it would keep its part of the share of answers from others. Frames with data that go out
// are progress. Answers that wait for the disk, and scans that run, which have --snapshot-timeout, do not
// count; answers that wait for others before them do. One in the large slot must be taken sooner the more
// others want the slot: see slotParts.
type unread struct {
	sent uint64 // bytes of data that had been sent at step
	step uint32 // the last check at which there was progress, or nothing to wait for
}

// progress records a check for progress, and returns for how many checks there has been none.
func (u *unread) progress(waiting int64, sent uint64, step uint32) (checks uint32) {
	if waiting == 0 || sent-u.sent >= progressBytes {
		u.sent, u.step = sent, step
	}
	return step - u.step
}

// checkUnread is called at each step of the time of messages. It reports whether the answers of the
// connection make no progress, and for the second time.
func (c *countedConn) checkUnread() (suspect, stuck bool) {
	c.info.handOverReady()
	waiting, a := c.info.waitingBytes(), c.connections.admission
	if c.info.isOverdue(a, 0) {
		return true, c.info.isOverdue(a, a.slotTime/(slotParts*stallSteps))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.inbound == nil {
		return false, false
	}
	checks := c.unread.progress(waiting+c.inbound.timed(), c.inbound.sent.dataBytes, c.inbound.receiving.step.Load())
	return checks > stallSteps, checks > stallSteps+1
}

// unreadAnswers is the line in the log.
const unreadAnswers = "a connection is closed because its client does not take its answers"

// endUnread closes the connections whose clients take nothing of their answers. Some buffers of
// cancelled streams are counted until the collector finds them, so it runs before a connection is
// judged.
func (c *connections) endUnread(all []*countedConn, timeout time.Duration, log *operatorLog) {
	suspects := false
	for _, conn := range all {
		suspect, stuck := conn.checkUnread()
		suspects = suspects || suspect && !stuck
		if !stuck {
			continue
		}
		c.violated(log, transport.ViolationUnread, unreadAnswers, transport.ErrUnread,
			"peer", conn.RemoteAddr().String(), "bytes", conn.info.waitingBytes(), "message_timeout", timeout)
		_ = conn.Close() // gRPC meets the same error
	}
	if suspects {
		runtime.GC()
	}
}
