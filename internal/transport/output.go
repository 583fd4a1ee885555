package transport

import (
	"encoding/binary"
	"math"
	"sync"

	"golang.org/x/net/http2"
)

// outMax is how many bytes may wait for the socket before senders wait, and before answers stay with
// their streams. Control frames, and one answer, may come on top.
const outMax = 64 << 10

// flushWritesMax is how often the reader or a handler writes in a row. Handlers may add to the output as
// fast as it is written, and without an end if the client's windows are large.
const flushWritesMax = 4

// output is what will be written to the socket next. The connection's mutex guards it.
type output struct {
	buf      []byte
	spare    []byte    // for buf while buf is written
	flushing bool      // a goroutine writes, and comes back for what is added meanwhile
	soon     bool      // a goroutine is about to write: flushSoonLocked
	writing  int       // bytes that it is writing
	written  uint64    // bytes, of all times
	room     sync.Cond // broadcast when buf has been taken to be written, or the connection has ended
}

// AppendFrameHeader appends the header of a frame with a payload of so many bytes.
func AppendFrameHeader(b []byte, length int, kind http2.FrameType, flags http2.Flags, stream uint32) []byte {
	return append(b, byte(length>>16), byte(length>>8), byte(length), byte(kind), byte(flags),
		byte(stream>>24), byte(stream>>16), byte(stream>>8), byte(stream))
}

// AppendReset appends RST_STREAM.
func AppendReset(b []byte, stream uint32, code http2.ErrCode) []byte {
	b = AppendFrameHeader(b, 4, http2.FrameRSTStream, 0, stream)
	return binary.BigEndian.AppendUint32(b, uint32(code))
}

func appendWindow(b []byte, stream uint32, increment int) []byte {
	b = AppendFrameHeader(b, 4, http2.FrameWindowUpdate, 0, stream)
	return binary.BigEndian.AppendUint32(b, uint32(increment))
}

func appendSettings(b []byte, settings ...http2.Setting) []byte {
	b = AppendFrameHeader(b, 6*len(settings), http2.FrameSettings, 0, 0)
	for _, s := range settings {
		b = binary.BigEndian.AppendUint16(b, uint16(s.ID))
		b = binary.BigEndian.AppendUint32(b, s.Val)
	}
	return b
}

func appendGoAway(b []byte, last uint32, code http2.ErrCode, text string) []byte {
	b = AppendFrameHeader(b, 8+len(text), http2.FrameGoAway, 0, 0)
	b = binary.BigEndian.AppendUint32(b, last)
	b = binary.BigEndian.AppendUint32(b, uint32(code))
	return append(b, text...)
}

// flush writes what is to be sent. What is added meanwhile is written by it or by another goroutine. If
// a goroutine writes already, flush returns at once.
func (c *Conn) flush() {
	c.mu.Lock()
	if !c.out.flushing {
		c.flushLocked()
	}
	c.mu.Unlock()
}

func (c *Conn) flushLocked() {
	c.out.flushing = true
	c.writeLocked(flushWritesMax)
}

// goOnFlushing writes until nothing is to be sent, however long that takes.
func (c *Conn) goOnFlushing() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.writeLocked(math.MaxInt)
}

// writeLocked writes at most so often. If that is not all, a goroutine goes on flushing.
func (c *Conn) writeLocked(most int) {
	for writes := 0; ; writes++ {
		c.pumpLocked()
		if c.halfClosed {
			c.out.buf = c.out.buf[:0]
		}
		if len(c.out.buf) == 0 || c.ended {
			break
		}
		if writes == most {
			c.server.goroutines.Go(c.goOnFlushing)
			return
		}
		buf := c.out.buf
		c.out.buf, c.out.spare = c.out.spare[:0], nil
		c.out.writing = len(buf)
		c.out.room.Broadcast()
		c.mu.Unlock()
		n, err := c.raw.Write(buf)
		c.mu.Lock()
		c.out.writing = 0
		c.out.written += uint64(n)
		if cap(buf) <= 2*outMax {
			c.out.spare = buf[:0]
		}
		if err != nil {
			c.endLocked(err)
		}
	}
	if c.closing && !c.halfClosed && !c.ended {
		c.halfCloseLocked()
	}
	c.out.flushing = false
	c.out.room.Broadcast()
}

// waitRoomLocked waits while too much is to be written already. It reports false if the connection
// has ended. The caller flushes afterwards.
func (c *Conn) waitRoomLocked() bool {
	for len(c.out.buf) >= outMax && !c.ended {
		if !c.out.flushing {
			c.flushLocked()
			continue
		}
		c.out.room.Wait()
	}
	return !c.ended
}
