package server

import (
	"encoding/binary"
	"errors"
	"slices"
	"sync/atomic"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/status"

	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/mvcc"
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
//
// A message that is not complete must proceed: a client that sends less than progressBytes of it within the configured time, although the windows
// let it, has its stream ended. So has one that does not end a request whose message is complete.
type receiving struct {
	large, small receivingShare
	streams      receivingShare // counts streams, in steps
	messageBytes int64          // of the largest message that gRPC takes
	refused      atomic.Uint64
	step         atomic.Uint32 // counts the looks at what proceeds
}

// progressBytes is how much of a message must come in its time, unless it ends before: 256 KiB in 30 s.
const progressBytes = 256 << 10

// streamStep is how many streams a connection reserves at once, so that few of them write what all connections share.
const streamStep = 8

type receivingShare struct {
	limit    int64 // of all; a connection's messages get half of it
	reserved atomic.Int64
}

// init sets the limits. Small messages get twice as much, because a window of them may wait on every stream that is held back.
func (r *receiving) init(inflight, streams, messageBytes int64) {
	r.messageBytes = messageBytes
	r.large.limit, r.small.limit, r.streams.limit = inflight/4, inflight/2, streams
}

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
	frameContinued   = 9
	flagEndStream    = 1
	flagEndHeaders   = 4
	flagPadded       = 8
	windowBytes      = 4 // of the increment
	connWindowFirst  = 65535
	noStream         = 2 // a client's streams are odd: gRPC takes data for it off the connection's window and drops it
	grpcPrefixBytes  = 5
)

// inbound follows the messages in what one connection receives, and in what it sends the answers and ends of streams: a stream ends for the server
// when it says so, and its client need not answer. It is not for concurrent use.
//
// Invariant: open has the streams that the server has not ended and the client has not reset. What comes for another, or after the client has
// ended the stream, carries no message: nothing will read it.
type inbound struct {
	receiving *receiving
	refusals  *refusals
	received  frames
	sent      frames
	headers   bool // the header block that is received goes on in the next frame
	sending   bool // the one that is sent does
	refused   bool // the message at hand is: its stream ends
	payload   int  // bytes of the data frame at hand that are to come, its padding excluded
	padding   int  // and of its padding
	padded    bool
	flags     byte
	stream    uint32
	current   message
	open      map[uint32]message // as of the end of the last frame of each
	large     int64              // what the connection has reserved
	small     int64
	streams   int64
	window    int64             // what the client may still send on the connection
	ending    []uint32          // streams whose reset gRPC shall read between two frames
	telling   []byte            // frames that tell the client why, to be sent between two frames
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
	window    int64 // what the client may still send on the stream
	gained    int64 // bytes received since step
	step      uint32
	closed    bool // the client has ended the stream
	answered  bool // the server has sent headers
	later     bool // a message has been received before
}

// incomplete reports whether the client has to send more: the rest of a message, or, until the server has answered, the end of the request.
// The server answers with headers at once where a stream may go on after a message.
func (m *message) incomplete() bool { return !m.closed && (m.prefixLen > 0 || !m.answered) }

// length is what the prefix declares.
func (m *message) length() int64 { return int64(binary.BigEndian.Uint32(m.prefix[1:])) }

// smallLeft is what is to come of a small message.
func (m *message) smallLeft() int64 {
	if m.prefixLen < grpcPrefixBytes || m.length() >= receivedBytesMin {
		return 0
	}
	return m.left
}

func newInbound(r *receiving, told *refusals) *inbound {
	return &inbound{receiving: r, refusals: told, received: frames{skip: prefaceBytes}, open: map[uint32]message{}, window: connWindowFirst}
}

// errPadding closes a connection that does not speak HTTP/2, as gRPC would.
var errPadding = errors.New("server: a frame has more padding than payload")

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
				return errPadding
			}
			if err := in.endOfPayload(); err != nil {
				return err
			}
		case in.received.skip == 0 && in.payload > 0:
			n := min(in.payload, len(b))
			in.data(b[:n])
			in.payload, b = in.payload-n, b[n:]
			if err := in.endOfPayload(); err != nil {
				return err
			}
			if in.refused {
				in.refused = false
				in.ended(in.stream)
			}
		default:
			rest, begins := in.received.next(b)
			if begins {
				in.redirect(b[:len(b)-len(rest)])
				if err := in.begin(); err != nil {
					return err
				}
			}
			b = rest
		}
	}
	return nil
}

