package transport

import (
	"errors"
	"io"
	"net"
	"sync"
	"syscall"

	"golang.org/x/net/http2"
)

const (
	frameHeaderBytes = 9
	// framePayloadMax is the largest payload that the server takes: HTTP/2's default, which it does
	// not change.
	framePayloadMax = 16 << 10
	inputBytes      = 32 << 10 // holds any frame
)

// inputPool has the buffers of connections that have nothing to read.
var inputPool = sync.Pool{New: func() any { return new([inputBytes]byte) }}

// input is what was read from a socket and not processed yet. A connection without such bytes has
// no buffer.
type input struct {
	raw    net.Conn
	socket syscall.RawConn // nil if raw is not a socket
	buf    *[inputBytes]byte
	r, w   int // the bytes to process are buf[r:w]

	first [frameHeaderBytes]byte // of a burst, if raw is not a socket

	n    int // of the last read of the socket
	err  error
	read func(fd uintptr) bool // readSocket, bound once
}

func (in *input) init(raw net.Conn) {
	in.raw = raw
	if s, ok := raw.(syscall.Conn); ok {
		if socket, err := s.SyscallConn(); err == nil {
			in.socket, in.read = socket, in.readSocket
		}
	}
}

// frame is a frame whose payload aliases the input.
type frame struct {
	kind    http2.FrameType
	flags   http2.Flags
	stream  uint32
	payload []byte
}

// errFrameSize: a frame is larger than the settings allow.
var errFrameSize = connError{code: http2.ErrCodeFrameSize, text: "the frame is larger than 16 KiB"}

// next takes the next frame, if it is complete.
func (in *input) next() (f frame, complete bool, err error) {
	if in.w-in.r < frameHeaderBytes {
		return f, false, nil
	}
	b := in.buf[in.r:in.w]
	length := int(b[0])<<16 | int(b[1])<<8 | int(b[2])
	if length > framePayloadMax {
		return f, false, errFrameSize
	}
	if len(b) < frameHeaderBytes+length {
		return f, false, nil
	}
	in.r += frameHeaderBytes + length
	return frame{
		kind: http2.FrameType(b[3]), flags: http2.Flags(b[4]), stream: uint32(b[5]&0x7f)<<24 | uint32(b[6])<<16 | uint32(b[7])<<8 | uint32(b[8]),
		payload: b[frameHeaderBytes : frameHeaderBytes+length : frameHeaderBytes+length],
	}, true, nil
}

// skip takes the bytes of the preface, if they are complete; ok is false if they are others.
func (in *input) preface() (complete, ok bool) {
	const preface = http2.ClientPreface
	n := min(in.w-in.r, len(preface))
	if n > 0 && string(in.buf[in.r:in.r+n]) != preface[:n] {
		return true, false
	}
	if n < len(preface) {
		return false, true
	}
	in.r += n
	return true, true
}

// fill reads at least one byte. It may return what it has read with the error of the next read.
func (in *input) fill() error {
	if in.buf != nil && in.r > 0 {
		in.w = copy(in.buf[:], in.buf[in.r:in.w])
		in.r = 0
	}
	if in.w == 0 {
		in.release()
	}
	if in.socket == nil && in.w == 0 {
		return in.fillFirst()
	}
	if in.socket == nil {
		in.hold()
		n, err := in.raw.Read(in.buf[in.w:])
		in.w += n
		if n > 0 {
			return nil
		}
		return err
	}
	if err := in.socket.Read(in.read); err != nil {
		return err
	}
	if in.err != nil {
		return in.err
	}
	if in.n == 0 {
		return io.EOF
	}
	in.w += in.n
	return nil
}

// fillFirst waits for the first bytes of a burst without a buffer, where the socket cannot be asked:
// TLS reads ahead of what it returns.
func (in *input) fillFirst() error {
	n, err := in.raw.Read(in.first[:])
	if n == 0 {
		return err
	}
	in.hold()
	in.w = copy(in.buf[:], in.first[:n])
	return nil
}

// readSocket reads what the socket has. It reports false if that is nothing: the goroutine is
// parked then, without a buffer.
func (in *input) readSocket(fd uintptr) bool {
	in.hold()
	for {
		in.n, in.err = syscall.Read(int(fd), in.buf[in.w:])
		switch {
		case in.err == nil:
			return true
		case errors.Is(in.err, syscall.EINTR):
		case errors.Is(in.err, syscall.EAGAIN):
			if in.w == 0 {
				in.release()
			}
			return false
		default:
			in.n = 0
			return true
		}
	}
}

func (in *input) hold() {
	if in.buf == nil {
		in.buf = inputPool.Get().(*[inputBytes]byte)
	}
}

func (in *input) release() {
	if in.buf != nil {
		inputPool.Put(in.buf)
		in.buf = nil
	}
}

// renew leaves the buffer to the goroutine that executes a request in it.
func (in *input) renew() {
	old := in.buf
	in.buf = inputPool.Get().(*[inputBytes]byte)
	in.w = copy(in.buf[:], old[in.r:in.w])
	in.r = 0
}
