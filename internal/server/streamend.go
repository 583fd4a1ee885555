package server

import (
	"encoding/binary"
	"slices"

	"golang.org/x/net/http2"

	"github.com/epochkv/epochkv/internal/transport"
)

// findStalled finds the messages that make no progress, and reports whether there are any.
func (in *inbound) findStalled() (found bool) {
	for id, m := range in.open {
		if !in.within(id) { // or the frame's end finds it: a client that stops within a frame does not answer pings, and loses its connection
			found = in.endIfStalled(id, m) || found
		}
	}
	return found
}

// endIfStalled stores the state of a stream, and ends the stream if there is a reason.
func (in *inbound) endIfStalled(stream uint32, m receivedStream) bool {
	err := in.stalled(&m)
	in.open[stream] = m
	if err == nil || in.data.refused {
		return false
	}
	in.tell(stream, &m, err)
	in.ended(stream)
	return true
}

// stalled is why a stream has to end between two frames, or nil.
func (in *inbound) stalled(m *receivedStream) error {
	switch now := in.receiving.step.Load(); {
	case m.closed && m.known() >= receivedBytesMin: // gRPC would end it once its client has taken the answers before, and it may take none
		return errIncomplete
	case m.keepsPlace(now) && in.receiving.isWanted(true):
		return errOverloaded
	case !m.incomplete():
	case (m.window <= 0 || in.window <= 0) && !in.receiving.isWanted(m.placed):
		m.step, m.gained = now, 0
	case now-m.step > stallSteps:
		m.later = m.later && m.prefixLen > 0 // a request that has not ended was not executed
		return errIncomplete
	}
	return nil
}

// betweenFrames reports whether a frame of any stream may come next.
func (in *inbound) betweenFrames() bool {
	f := &in.received
	return f.skip == 0 && f.headerLen == 0 && in.data.payload == 0 && !in.data.padded && !in.headers
}

// untilFrame is a number of bytes that precede the next frame boundary in any case.
func (in *inbound) untilFrame() int {
	f := &in.received
	switch {
	case f.skip > 0:
		return f.skip
	case in.data.padded:
		return 1
	case in.data.payload > 0:
		return in.data.payload
	}
	return frameHeaderBytes - f.headerLen
}

// endStreams puts the resets of streams into b, as many as fit.
func (in *inbound) endStreams(b []byte) int {
	const size = frameHeaderBytes + 4
	frames := b[:0]
	for len(in.ending) > 0 && len(b)-len(frames) >= size {
		frames = transport.AppendReset(frames, in.ending[0], http2.ErrCodeCancel)
		in.ending = in.ending[1:]
	}
	return len(frames)
}

// takeTelling returns the frames to send to the client now, or nil within a frame.
func (in *inbound) takeTelling() []byte {
	if f := &in.sent; f.skip > 0 || f.headerLen > 0 || in.sent.headers {
		return nil
	}
	b := in.telling
	in.telling = nil
	return b
}

// tell ends a stream within a message: gRPC reads a reset frame, and the client gets a status with
// the reason.
func (in *inbound) tell(stream uint32, m *receivedStream, err error) {
	in.receiving.refused.Add(1)
	if m.later {
		err = &laterMessageError{cause: err}
	}
	in.ending = append(in.ending, stream)
	in.telling = appendRefusal(in.telling, stream, statusOf(err), !m.answered)
}

// refuse ends the stream of a message whose prefix ends with the bytes at hand. gRPC must not
// execute the message meanwhile, so the message also gets a length that gRPC refuses. That is not
// possible if gRPC has already received the first byte of the length; then a message that the rest
// of the frame completes is not refused.
func (in *inbound) refuse(m *receivedStream, prefix []byte, rest int64, err error) {
	if n := len(prefix); n >= grpcPrefixBytes-1 {
		prefix[n-(grpcPrefixBytes-1)] = 0xff
	} else if m.left <= rest {
		return
	}
	in.tell(in.data.stream, m, err)
	in.data.refused = true
}

// redirect changes the frame header at the end of b if it announces data for a stream that is being
// ended, so that gRPC drops the data.
func (in *inbound) redirect(b []byte) {
	f := &in.received
	const id = 4
	if len(in.ending) > 0 && f.kind() == frameData && len(b) >= id && slices.Contains(in.ending, f.stream()) {
		binary.BigEndian.PutUint32(b[len(b)-id:], noStream)
	}
}
