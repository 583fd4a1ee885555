package server

import (
	"encoding/binary"
	"slices"
)

// inbound follows the messages in the bytes that one connection receives, and the answers and ends
// of streams in the bytes that it sends. A stream ends for the server when the server ends it,
// whether its client answers or not. It is not for concurrent use.
//
// Invariant: open has the streams that the server has not ended and the client has not reset, and
// none after the last that the server serves. Data for another stream, or after the client has ended
// the stream, contains no message, because gRPC drops it.
type inbound struct {
	receiving *receiving
	streams   *connStreams
	counted   int64 // open streams for which there was room
	received  frames
	headers   bool      // the received header block continues in the next frame
	data      dataFrame // the data frame at hand
	sent      sentFrames
	open      map[uint32]receivedStream // as of the end of the last frame of each stream
	claim     claim                     // to the place beside the share of large messages
	large     int64                     // bytes that the connection has reserved
	small     int64
	window    int64    // bytes that the client may still send on the connection
	unsent    int64    // what the library has not sent, with what it takes
	ending    []uint32 // streams whose reset gRPC has to read between two frames
	telling   []byte   // frames with the reasons, to be sent to the client between two frames
}

// dataFrame is the part of a received data frame that has not arrived yet, and its stream.
type dataFrame struct {
	stream  uint32
	flags   byte
	payload int // bytes to come, without the padding
	padding int // bytes of padding to come
	padded  bool
	refused bool // the current message is refused: its stream ends
	large   bool // a large message has ended in it
	current receivedStream
}

// sentFrames cuts what is sent into frames.
type sentFrames struct {
	frames
	headers   bool            // the sent header block continues in the next frame
	dataBytes uint64          // of all data frames
	number    [wordBytes]byte // at the beginning of a frame's payload: the increment of a window, or the last stream of GOAWAY
	numberLen int
	numbered  bool   // bytes of number come next
	last      uint32 // stream that the server serves
}

func newInbound(r *receiving, streams *connStreams) *inbound {
	return &inbound{
		receiving: r, streams: streams, received: frames{skip: prefaceBytes}, sent: sentFrames{last: streamMax},
		open: map[uint32]receivedStream{}, window: connWindowFirst, claim: claim{client: streams.client},
	}
}

