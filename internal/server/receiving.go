package server

import (
	"errors"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/config"
)

// receiving bounds the memory of messages that are being received, wait to be decoded, or are
// executed. gRPC itself bounds each message only. A message is admitted when its first five bytes,
// and so its length, are known. A refused message is given a length that gRPC refuses: its request
// ends with RESOURCE_EXHAUSTED, and the other requests of the connection continue.
//
// A stream counts in two shares, from its first message until it ends:
//   - the largest of its large messages that wait for their handler, or that the server has taken since it last answered, or last said that it keeps
//     none of them: gRPC takes the next message from the window only after it has decoded the one before;
//   - all its small messages that the server has not taken, with their declared lengths and the
//     overhead of small frames. Their handler says which it has taken: see libraryStream.
//
// A connection gets bytes of a share only if afterwards at least as many are free as it has, or if there are no others. All connections of a client
// together leave a quarter: see owned. A message of more than half of the share has the only place beside it, whatever its size: so it neither waits
// for the others to end, nor keeps them out. What is large for the share, and finds no room in it, may have that place, too: a few connections that
// send large messages all the time leave a free part of the share in which it never fits.
//
// An incomplete message must make progress. A client that sends less than progressBytes of it
// within the configured time, although the windows allow more, has its stream ended. The same
// happens if the message is complete and the client does not end its request. A message beside the share must come faster, and whatever the windows
// are, while another wants its place: see slotParts.
type receiving struct {
	large, small receivingShare
	beside       largeSlot      // for a message of more than half of large, or one that finds no room in it
	streams      receivingShare // counts streams
	clients      streamClients
	beyond       atomic.Int64 // streams of operators that the limit does not carry
	messageBytes int64        // of the largest message that gRPC takes
	refused      atomic.Uint64
	step         atomic.Uint32 // counts the checks for progress
}

// progressBytes is the part of an incomplete message that must arrive in the configured time:
// 256 KiB in 30 s.
const progressBytes = 256 << 10

// streamStep is how many streams a connection reserves at once while they are not scarce, so that connections rarely write to
// the count that all of them share.
const streamStep = 8

const (
	// receivedBytesMin is the size of the smallest large message.
	receivedBytesMin = 64 << 10
	// smallStep is the number of bytes that a stream may have without a reservation; the number of
	// streams bounds the sum. So the shared count is written once for several small messages.
	smallStep = 4 << 10
	// smallFramesMax is the largest overhead of the frames within one message while the share has
	// no room for it.
	smallFramesMax = 16 << 10
	// A frame of less than smallFrameBytes costs frameOverhead beside its payload.
	smallFrameBytes = 512
	frameOverhead   = 128
)

// errPadding closes a connection that does not speak HTTP/2, as gRPC would.
var errPadding = errors.New("server: a frame has more padding than payload")

// errSmallFrames closes a connection that sends a message in small frames for which there is no
// room.
var errSmallFrames = errors.New("server: a message arrives in too many small frames")

// errOpenStreams closes a connection with more streams than gRPC lets it have: gRPC drops them, and could not yet say so.
var errOpenStreams = errors.New("server: more streams than the connection may have")

// openMax is more than the streams that a connection may have open: half of all, twice if the ends of as many are to be sent, and those whose first
// frames, or whose ends, are in the buffers.
func (r *receiving) openMax() int64 {
	return 2*int64(r.streamsOfOne()) + (readBufBytes+writeBufBytes)/frameHeaderBytes
}

// beyondMax bounds the streams of operators that the limit of streams does not carry: while users are not checked, every client may open them.
// An operator that finds none has those that its connection may always have.
const beyondMax = 64

// countBeyond changes how many streams a connection has beyond the limit. It reports false if there may not be as many.
func (r *receiving) countBeyond(conn *int64, n int64) bool {
	if more := n - *conn; more != 0 && r.beyond.Add(more) > beyondMax && more > 0 {
		r.beyond.Add(-more)
		return false
	}
	*conn = n
	return true
}

type receivingShare struct {
	limit    int64 // of all connections
	reserved atomic.Int64
}

// init sets the limits. Small messages get twice as much, because each stream that flow control
// stops may hold a window of them.
func (r *receiving) init(inflight, streams, messageBytes int64) {
	r.messageBytes = messageBytes
	r.large.limit, r.small.limit, r.streams.limit = inflight/4, inflight/2, streams
}

// add reserves bytes for a connection that has reserved *conn bytes: if afterwards at least as many are free as it has, and its client leaves
// enough, or if no others are reserved.
func (s *receivingShare) add(conn *int64, client owned, bytes int64) bool {
	all := s.reserved.Add(bytes)
	_, ofClient := client.add(bytes)
	if has := *conn + bytes; all != bytes && (has > s.limit-all || !client.leaves(bytes, has, ofClient, s.limit-all, s.limit)) {
		s.reserved.Add(-bytes)
		client.add(-bytes)
		return false
	}
	*conn += bytes
	return true
}

func (s *receivingShare) release(conn *int64, client owned, bytes int64) {
	if bytes > 0 {
		*conn -= bytes
		s.reserved.Add(-bytes)
		client.add(-bytes)
	}
}

// addLarge counts the bytes of a message that is not small, for a connection that has reserved *conn bytes of the share of large messages. They count in
// that share, where so many of them are counted already, or in the place beside it, which the owner takes with its claim. It reports false if there is no
// room.
func (r *receiving) addLarge(conn *int64, client owned, owner any, c *claim, bytes, counted int64) (beside, ok bool) {
	if bytes <= r.large.limit/2 {
		if r.large.add(conn, client, bytes-counted) {
			return false, true
		}
		if bytes <= r.large.limit/largePart {
			return false, false
		}
	}
	ok = r.beside.take(owner, c, bytes)
	return ok, ok
}

// progress is how much of a message of so many bytes, which is in the place beside the share or not, must arrive in the configured time.
func (r *receiving) progress(bytes int64, beside bool) int64 {
	if beside {
		return max(progressBytes, bytes*int64(r.beside.haste())/slotParts)
	}
	return progressBytes
}

// isWanted reports whether others are refused because of a message, which is in the place beside the share or not. Then it must come whatever the windows
// are: its client may keep them closed itself, with what it does not let other streams take.
func (r *receiving) isWanted(beside bool) bool { return beside && r.beside.haste() > 0 }

// streamsOfOne is how many streams a connection may have while it is the only one that has more than its own.
func (r *receiving) streamsOfOne() int {
	return config.StreamsOwn + int(r.streams.limit/2)
}

// countStreams changes what a connection has reserved to what its open streams need, and some in spare. It
// reports false if there is not that much.
func (r *receiving) countStreams(conn *connStreams, open int64) bool {
	n := max(0, open-config.StreamsOwn)
	for conn.used < n && (conn.takeSpare() || r.reserveStream(conn)) {
		conn.used++
	}
	if conn.used > n {
		conn.spare.Add(conn.used - n)
		conn.used = n
	}
	if n == 0 || conn.spare.Load() >= 2*streamStep || r.clients.scarce.Load() { // read after the spare has changed: see returnSpare
		r.releaseSpare(conn)
	}
	return n <= conn.used
}
