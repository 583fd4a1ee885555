package server

import (
	"encoding/binary"
	"slices"

	"github.com/epochkv/epochkv/internal/mvcc"
)

// receivedStream is the state of one stream: the message that is being received, and the bytes that
// are reserved for it and for earlier messages.
type receivedStream struct {
	prefix    [grpcPrefixBytes]byte
	prefixLen int
	left      int64 // bytes of the message to come
	large     int64 // bytes reserved as large
	beside    bool  // a message has the place beside the share of large ones
	placed    bool  // the message that is being received has that place
	waiting   int64 // the cost of the small messages, including bytes not yet received
	frames    int64 // the cost of the small frames of the message that is being received, while it may be a large one
	raw       int64 // received bytes of the small messages
	frame     int64 // bytes of the largest frame since all of them were taken
	small     int64 // bytes reserved as small: waiting, except for less than smallStep
	window    int64 // bytes that the client may still send on the stream
	gained    int64 // bytes received since step
	step      uint32
	closed    bool           // the client has ended the stream
	answered  bool           // the server has sent headers
	later     bool           // an earlier message was received completely
	tooMany   bool           // there was no room for the stream when it began
	untaken   []largeMessage // oldest first; few, since the window is not wider
	library   *libraryStream // nil until the library has read its headers
}

// largeMessage is one that was received completely, and that the server has not taken.
type largeMessage struct {
	bytes  int64
	frames int64 // the cost of its small frames
	placed bool  // it has the place beside the share
	step   uint32
}

// keepsPlace reports whether a message has been in the place beside the share since it was complete, for too long, because the handler waits for the client
// to take its answers.
func (m *receivedStream) keepsPlace(now uint32) bool {
	return m.library != nil && m.library.waits && slices.ContainsFunc(m.untaken, func(u largeMessage) bool { return u.placed && now-u.step > stallSteps })
}

// cost is what small messages, and small frames, cost.
func (m *receivedStream) cost() int64 {
	cost := m.waiting + m.frames
	for i := range m.untaken {
		cost += m.untaken[i].frames
	}
	return cost
}

// smallFrame counts a small frame, in which perhaps a large message has ended.
func (m *receivedStream) smallFrame(endedLarge bool) {
	switch last := len(m.untaken) - 1; {
	case m.prefixLen > 0 && m.smallLeft() == 0:
		m.frames += frameOverhead
	case endedLarge && last >= 0:
		m.untaken[last].frames += frameOverhead
	default:
		m.waiting += frameOverhead
	}
}

// incomplete reports whether the client must send more: the rest of a message, or, until the server
// has answered, the end of the request. The server sends headers at once on a stream that may
// continue after a message.
func (m *receivedStream) incomplete() bool { return !m.closed && (m.prefixLen > 0 || !m.answered) }

// length is the length that the prefix declares.
func (m *receivedStream) length() int64 { return int64(binary.BigEndian.Uint32(m.prefix[1:])) }

// known is the length of the message that is being received; 0: it is not known.
func (m *receivedStream) known() int64 {
	if m.prefixLen < grpcPrefixBytes {
		return 0
	}
	return m.length()
}

// smallLeft is the number of bytes of a small message that are not yet received.
func (m *receivedStream) smallLeft() int64 {
	if n := m.known(); n == 0 || n >= receivedBytesMin {
		return 0
	}
	return m.left
}

// taken subtracts bytes that the server has taken from the cost of the small messages. The library keeps a frame until it has handed on all of its
// messages: a small one may follow what has filled it.
func (m *receivedStream) taken(bytes int64) {
	left := m.smallLeft()
	if bytes >= m.raw {
		m.raw, m.waiting, m.frame = 0, left, 0
	} else if bytes > 0 {
		all := m.waiting
		m.waiting -= (m.waiting - left) * bytes / m.raw
		m.waiting = max(m.waiting, min(all, m.frame))
		m.raw -= bytes
	}
}

// admit counts a message whose length has become known, or refuses it.
func (in *inbound) admit(m *receivedStream) error {
	m.left = m.length()
	if m.left > in.receiving.messageBytes {
		return &mvcc.LimitError{What: "batch bytes", Limit: int(in.receiving.messageBytes), Got: int(m.left)}
	}
	if m.left >= receivedBytesMin {
		return in.admitLarge(m)
	}
	m.raw += grpcPrefixBytes
	m.waiting += grpcPrefixBytes + m.left + m.frames
	m.frames = 0
	if !in.reserve(m) {
		return errOverloaded
	}
	return nil
}

// admitLarge is admit for a message that is not small. If it is too large for the share, and its stream has the place beside the share, it has that, too.
func (in *inbound) admitLarge(m *receivedStream) error {
	r := in.receiving
	switch always := m.left > r.large.limit/2; {
	case always && m.beside:
		m.placed = true
	case m.left <= m.large:
	default:
		beside, ok := r.addLarge(&in.large, in.streams.of(ownedLarge), in, &in.claim, m.left, m.large)
		if !ok {
			return errOverloaded
		}
		if m.placed = beside; beside {
			m.beside = true
		} else {
			m.large = m.left
		}
	}
	return nil
}

// reserve reserves room for the small messages of a stream, or reports that there is none.
func (in *inbound) reserve(m *receivedStream) bool {
	more := m.cost() - m.small
	if more < smallStep {
		return true
	}
	if !in.receiving.small.add(&in.small, in.streams.of(ownedSmall), more) {
		return false
	}
	m.small += more
	return true
}

// leavePlace gives up the place beside the share, if a message of the stream has it.
func (in *inbound) leavePlace(m *receivedStream) {
	if m.beside {
		m.beside = false
		in.receiving.beside.drop(in)
	}
}

// shrink releases the reservation for small messages that the server has taken.
func (in *inbound) shrink(m *receivedStream) {
	keep := m.cost()
	if keep < smallStep {
		keep = 0
	}
	if m.small > keep {
		in.receiving.small.release(&in.small, in.streams.of(ownedSmall), m.small-keep)
		m.small = keep
	}
}

// reset releases all reservations of a stream.
func (in *inbound) reset(m *receivedStream) {
	m.library.end(in)
	in.leavePlace(m)
	in.receiving.large.release(&in.large, in.streams.of(ownedLarge), m.large)
	in.receiving.small.release(&in.small, in.streams.of(ownedSmall), m.small)
	*m = receivedStream{}
}
