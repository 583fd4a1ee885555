package server

import (
	"encoding/binary"
	"errors"
	"sync/atomic"
)

// receiving bounds the large messages that are being received or wait to be decoded, which gRPC itself bounds one by one only. A message is
// admitted when its length is known, with the first five bytes of it; one that is refused is given a length that gRPC refuses, so that
// its request, and nothing else on its connection, ends with RESOURCE_EXHAUSTED.
//
// What counts is the bytes of admitted messages that are still to come; what has come is decoded at once, and admitted again as a request. A
// message that is alone is admitted whatever its size.
type receiving struct {
	limit    int64 // of all; a connection's messages get half of it
	reserved atomic.Int64
	refused  atomic.Uint64
}

// receivedBytesMin is the size from which on messages count. Smaller ones are bounded by the number of streams.
const receivedBytesMin = 64 << 10

// HTTP/2, as much of it as has to be known: connection preface, frame header, two types of frames and two flags.
const (
	prefaceBytes     = 24
	frameHeaderBytes = 9
	frameData        = 0
	frameReset       = 3
	flagEndStream    = 1
	flagPadded       = 8
	grpcPrefixBytes  = 5
)

// inbound follows the messages in what one connection receives. It is not for concurrent use.
type inbound struct {
	receiving *receiving
	skip      int // bytes to go by, of the preface or of frames that carry no message
	header    [frameHeaderBytes]byte
	headerLen int
	payload   int // bytes of the data frame at hand that are to come, its padding excluded
	padding   int // and of its padding
	padded    bool
	flags     byte
	stream    uint32
	current   message
	open      map[uint32]message // messages that are not complete at the end of a frame
	reserved  int64              // of the connection
}

// message is one that is being received.
type message struct {
	prefix    [grpcPrefixBytes]byte
	prefixLen int
	left      int64
	counted   bool
}

func newInbound(r *receiving) *inbound {
	return &inbound{receiving: r, skip: prefaceBytes, open: map[uint32]message{}}
}

// errRefusedSplit closes a connection whose message is refused too late to tell: its length has been handed on already.
var errRefusedSplit = errors.New("server: too many bytes are being received")

// follow looks at what was received next, and changes the length of a message that is refused.
func (in *inbound) follow(b []byte) error {
	for len(b) > 0 {
		switch {
		case in.skip > 0:
			n := min(in.skip, len(b))
			in.skip, b = in.skip-n, b[n:]
		case in.padded:
			in.padded, in.padding = false, int(b[0])
			in.payload -= 1 + in.padding
			b = b[1:]
			if in.payload < 0 {
				return errRefusedSplit // no HTTP/2: gRPC would say so, too
			}
			in.endOfPayload()
		case in.payload > 0:
			n := min(in.payload, len(b))
			if err := in.data(b[:n]); err != nil {
				return err
			}
			in.payload, b = in.payload-n, b[n:]
			in.endOfPayload()
		default:
			n := copy(in.header[in.headerLen:], b)
			in.headerLen, b = in.headerLen+n, b[n:]
			if in.headerLen == frameHeaderBytes {
				in.headerLen = 0
				in.begin()
			}
		}
	}
	return nil
}

// begin takes in a frame's header.
func (in *inbound) begin() {
	h := &in.header
	length := int(h[0])<<16 | int(h[1])<<8 | int(h[2])
	in.stream, in.flags = binary.BigEndian.Uint32(h[5:])&^(1<<31), h[4]
	switch h[3] {
	case frameData:
		in.current = message{}
		if len(in.open) > 0 {
			in.current = in.open[in.stream]
			delete(in.open, in.stream)
		}
		in.payload, in.padded = length, in.flags&flagPadded != 0 && length > 0
		in.endOfPayload()
	case frameReset:
		in.skip = length
		if m, ok := in.open[in.stream]; ok {
			in.forget(&m)
			delete(in.open, in.stream)
		}
	default:
		in.skip = length
	}
}

// endOfPayload keeps a message that goes on in another frame.
func (in *inbound) endOfPayload() {
	if in.payload > 0 || in.padded {
		return
	}
	in.skip, in.padding = in.padding, 0
	m := &in.current
	switch {
	case in.flags&flagEndStream != 0:
		in.forget(m)
	case m.prefixLen > 0:
		in.open[in.stream] = *m
		*m = message{}
	}
}

// data takes in a part of a message, or of several.
func (in *inbound) data(b []byte) error {
	m := &in.current
	for len(b) > 0 {
		if m.prefixLen < grpcPrefixBytes {
			n := copy(m.prefix[m.prefixLen:], b)
			m.prefixLen += n
			if m.prefixLen == grpcPrefixBytes {
				m.left = int64(binary.BigEndian.Uint32(m.prefix[1:]))
				if m.left >= receivedBytesMin && !in.admit(m) {
					if n < grpcPrefixBytes-1 {
						return errRefusedSplit
					}
					b[n-4] = 0xff // longer than any message may be
				}
			}
			b = b[n:]
		}
		n := min(m.left, int64(len(b)))
		m.left, b = m.left-n, b[n:]
		if m.counted {
			in.release(n)
		}
		if m.prefixLen == grpcPrefixBytes && m.left == 0 {
			*m = message{}
		}
	}
	return nil
}

func (in *inbound) admit(m *message) bool {
	r := in.receiving
	all := r.reserved.Add(m.left)
	if all > r.limit && all != m.left || in.reserved > 0 && in.reserved+m.left > r.limit/2 {
		r.reserved.Add(-m.left)
		r.refused.Add(1)
		return false
	}
	in.reserved += m.left
	m.counted = true
	return true
}

func (in *inbound) release(n int64) {
	in.reserved -= n
	in.receiving.reserved.Add(-n)
}

// forget drops a message that will not be completed.
func (in *inbound) forget(m *message) {
	if m.counted {
		in.release(m.left)
	}
	*m = message{}
}

// end drops all of them.
func (in *inbound) end() {
	for id, m := range in.open {
		in.forget(&m)
		delete(in.open, id)
	}
	in.forget(&in.current)
}
