package server

import (
	"encoding/binary"
	"errors"
	"sync/atomic"
)

// receiving bounds the messages that are being received, wait to be decoded, or are executed, which gRPC itself bounds one by one only. A
// message is admitted when its length is known, with the first five bytes of it; one that is refused is given a length that gRPC refuses, so
// that its request, and nothing else on its connection, ends with RESOURCE_EXHAUSTED.
//
// A stream counts in two shares, from its first message until it ends:
//   - its largest large message since the server last answered: gRPC takes the next from the window only after it has decoded the one before;
//   - all its small messages that the server has not taken, with the bytes that they declare, and what small frames cost beside their payload.
//     What the server takes it tells by widening the stream's window, by an answer, or by the end of the stream.
//
// What is alone in a share is admitted whatever its size.
type receiving struct {
	large, small receivingShare
	refused      atomic.Uint64
}

type receivingShare struct {
	limit    int64 // of all; a connection's messages get half of it
	reserved atomic.Int64
}

// init sets the limits. Small messages get twice as much, because a window of them may wait on every stream that is held back.
func (r *receiving) init(inflight int64) { r.large.limit, r.small.limit = inflight/4, inflight/2 }

// add counts bytes for a connection that has so many already, unless they are too many.
func (s *receivingShare) add(conn *int64, bytes int64) bool {
	all := s.reserved.Add(bytes)
	if all > s.limit && all != bytes || *conn > 0 && *conn+bytes > s.limit/2 {
		s.reserved.Add(-bytes)
		return false
	}
	*conn += bytes
	return true
}

func (s *receivingShare) release(conn *int64, bytes int64) {
	if bytes > 0 {
		*conn -= bytes
		s.reserved.Add(-bytes)
	}
}

const (
	// receivedBytesMin is the size from which on a message is large.
	receivedBytesMin = 64 << 10
	// smallStep is what a stream may hold uncounted; the number of streams bounds that. The share is written once for so many bytes.
	smallStep = 4 << 10
	// crumbsMax is what frames within one message may cost beside their payload while the share has no room for it.
	crumbsMax = 16 << 10
	// A frame of less than smallFrameBytes costs frameOverhead beside its payload.
	smallFrameBytes = 512
	frameOverhead   = 128
	// unwidened is what gRPC has taken at most without widening the window.
	unwidened = streamWindowBytes / 4
)

// HTTP/2, as much of it as has to be known: connection preface, frame header, four types of frames and two flags.
const (
	prefaceBytes     = 24
	frameHeaderBytes = 9
	frameData        = 0
	frameHeaders     = 1
	frameReset       = 3
	frameWindow      = 8
	flagEndStream    = 1
	flagPadded       = 8
	windowBytes      = 4 // of the increment
	grpcPrefixBytes  = 5
)

// inbound follows the messages in what one connection receives, and in what it sends the answers and ends of streams: a stream ends for the server
// when it says so, and its client need not answer. It is not for concurrent use.
//
// Invariant: open has the streams that the server has not ended and the client has not reset. What comes for another, or after the client has
// ended the stream, carries no message: nothing will read it.
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
	open      map[uint32]message // as of the end of the last frame of each
	large     int64              // what the connection has reserved
	small     int64
	increment [windowBytes]byte // of a window, as it is sent

	incrementLen int
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

// message is the one that is being received on a stream, and what the stream holds with those before it.
type message struct {
	prefix    [grpcPrefixBytes]byte
	prefixLen int
	left      int64 // bytes to come
	large     int64 // bytes reserved as large
	waiting   int64 // what the small messages cost, bytes to come included
	raw       int64 // bytes received of them
	small     int64 // bytes reserved as small: waiting, but for less than smallStep
	closed    bool  // the client has ended the stream
}

// length is what the prefix declares.
func (m *message) length() int64 { return int64(binary.BigEndian.Uint32(m.prefix[1:])) }

// smallLeft is what is to come of a small message.
func (m *message) smallLeft() int64 {
	if m.prefixLen < grpcPrefixBytes || m.length() >= receivedBytesMin {
		return 0
	}
	return m.left
}

func newInbound(r *receiving) *inbound {
	return &inbound{receiving: r, received: frames{skip: prefaceBytes}, open: map[uint32]message{}}
}

// errRefusedSplit closes a connection whose message is refused too late to tell: its length has been handed on already.
var errRefusedSplit = errors.New("server: too many bytes are being received")

