package transport

import (
	"encoding/binary"
	"errors"
	"io"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
)

// inbox is what has come for a call. The connection's mutex guards it.
type inbox struct {
	received []byte // and not taken: begins with the prefix of a message
	before   int    // bytes that were taken from its array since that was new, or more
	spare    []byte // for received
	dropped  bool   // nothing is taken any more
	refused  error  // why no message after received is taken: its rest did not come in time
	need     int    // bytes of received, without which a goroutine that receives need not be woken; 0: none waits
	counted  int    // bytes of received that the windows no longer hold
	reserved int    // what Receive has admitted for the message at hand
	taken    int    // messages
}

// spareBytesMax is the largest buffer that a call keeps for the next message: it may be idle for hours, and streams are counted with about as much.
const spareBytesMax = 4 << 10

var errTwoMessages = status.New(codes.Internal, "cardinality violation: received multiple request messages for non-client-streaming RPC")

// RecvMsg implements grpc.ServerStream.
func (k *call) RecvMsg(m any) error {
	err := k.receive(m)
	if err == nil && !k.method.streams {
		err = k.receiveEnd()
	}
	if err == nil || errors.Is(err, io.EOF) && k.method.streams {
		return err
	}
	if errors.Is(err, io.EOF) {
		err = status.Error(codes.Internal, "cardinality violation: received no request message from non-client-streaming RPC")
	}
	return k.fail(err)
}

// receive takes the next message and decodes it. The codec may keep the only message of a call until RecvMsg
// returns.
func (k *call) receive(m any) error {
	message, whole, err := k.take()
	if err != nil {
		return err
	}
	err = k.conn.server.services.Codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(message[grpcPrefixBytes:])}, m)
	if whole && k.method.streams && cap(message) <= spareBytesMax {
		k.conn.mu.Lock()
		k.spare = message[:0]
		k.conn.mu.Unlock()
	}
	if err != nil && k.ctx.Err() != nil {
		return status.FromContextError(k.ctx.Err()).Err() // the codec waits for room, but no longer than that
	}
	if err != nil {
		return status.Errorf(codes.Internal, "grpc: failed to unmarshal the received message: %v", err)
	}
	return nil
}

// take waits for a message and takes it, with its prefix. Whole says that its array has nothing else.
func (k *call) take() (message []byte, whole bool, err error) {
	c, s := k.conn, k.stream
	c.mu.Lock()
	defer c.mu.Unlock()
	k.releaseLocked()
	need := grpcPrefixBytes
	for {
		if err := k.endedLocked(); err != nil {
			return nil, false, err
		}
		if len(k.received) >= need && need == grpcPrefixBytes {
			n, err := k.admitLocked()
			if err != nil {
				return nil, false, err
			}
			need += n
		}
		switch {
		case len(k.received) >= need:
			message, whole = k.takeLocked(need)
			return message, whole, nil
		case k.refused != nil:
			return nil, false, k.refused
		case s.recvEnded && len(k.received) == 0:
			return nil, false, io.EOF
		case s.recvEnded:
			return nil, false, status.Error(codes.Internal, io.ErrUnexpectedEOF.Error())
		}
		k.waitLocked(need)
	}
}

// admitLocked admits the message whose prefix has come, and returns its length.
func (k *call) admitLocked() (length int, err error) {
	switch k.received[0] {
	case 0:
	case 1:
		return 0, statusCompressed().Err()
	default:
		return 0, status.Errorf(codes.Internal, "grpc: received unexpected payload format %d", k.received[0])
	}
	length = int(binary.BigEndian.Uint32(k.received[1:]))
	if err := k.method.admit(k.conn.client, length); err != nil {
		if k.taken > 0 {
			err = &LaterError{Cause: err}
		}
		return 0, k.conn.client.Status(err).Err()
	}
	if length >= receivedBytesMin {
		k.reserved = length
	}
	return length, nil
}

// takeLocked takes a message. It is the caller's own.
func (k *call) takeLocked(n int) (message []byte, whole bool) {
	k.countLocked(n)
	k.counted -= n
	k.taken++
	k.conn.callMessages++
	if len(k.conn.out.buf) > 0 { // windows
		k.conn.flushSoonLocked()
	}
	if message, whole = k.received, len(k.received) == n; !whole {
		message = message[:n:n]
	}
	k.before += n
	k.received = ownArray(k.received[n:], &k.before)
	_ = k.countWaitingLocked() // it is less than before
	return message, whole
}

