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

// HTTP/2, as much of it as has to be known: connection preface, frame header, three types of frames and two flags.
const (
	prefaceBytes     = 24
	frameHeaderBytes = 9
	frameData        = 0
	frameHeaders     = 1
	frameReset       = 3
	flagEndStream    = 1
	flagPadded       = 8
	grpcPrefixBytes  = 5
)

// inbound follows the messages in what one connection receives, and in what it sends the end of streams: a stream ends for the server when it
// says so, and its client need not answer. It is not for concurrent use.
//
// Invariant: open has the streams that neither side has ended. What comes for another carries no message: nothing will read it.
type inbound struct {
	receiving *receiving
	received  frames
	sent      frames
	payload   int // bytes of the data frame at hand that are to come, its padding excluded
	padding   int // and of its padding
	padded    bool
	flags     byte
	stream    uint32
	current   message
	fresh     bool               // current began in the frame at hand
	open      map[uint32]message // with what is not complete at the end of a frame
	reserved  int64              // of the connection
}

// frames cuts a stream of bytes into frames.
type frames struct {
	skip      int // bytes to go by, of the preface or of frames of no interest
	header    [frameHeaderBytes]byte
	headerLen int
}

// next takes what it can from b and returns the rest. It reports true when a header is complete.
func (f *frames) next(b []byte) (rest []byte, begins bool) {
	if f.skip > 0 {
		n := min(f.skip, len(b))
		f.skip -= n
		return b[n:], false
	}
	n := copy(f.header[f.headerLen:], b)
	if f.headerLen += n; f.headerLen < frameHeaderBytes {
		return b[n:], false
	}
	f.headerLen = 0
	return b[n:], true
}

func (f *frames) length() int {
	return int(f.header[0])<<16 | int(f.header[1])<<8 | int(f.header[2])
}

func (f *frames) kind() byte { return f.header[3] }

func (f *frames) flags() byte { return f.header[4] }

func (f *frames) stream() uint32 { return binary.BigEndian.Uint32(f.header[5:]) &^ (1 << 31) }

// message is one that is being received.
type message struct {
	prefix    [grpcPrefixBytes]byte
	prefixLen int
	left      int64
	counted   bool
}

func newInbound(r *receiving) *inbound {
	return &inbound{receiving: r, received: frames{skip: prefaceBytes}, open: map[uint32]message{}}
}

// errRefusedSplit closes a connection whose message is refused too late to tell: its length has been handed on already.
var errRefusedSplit = errors.New("server: too many bytes are being received")

// follow looks at what was received next, and changes the length of a message that is refused.
func (in *inbound) follow(b []byte) error {
	for len(b) > 0 {
		switch {
		case in.received.skip == 0 && in.padded:
			in.padded, in.padding = false, int(b[0])
			in.payload -= 1 + in.padding
			b = b[1:]
			if in.payload < 0 {
				return errRefusedSplit // no HTTP/2: gRPC would say so, too
			}
			in.endOfPayload()
		case in.received.skip == 0 && in.payload > 0:
			n := min(in.payload, len(b))
			if err := in.data(b[:n]); err != nil {
				return err
			}
			in.payload, b = in.payload-n, b[n:]
			in.endOfPayload()
		default:
			var begins bool
			if b, begins = in.received.next(b); begins {
				in.begin()
			}
		}
	}
	return nil
}

// begin takes in a frame's header.
func (in *inbound) begin() {
	f := &in.received
	in.stream, in.flags = f.stream(), f.flags()
	m, open := in.open[in.stream]
	switch kind := f.kind(); {
	case kind == frameData && open:
		in.current, in.fresh = m, m.prefixLen == 0
		in.payload, in.padded = f.length(), in.flags&flagPadded != 0 && f.length() > 0
		in.endOfPayload()
		return
	case kind == frameHeaders && in.flags&flagEndStream == 0:
		if !open {
			in.open[in.stream] = message{}
		}
	case kind == frameHeaders, kind == frameReset:
		in.ended(in.stream)
	}
	f.skip = f.length()
}

// answered looks at what is sent next, for streams that the server ends.
func (in *inbound) answered(b []byte) {
	for f := &in.sent; len(b) > 0; {
		var begins bool
		if b, begins = f.next(b); !begins {
			continue
		}
		f.skip = f.length()
		if f.kind() == frameReset || f.flags()&flagEndStream != 0 && f.kind() == frameHeaders {
			in.ended(f.stream())
		}
	}
}

// ended forgets a stream, and what is to come of its message.
func (in *inbound) ended(stream uint32) {
	m, ok := in.open[stream]
	if !ok {
		return
	}
	delete(in.open, stream)
	if in.stream == stream && (in.payload > 0 || in.padded) { // within a frame
		m, in.current = in.current, message{}
		in.received.skip = in.payload + in.padding
		in.payload, in.padding, in.padded = 0, 0, false
	}
	in.forget(&m)
}

// endOfPayload keeps a message that goes on in another frame.
func (in *inbound) endOfPayload() {
	if in.payload > 0 || in.padded {
		return
	}
	in.received.skip, in.padding = in.padding, 0
	m := &in.current
	switch {
	case in.flags&flagEndStream != 0:
		in.forget(m)
		delete(in.open, in.stream)
	case m.prefixLen > 0 || !in.fresh:
		in.open[in.stream] = *m
	}
	*m = message{}
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
	for id := range in.open {
		in.ended(id)
	}
}