// follow reads what was received next, and changes the length of a message that is refused.
func (in *inbound) follow(b []byte) error {
	for len(b) > 0 {
		switch {
		case in.received.skip == 0 && in.data.padded:
			in.data.padded, in.data.padding = false, int(b[0])
			in.data.payload -= 1 + in.data.padding
			b = b[1:]
			if in.data.payload < 0 {
				return errPadding
			}
			if err := in.endOfPayload(); err != nil {
				return err
			}
		case in.received.skip == 0 && in.data.payload > 0:
			n := min(in.data.payload, len(b))
			in.message(b[:n])
			in.data.payload, b = in.data.payload-n, b[n:]
			if err := in.endOfPayload(); err != nil {
				return err
			}
			if in.data.refused {
				in.data.refused = false
				in.ended(in.data.stream)
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

// begin processes the header of a frame.
func (in *inbound) begin() error {
	f := &in.received
	in.data.stream, in.data.flags = f.stream(), f.flags()
	m, open := in.open[in.data.stream]
	switch f.kind() {
	case frameHeaders, frameContinued:
		in.headers = in.data.flags&flagEndHeaders == 0
	case frameData:
		in.window -= int64(f.length())
	}
	switch kind := f.kind(); {
	case kind == frameData && open && !m.closed:
		in.data.current = m
		in.data.payload, in.data.padded, in.data.large = f.length(), in.data.flags&flagPadded != 0 && f.length() > 0, false
		return in.endOfPayload()
	case kind == frameHeaders && open:
		m.closed = m.closed || in.data.flags&flagEndStream != 0
		in.endIfStalled(in.data.stream, m)
	case kind == frameHeaders && in.data.stream > in.sent.last: // gRPC drops it, and does not say so
	case kind == frameHeaders && int64(len(in.open)) >= in.receiving.openMax():
		return errOpenStreams
	case kind == frameHeaders:
		m = receivedStream{window: streamWindowBytes, closed: in.data.flags&flagEndStream != 0, step: in.receiving.step.Load()}
		m.tooMany = !in.countStreams(1)
		in.open[in.data.stream] = m
	case kind == frameReset:
		in.ended(in.data.stream)
	}
	f.skip = f.length()
	return nil
}

// answered reads what is sent next, for what it says about streams: that they end, or that the
// server has taken messages.
func (in *inbound) answered(b []byte) {
	for f := &in.sent; len(b) > 0; {
		if in.sent.numbered {
			n := copy(in.sent.number[in.sent.numberLen:], b)
			in.sent.numberLen, b = in.sent.numberLen+n, b[n:]
			if in.sent.numberLen == wordBytes {
				f.skip, in.sent.numberLen, in.sent.numbered = f.length()-wordBytes, 0, false
				in.numberSent(binary.BigEndian.Uint32(in.sent.number[:]))
			}
			continue
		}
		var begins bool
		if b, begins = f.next(b); !begins {
			continue
		}
		f.skip = f.length()
		switch f.kind() {
		case frameHeaders, frameContinued:
			in.sent.headers = f.flags()&flagEndHeaders == 0
		case frameData:
			in.sent.dataBytes += uint64(f.length())
		case frameWindow, frameGoAway:
			in.sent.numbered = f.length() >= wordBytes
		}
		if f.kind() == frameData {
			in.change(f.stream(), func(m *receivedStream) { m.library.sent(in, int64(f.length())) })
		}
		switch kind := f.kind(); {
		case kind == frameReset || f.flags()&flagEndStream != 0 && kind == frameHeaders:
			in.ended(f.stream())
		case kind == frameData || kind == frameHeaders:
			in.change(f.stream(), in.answer)
		}
	}
}

// numberSent processes the number of the frame that is being sent.
func (in *inbound) numberSent(number uint32) {
	if in.sent.kind() == frameGoAway {
		in.goneAway(number & streamMax)
	} else {
		in.widened(in.sent.stream(), int64(number))
	}
}

// goneAway records that the server serves no stream after this one. gRPC has decided so before it says so, and has dropped those that began meanwhile.
func (in *inbound) goneAway(last uint32) {
	if last >= in.sent.last {
		return
	}
	in.sent.last = last
	for id := range in.open {
		if id > last {
			in.ended(id)
		}
	}
}

// widened records that the client may send more on a stream, or on the connection. That the server has taken as much of a message does not follow.
func (in *inbound) widened(stream uint32, bytes int64) {
	if stream == 0 {
		in.window += bytes
		return
	}
	in.change(stream, func(m *receivedStream) { m.window += bytes })
}

// answer records that the server has answered on a stream: what it took before is not counted any more. It may not have taken all that has come.
func (in *inbound) answer(m *receivedStream) {
	m.answered = true
	in.drop(m)
}

// drop records that the server keeps nothing of what it has taken. What it has not taken counts on.
func (in *inbound) drop(m *receivedStream) {
	keep, beside := int64(0), false
	count := func(bytes int64, placed bool) {
		if placed {
			beside = true
		} else if bytes >= receivedBytesMin {
			keep = max(keep, bytes)
		}
	}
	count(m.known(), m.placed)
	for _, u := range m.untaken {
		count(u.bytes, u.placed)
	}
	if !beside {
		in.leavePlace(m)
	}
	keep = min(keep, m.large)
	in.receiving.large.release(&in.large, in.streams.of(ownedLarge), m.large-keep)
	m.large = keep
}

// took records that the server has taken a message of so many bytes. A large one counts until the next answer, or until it is dropped.
func (in *inbound) took(stream uint32, bytes int64) {
	in.change(stream, func(m *receivedStream) {
		if bytes < receivedBytesMin {
			m.taken(grpcPrefixBytes + bytes)
		} else if len(m.untaken) > 0 {
			m.untaken = slices.Delete(m.untaken, 0, 1)
		}
		in.shrink(m)
	})
}

// takeAll records that the server has taken all that has come on a stream.
func (in *inbound) takeAll(m *receivedStream) {
	m.untaken = nil
	m.taken(m.raw)
	in.shrink(m)
}

// change changes the state of a stream. It reports false if the stream is not open.
func (in *inbound) change(stream uint32, to func(*receivedStream)) bool {
	m, current := in.at(stream)
	if m == nil {
		return false
	}
	to(m)
	if !current {
		in.open[stream] = *m
	}
	return true
}

// at is the state of a stream, and whether it is the current one itself.
func (in *inbound) at(stream uint32) (m *receivedStream, current bool) {
	if in.within(stream) {
		return &in.data.current, true
	}
	kept, ok := in.open[stream]
	if !ok {
		return nil, false
	}
	return &kept, false
}

// within reports whether the current frame has messages of the stream.
func (in *inbound) within(stream uint32) bool {
	return in.data.stream == stream && (in.data.payload > 0 || in.data.padded)
}

// ended removes a stream, and skips the rest of its message.
func (in *inbound) ended(stream uint32) {
	m, ok := in.open[stream]
	if !ok {
		return
	}
	delete(in.open, stream)
	if in.within(stream) {
		m, in.data.current = in.data.current, receivedStream{}
		in.received.skip = in.data.payload + in.data.padding
		in.data.payload, in.data.padding, in.data.padded = 0, 0, false
	}
	if !m.tooMany {
		in.countStreams(-1)
	}
	in.reset(&m)
}

// countStreams counts streams that have begun, or ended. It reports false if there is no room for one that has begun: then it is not counted.
func (in *inbound) countStreams(streams int64) bool {
	in.counted += streams
	if in.receiving.countStreams(in.streams, in.counted) {
		return true
	}
	in.counted -= streams
	return false
}

// endOfPayload stores the state of the stream at the end of a frame's payload.
func (in *inbound) endOfPayload() error {
	if in.data.payload > 0 || in.data.padded {
		return nil
	}
	in.received.skip, in.data.padding = in.data.padding, 0
	m := &in.data.current
	n := in.received.length()
	m.window -= int64(n)
	m.frame = max(m.frame, int64(n))
	in.proceed(m, int64(n))
	if n > 0 && n < smallFrameBytes {
		m.smallFrame(in.data.large)
		if !in.reserve(m) && !in.data.refused && m.prefixLen > 0 && m.cost()-m.small > smallFramesMax {
			in.open[in.data.stream] = *m
			*m = receivedStream{}
			return errSmallFrames
		}
	}
	m.closed = m.closed || in.data.flags&flagEndStream != 0
	in.endIfStalled(in.data.stream, *m)
	*m = receivedStream{}
	return nil
}

// proceed records that more bytes have arrived on a stream.
func (in *inbound) proceed(m *receivedStream, bytes int64) {
	if m.gained += bytes; m.gained >= in.receiving.progress(m.known(), m.placed) || !m.incomplete() {
		m.gained, m.step = 0, in.receiving.step.Load()
	}
}

// message processes a part of a message, or of several messages.
func (in *inbound) message(b []byte) {
	m := &in.data.current
	later := in.data.payload - len(b) // of the frame
	for len(b) > 0 && !in.data.refused {
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
			if m.known() >= receivedBytesMin {
				m.untaken = append(m.untaken, largeMessage{m.known(), m.frames, m.placed, in.receiving.step.Load()})
				m.frames, m.placed, in.data.large = 0, false, true
			}
			m.prefix, m.prefixLen = [grpcPrefixBytes]byte{}, 0
			m.later = true
		}
	}
}

// end removes all streams.
func (in *inbound) end() {
	for id := range in.open {
		in.ended(id)
	}
	in.receiving.beside.forget(&in.claim)
}