// errCrumbs closes a connection that sends a message in small frames for which there is no room.
var errCrumbs = errors.New("server: a message comes in too many small frames")

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
			if err := in.endOfPayload(); err != nil {
				return err
			}
		case in.received.skip == 0 && in.payload > 0:
			n := min(in.payload, len(b))
			if err := in.data(b[:n]); err != nil {
				return err
			}
			in.payload, b = in.payload-n, b[n:]
			if err := in.endOfPayload(); err != nil {
				return err
			}
		default:
			var begins bool
			if b, begins = in.received.next(b); begins {
				if err := in.begin(); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// begin takes in a frame's header.
func (in *inbound) begin() error {
	f := &in.received
	in.stream, in.flags = f.stream(), f.flags()
	m, open := in.open[in.stream]
	switch kind := f.kind(); {
	case kind == frameData && open && !m.closed:
		in.current = m
		in.payload, in.padded = f.length(), in.flags&flagPadded != 0 && f.length() > 0
		return in.endOfPayload()
	case kind == frameHeaders && open:
		m.closed = m.closed || in.flags&flagEndStream != 0
		in.open[in.stream] = m
	case kind == frameHeaders && in.flags&flagEndStream == 0:
		in.open[in.stream] = message{}
	case kind == frameReset:
		in.ended(in.stream)
	}
	f.skip = f.length()
	return nil
}

// answered looks at what is sent next, for what it tells of streams: that they end, or that messages were taken.
func (in *inbound) answered(b []byte) {
	for f := &in.sent; len(b) > 0; {
		if f.skip == windowBytes && f.kind() == frameWindow { // before the increment
			n := copy(in.increment[in.incrementLen:], b)
			in.incrementLen, b = in.incrementLen+n, b[n:]
			if in.incrementLen == windowBytes {
				f.skip, in.incrementLen = 0, 0
				in.taken(f.stream(), int64(binary.BigEndian.Uint32(in.increment[:])))
			}
			continue
		}
		var begins bool
		if b, begins = f.next(b); !begins {
			continue
		}
		f.skip = f.length()
		switch kind := f.kind(); {
		case kind == frameReset || f.flags()&flagEndStream != 0 && kind == frameHeaders:
			in.ended(f.stream())
		case kind == frameData || kind == frameHeaders:
			in.taken(f.stream(), 0)
		}
	}
}

// taken notes that the server has taken so many bytes of a stream, or, with none, has answered something on it.
func (in *inbound) taken(stream uint32, bytes int64) {
	m, at := in.at(stream)
	if m == nil {
		return
	}
	if answer := bytes == 0; answer {
		keep := int64(0)
		if m.prefixLen == grpcPrefixBytes && m.length() >= receivedBytesMin {
			keep = min(m.large, m.length())
		}
		in.receiving.large.release(&in.large, m.large-keep)
		m.large = keep
		if m.raw <= unwidened {
			bytes = m.raw
		}
	}
	left := m.smallLeft()
	if bytes >= m.raw {
		m.raw, m.waiting = 0, left
	} else if bytes > 0 {
		m.waiting -= (m.waiting - left) * bytes / m.raw
		m.raw -= bytes
	}
	if m.waiting < smallStep {
		in.receiving.small.release(&in.small, m.small)
		m.small = 0
	} else if m.small > m.waiting {
		in.receiving.small.release(&in.small, m.small-m.waiting)
		m.small = m.waiting
	}
	if !at {
		in.open[stream] = *m
	}
}

// at is what is known of a stream, and whether it is current itself.
func (in *inbound) at(stream uint32) (m *message, current bool) {
	if in.within(stream) {
		return &in.current, true
	}
	kept, ok := in.open[stream]
	if !ok {
		return nil, false
	}
	return &kept, false
}

// within reports whether the frame at hand is one with messages of the stream.
func (in *inbound) within(stream uint32) bool {
	return in.stream == stream && (in.payload > 0 || in.padded)
}

// ended forgets a stream, and what is to come of its message.
func (in *inbound) ended(stream uint32) {
	m, ok := in.open[stream]
	if !ok {
		return
	}
	delete(in.open, stream)
	if in.within(stream) {
		m, in.current = in.current, message{}
		in.received.skip = in.payload + in.padding
		in.payload, in.padding, in.padded = 0, 0, false
	}
	in.forget(&m)
}

// endOfPayload keeps what goes on in another frame.
func (in *inbound) endOfPayload() error {
	if in.payload > 0 || in.padded {
		return nil
	}
	in.received.skip, in.padding = in.padding, 0
	m := &in.current
	if n := in.received.length(); n > 0 && n < smallFrameBytes {
		m.waiting += frameOverhead
		if !in.reserve(m) && m.prefixLen > 0 && m.waiting-m.small > crumbsMax {
			in.open[in.stream] = *m
			*m = message{}
			return errCrumbs
		}
	}
	m.closed = in.flags&flagEndStream != 0
	in.open[in.stream] = *m
	*m = message{}
	return nil
}

// data takes in a part of a message, or of several.
func (in *inbound) data(b []byte) error {
	m := &in.current
	for len(b) > 0 {
		if m.prefixLen < grpcPrefixBytes {
			n := copy(m.prefix[m.prefixLen:], b)
			m.prefixLen += n
			if m.prefixLen == grpcPrefixBytes && !in.admit(m) {
				in.receiving.refused.Add(1)
				if n < grpcPrefixBytes-1 {
					return errRefusedSplit
				}
				b[n-4] = 0xff // longer than any message may be
			}
			b = b[n:]
		}
		n := min(m.left, int64(len(b)))
		if m.smallLeft() > 0 {
			m.raw += n
		}
		m.left, b = m.left-n, b[n:]
		if m.prefixLen == grpcPrefixBytes && m.left == 0 {
			m.prefix, m.prefixLen = [grpcPrefixBytes]byte{}, 0
		}
	}
	return nil
}

// admit counts a message whose length has become known, or refuses it.
func (in *inbound) admit(m *message) bool {
	m.left = m.length()
	if more := m.left - m.large; m.left >= receivedBytesMin {
		if more <= 0 {
			return true
		}
		if !in.receiving.large.add(&in.large, more) {
			return false
		}
		m.large = m.left
		return true
	}
	m.raw += grpcPrefixBytes
	m.waiting += grpcPrefixBytes + m.left
	return in.reserve(m)
}

// reserve counts what waits, or reports that there is no room for it.
func (in *inbound) reserve(m *message) bool {
	more := m.waiting - m.small
	if more < smallStep {
		return true
	}
	if !in.receiving.small.add(&in.small, more) {
		return false
	}
	m.small = m.waiting
	return true
}

// forget drops what a stream holds.
func (in *inbound) forget(m *message) {
	in.receiving.large.release(&in.large, m.large)
	in.receiving.small.release(&in.small, m.small)
	*m = message{}
}

// end drops all of them.
func (in *inbound) end() {
	for id := range in.open {
		in.ended(id)
	}
}