// redirect changes the header that ends b if it is of data on a stream that ends, of which gRPC shall keep nothing.
func (in *inbound) redirect(b []byte) {
	f := &in.received
	const id = 4
	if len(in.ending) > 0 && f.kind() == frameData && len(b) >= id && slices.Contains(in.ending, f.stream()) {
		binary.BigEndian.PutUint32(b[len(b)-id:], noStream)
	}
}

// begin takes in a frame's header.
func (in *inbound) begin() error {
	f := &in.received
	in.stream, in.flags = f.stream(), f.flags()
	m, open := in.open[in.stream]
	switch f.kind() {
	case frameHeaders, frameContinued:
		in.headers = in.flags&flagEndHeaders == 0
	case frameData:
		in.window -= int64(f.length())
	}
	switch kind := f.kind(); {
	case kind == frameData && open && !m.closed:
		in.current = m
		in.payload, in.padded = f.length(), in.flags&flagPadded != 0 && f.length() > 0
		return in.endOfPayload()
	case kind == frameHeaders && open:
		m.closed = m.closed || in.flags&flagEndStream != 0
		in.open[in.stream] = m
	case kind == frameHeaders:
		in.open[in.stream] = message{window: streamWindowBytes, closed: in.flags&flagEndStream != 0, step: in.receiving.step.Load()}
		in.countStreams()
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
		if f.kind() == frameHeaders || f.kind() == frameContinued {
			in.sending = f.flags()&flagEndHeaders == 0
		}
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
	if stream == 0 {
		in.window += bytes
		return
	}
	m, at := in.at(stream)
	if m == nil {
		return
	}
	if answer := bytes == 0; answer {
		m.answered = true
		keep := int64(0)
		if m.prefixLen == grpcPrefixBytes && m.length() >= receivedBytesMin {
			keep = min(m.large, m.length())
		}
		in.receiving.large.release(&in.large, m.large-keep)
		m.large = keep
		if m.raw <= unwidened {
			bytes = m.raw
		}
	} else {
		m.window += bytes
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
	in.countStreams()
}

// countStreams reserves what the open streams need, and tells the handlers if there are more than that.
func (in *inbound) countStreams() {
	shared, n := &in.receiving.streams, int64(max(0, len(in.open)-config.StreamsOwn))
	if n > in.streams && shared.reserved.Add(streamStep) <= shared.limit {
		in.streams += streamStep
	} else if n > in.streams {
		shared.reserved.Add(-streamStep)
	}
	if in.streams-n >= 2*streamStep || n == 0 {
		spare := (in.streams - n) / streamStep * streamStep
		shared.reserved.Add(-spare)
		in.streams -= spare
	}
	if crowded := n > in.streams; crowded != in.refusals.crowded.Load() {
		in.refusals.crowded.Store(crowded)
	}
}

// findStalled looks for the messages that do not proceed, and reports whether there is one.
func (in *inbound) findStalled() bool {
	now, found := in.receiving.step.Load(), false
	for id, m := range in.open {
		if in.within(id) || !m.incomplete() {
			continue // a client that stops within a frame does not answer pings, and loses its connection
		}
		if m.window <= 0 || in.window <= 0 {
			m.step, m.gained = now, 0
		} else if now-m.step > stallSteps {
			m.later = m.later && m.prefixLen > 0 // a request that has not ended was not executed
			in.tell(id, &m, errIncomplete)
			in.ended(id)
			found = true
			continue
		}
		in.open[id] = m
	}
	return found
}

// betweenFrames reports whether a frame of any stream may come next.
func (in *inbound) betweenFrames() bool {
	f := &in.received
	return f.skip == 0 && f.headerLen == 0 && in.payload == 0 && !in.padded && !in.headers
}

// untilFrame is how many bytes are known to come before the next place between frames.
func (in *inbound) untilFrame() int {
	f := &in.received
	switch {
	case f.skip > 0:
		return f.skip
	case in.padded:
		return 1
	case in.payload > 0:
		return in.payload
	}
	return frameHeaderBytes - f.headerLen
}

// endStreams puts the resets of streams into b, as many as fit.
func (in *inbound) endStreams(b []byte) int {
	const size = frameHeaderBytes + 4
	frames := b[:0]
	for len(in.ending) > 0 && len(b)-len(frames) >= size {
		frames = appendReset(frames, in.ending[0], http2.ErrCodeCancel)
		in.ending = in.ending[1:]
	}
	return len(frames)
}

// takeTelling returns what is to be sent now.
func (in *inbound) takeTelling() []byte {
	if f := &in.sent; f.skip > 0 || f.headerLen > 0 || in.sending {
		return nil
	}
	b := in.telling
	in.telling = nil
	return b
}

// tell ends a stream within a message: gRPC reads that the client has reset it, and the client is told why. After an earlier message on the stream
// there is no ErrorInfo, because the request before may have been executed and not answered.
func (in *inbound) tell(stream uint32, m *message, err error) {
	in.receiving.refused.Add(1)
	st := statusOf(err)
	if m.later {
		st = status.New(st.Code(), st.Message())
	}
	in.ending = append(in.ending, stream)
	in.telling = appendRefusal(in.telling, stream, st, !m.answered)
}

// endOfPayload keeps what goes on in another frame.
func (in *inbound) endOfPayload() error {
	if in.payload > 0 || in.padded {
		return nil
	}
	in.received.skip, in.padding = in.padding, 0
	m := &in.current
	n := in.received.length()
	m.window -= int64(n)
	in.proceed(m, int64(n))
	if n > 0 && n < smallFrameBytes {
		m.waiting += frameOverhead
		if !in.reserve(m) && m.prefixLen > 0 && m.waiting-m.small > crumbsMax {
			in.open[in.stream] = *m
			*m = message{}
			return errCrumbs
		}
	}
	m.closed = m.closed || in.flags&flagEndStream != 0
	in.open[in.stream] = *m
	*m = message{}
	return nil
}

// proceed notes that so much more has come on a stream.
func (in *inbound) proceed(m *message, bytes int64) {
	if m.gained += bytes; m.gained >= progressBytes || !m.incomplete() {
		m.gained, m.step = 0, in.receiving.step.Load()
	}
}

// data takes in a part of a message, or of several.
func (in *inbound) data(b []byte) {
	m := &in.current
	later := in.payload - len(b) // of the frame
	for len(b) > 0 && !in.refused {
		if m.prefixLen == 0 {
			m.gained, m.step = 0, in.receiving.step.Load()
		}
		if m.prefixLen < grpcPrefixBytes {
			n := copy(m.prefix[m.prefixLen:], b)
			m.prefixLen += n
			if m.prefixLen == grpcPrefixBytes {
				if err := in.admit(m); err != nil {
					in.refuse(m, b[:n], int64(later+len(b)-n), err)
				}
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
			m.later = true
		}
	}
}

// refuse ends the stream of a message whose prefix ends with the bytes at hand. gRPC must not execute the message meanwhile: it is given a length
// that gRPC refuses, too. Where the first byte of the length has been handed on already, that is not possible; a message that the rest of the
// frame completes is let pass then.
func (in *inbound) refuse(m *message, prefix []byte, rest int64, err error) {
	if n := len(prefix); n >= grpcPrefixBytes-1 {
		prefix[n-(grpcPrefixBytes-1)] = 0xff
	} else if m.left <= rest {
		return
	}
	in.tell(in.stream, m, err)
	in.refused = true
}

// admit counts a message whose length has become known, or refuses it.
func (in *inbound) admit(m *message) error {
	m.left = m.length()
	if m.left > in.receiving.messageBytes {
		return &mvcc.LimitError{What: "batch bytes", Limit: int(in.receiving.messageBytes), Got: int(m.left)}
	}
	if more := m.left - m.large; m.left >= receivedBytesMin {
		if more <= 0 {
			return nil
		}
		if !in.receiving.large.add(&in.large, more) {
			return errOverloaded
		}
		m.large = m.left
		return nil
	}
	m.raw += grpcPrefixBytes
	m.waiting += grpcPrefixBytes + m.left
	if !in.reserve(m) {
		return errOverloaded
	}
	return nil
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