// countLocked gives the windows of the first n bytes back to the client.
func (k *call) countLocked(n int) {
	if more := n - k.counted; more > 0 {
		k.counted = n
		k.conn.takenLocked(more)
		k.conn.widenLocked(k.stream, more)
	}
}

// countNeededLocked gives back the windows of a message that a goroutine waits for: its rest must come,
// however large it is.
func (k *call) countNeededLocked() {
	if k.need > grpcPrefixBytes {
		k.countLocked(min(k.need, len(k.received)))
	}
}

// waitLocked waits until so many bytes have come, or the stream has changed otherwise.
func (k *call) waitLocked(need int) {
	k.need = need
	k.countNeededLocked()
	if len(k.conn.out.buf) > 0 { // windows
		k.conn.flushSoonLocked()
	}
	k.changed.Wait()
	k.need = 0
}

// receiveEnd waits for the end of a request that has one message.
func (k *call) receiveEnd() error {
	c := k.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch err := k.endedLocked(); {
		case err != nil:
			return err
		case len(k.received) > 0:
			return errTwoMessages.Err()
		case k.refused != nil:
			return k.refused
		case k.stream.recvEnded:
			return nil
		}
		k.waitLocked(1)
	}
}

// releaseLocked gives back what the message before had reserved.
func (k *call) releaseLocked() {
	if k.reserved > 0 {
		k.conn.client.Received(k.reserved)
		k.reserved = 0
	}
}

// arrivedLocked takes bytes that the client has sent.
func (k *call) arrivedLocked(payload []byte) {
	if k.dropped || k.refused != nil {
		k.conn.takenLocked(len(payload))
	} else {
		if k.received == nil {
			k.received, k.spare = k.spare, nil
		}
		k.received = appendPart(k.received, payload, k.need)
		if err := k.countWaitingLocked(); err != nil {
			if k.taken > 0 || k.wholeBytes() > 0 {
				err = &LaterError{Cause: err}
			}
			k.refuseRestLocked(k.conn.client.Status(err))
		}
	}
	k.changedLocked()
}

// countWaitingLocked counts what was not taken.
func (k *call) countWaitingLocked() error {
	return k.conn.countWaitingLocked(k.stream, max(len(k.received)-k.reserved, min(len(k.received), 1)))
}

// changedLocked wakes the goroutine that receives, if it has something to do.
func (k *call) changedLocked() {
	k.countNeededLocked()
	if k.need > 0 && (len(k.received) >= k.need || k.stream.recvEnded) {
		k.conn.woke = true
		k.changed.Broadcast()
	}
}

// dropLocked drops what has come and will not be taken, so that the client may send as much on other
// streams. The message that was taken last stays reserved until the handler returns.
func (k *call) dropLocked() {
	k.dropped = true
	k.conn.takenLocked(len(k.received) - k.counted)
	k.received, k.spare, k.counted = nil, nil, 0
	_ = k.countWaitingLocked() // there is none
}

// refuseRestLocked drops the part of a message whose rest does not come, and what may come later. The handler learns it when it has taken
// what is complete, and asks for more: what it executes at the moment is answered.
func (k *call) refuseRestLocked(st *status.Status) {
	whole := k.wholeBytes()
	rest, counted := len(k.received)-whole, max(k.counted-whole, 0)
	k.refused = st.Err()
	k.conn.takenLocked(rest - counted)
	k.counted -= counted
	k.received = ownArray(k.received[:whole], &k.before)
	_ = k.countWaitingLocked() // it is less than before
	k.changed.Broadcast()
}

// within reports whether a part of a message has come, and not its end.
func (k *call) within() bool { return k.wholeBytes() < len(k.received) }

// wholeBytes is the length of the complete messages.
func (k *call) wholeBytes() int {
	at := 0
	for len(k.received)-at >= grpcPrefixBytes {
		n := grpcPrefixBytes + int(binary.BigEndian.Uint32(k.received[at+1:]))
		if n > len(k.received)-at {
			break
		}
		at += n
	}
	return at
}

// incompleteError is the error of a request whose rest does not come. After a complete message that
// was not followed by a part of another, the request was not executed, so nothing was executed before.
func (k *call) incompleteError() error {
	if k.within() && k.taken > 0 {
		return &LaterError{Cause: ErrIncomplete}
	}
	return ErrIncomplete
}
