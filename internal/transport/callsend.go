package transport

import (
	"context"
	"runtime"
	"slices"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// callPendingMax is how many bytes of a call wait for its windows before SendMsg waits.
const callPendingMax = 64 << 10

// flushNowMin is how much a handler has to send when a system call of its own costs little beside it:
// shorter messages share one.
const flushNowMin = 4 << 10

var (
	errHeaderSent     = status.New(codes.Internal, "transport: the headers have been sent")
	errAnswerMetadata = status.New(codes.Internal, "transport: the metadata has names or values that gRPC does not allow")
)

// SetHeader implements grpc.ServerStream.
func (k *call) SetHeader(md metadata.MD) error {
	if !isAnswerMetadata(md) {
		return errAnswerMetadata.Err()
	}
	k.conn.mu.Lock()
	defer k.conn.mu.Unlock()
	if k.stream.answered {
		return errHeaderSent.Err()
	}
	k.header = metadata.Join(k.header, md)
	return nil
}

// SendHeader implements grpc.ServerStream.
func (k *call) SendHeader(md metadata.MD) error {
	if !isAnswerMetadata(md) {
		return errAnswerMetadata.Err()
	}
	k.conn.mu.Lock()
	defer k.conn.mu.Unlock()
	if err := k.endedLocked(); err != nil {
		return err
	}
	if k.stream.answered {
		return errHeaderSent.Err()
	}
	k.sendHeaderLocked(md)
	k.conn.flushSoonLocked()
	return nil
}

// SetTrailer implements grpc.ServerStream.
func (k *call) SetTrailer(md metadata.MD) {
	if !isAnswerMetadata(md) {
		return
	}
	k.conn.mu.Lock()
	defer k.conn.mu.Unlock()
	k.trailer = metadata.Join(k.trailer, md)
}

// sendHeaderLocked sends the headers, unless they have been sent.
func (k *call) sendHeaderLocked(md metadata.MD) {
	c, s := k.conn, k.stream
	if s.answered {
		return
	}
	if len(k.header) == 0 && len(md) == 0 {
		c.out.buf = c.answerHeadersLocked(c.out.buf, s)
		return
	}
	s.answered, c.liveness.answered = true, true
	block := c.encoder.appendHeaders(nil)
	c.sendBlockLocked(s, appendMetadata(appendMetadata(block, k.header), md), false)
}

// SendMsg implements grpc.ServerStream. It waits while the client takes nothing.
func (k *call) SendMsg(m any) error {
	var sent func()
	if m, ok := m.(Counted); ok {
		sent = m.Sent
	}
	buf, err := k.encode(m)
	if err == nil {
		err = k.send(buf, sent)
	}
	if err != nil {
		if sent != nil {
			sent()
		}
		return k.fail(err)
	}
	return nil
}

// Counted is a message of a handler that counts until the transport holds none of its bytes any more.
type Counted interface{ Sent() }

// send sends an encoded message.
func (k *call) send(buf *[]byte, sent func()) error {
	c := k.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := k.endedLocked(); err != nil {
		k.buffers().Put(buf)
		return err
	}
	k.sendHeaderLocked(nil)
	k.sendLocked(buf, sent)
	if k.stream.pending.bytes >= flushNowMin && !c.out.flushing {
		c.flushLocked()
	} else {
		c.flushSoonLocked()
	}
	return nil
}

// Dropped says that the handler with this context has dropped the message that it received last, before it answers: otherwise its client could keep the
// room of others by not taking its answers. Nothing may receive meanwhile: the room could be that of a message that arrives. It does nothing if the context
// is of no call.
func Dropped(ctx context.Context) {
	if t, ok := grpc.ServerTransportStreamFromContext(ctx).(transportStream); ok {
		t.conn.mu.Lock()
		defer t.conn.mu.Unlock()
		t.releaseLocked()
	}
}

// AwaitSent waits until the client's windows have taken what the handler with this context has sent, but
// for at most some bytes. What the handler makes only then does not wait for a client that takes nothing.
// It returns at once if the context is of no call.
func AwaitSent(ctx context.Context, left int) error {
	if t, ok := grpc.ServerTransportStreamFromContext(ctx).(transportStream); ok {
		return t.waitRoom(left + 1)
	}
	return nil
}

// RequireProgress makes the messages of the call with this context count like answers of unary requests: a client that takes none of them
// for the progress timeout loses its connection. Other calls have timeouts of their own, or none.
func RequireProgress(ctx context.Context) {
	if t, ok := grpc.ServerTransportStreamFromContext(ctx).(transportStream); ok {
		t.conn.mu.Lock()
		defer t.conn.mu.Unlock()
		t.mustProgress = true
	}
}

// LimitRest lets what the stream of a context has pending, once its handler has returned, end with it unless the client takes all of that within one
// progress timeout: nothing counts it any more.
func LimitRest(ctx context.Context) {
	if t, ok := grpc.ServerTransportStreamFromContext(ctx).(transportStream); ok {
		t.conn.mu.Lock()
		defer t.conn.mu.Unlock()
		t.restLimited = true
	}
}

// waitForOthers waits until few enough bytes are pending for another message. A small one is counted by
// nothing but the number of streams.
func (k *call) waitForOthers(small bool) error {
	c := k.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	most := callPendingMax
	if small {
		most = min(most, c.pendingMaxLocked())
	}
	return k.waitRoomLocked(most)
}

// waitRoom waits until less than so many bytes are pending.
func (k *call) waitRoom(most int) error {
	k.conn.mu.Lock()
	defer k.conn.mu.Unlock()
	return k.waitRoomLocked(most)
}

func (k *call) waitRoomLocked(most int) error {
	c, s := k.conn, k.stream
	for {
		if err := k.endedLocked(); err != nil {
			return err
		}
		if s.pending.bytes < most {
			return nil
		}
		if !c.out.flushing && c.sendWindow > 0 && s.sendWindow > 0 {
			c.flushLocked()
			continue
		}
		k.crowded = most
		k.changed.Wait()
	}
}

// encode encodes a message with its prefix into a buffer of the pool, when there is room for it.
func (k *call) encode(m any) (buf *[]byte, err error) {
	message, sized := m.(Message)
	size := 0
	if sized {
		size = message.SizeVT()
	}
	if err := k.waitForOthers(size < pendingLeast); err != nil { // others are messages of gRPC's own services
		return nil, err
	}
	services := k.conn.server.services
	if sized {
		if size > services.MessageBytesMax {
			return nil, errTooLarge(size, services.MessageBytesMax)
		}
		buf = k.buffers().Get(grpcPrefixBytes + size)
		if _, err = message.MarshalToSizedBufferVT((*buf)[grpcPrefixBytes:]); err == nil {
			putPrefix(*buf, size)
			return buf, nil
		}
		k.buffers().Put(buf)
		return nil, errEncoding(err)
	}
	encoded, err := services.Codec.Marshal(m)
	if err != nil {
		return nil, errEncoding(err)
	}
	defer encoded.Free()
	if size := encoded.Len(); size > services.MessageBytesMax {
		return nil, errTooLarge(size, services.MessageBytesMax)
	}
	buf = k.buffers().Get(grpcPrefixBytes + encoded.Len())
	putPrefix(*buf, encoded.Len())
	encoded.CopyTo((*buf)[grpcPrefixBytes:])
	return buf, nil
}

func (k *call) buffers() mem.BufferPool { return k.conn.server.services.Buffers }

func errTooLarge(size, most int) error {
	return status.Errorf(codes.ResourceExhausted, "trying to send message larger than max (%d vs. %d)", size, most)
}

func errEncoding(err error) error {
	return status.Errorf(codes.Internal, "grpc: error while marshaling: %v", err)
}

// sendLocked sends an encoded message: into the output if it is small and the windows allow it.
func (k *call) sendLocked(buf *[]byte, sent func()) {
	c, s, b, size := k.conn, k.stream, *buf, len(*buf)
	switch {
	case s.pending.bytes == 0 && size <= min(s.sendWindow, c.sendWindow, smallAnswerMax) && len(c.out.buf) < outMax:
		c.out.buf = AppendFrameHeader(c.out.buf, len(b), http2.FrameData, 0, s.id)
		c.out.buf = append(c.out.buf, b...)
		s.sendWindow -= len(b)
		c.sendWindow -= len(b)
		c.liveness.answered = true
		k.buffers().Put(buf)
		if sent != nil {
			sent()
		}
		return
	case sent == nil && size <= smallAnswerMax:
		copy(s.pending.extend(size), b)
		k.buffers().Put(buf)
	default:
		s.pending.push(b, func() {
			k.buffers().Put(buf)
			if sent != nil {
				sent()
			}
		})
	}
	c.pending += size
	c.queueLocked(s)
}

// sentLocked: the client's windows have taken something.
func (k *call) sentLocked() {
	if k.stream.pending.bytes < k.crowded {
		k.crowded = 0
		k.changed.Broadcast()
	}
}

// sendsMuchLocked reports whether calls have much to send. The reader then reads on, so that the
// windows which the client gives meanwhile keep the answer going.
func (c *Conn) sendsMuchLocked() bool {
	return slices.ContainsFunc(c.senders, func(s *stream) bool { return s.call != nil && s.pending.bytes >= flushNowMin })
}

// flushAsideLocked writes what is to be sent, in a goroutine of its own.
func (c *Conn) flushAsideLocked() {
	if c.out.flushing || c.out.soon {
		return
	}
	c.out.soon = true
	c.server.goroutines.Go(c.flushAside)
}

func (c *Conn) flushAside() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.out.soon = false
	if !c.out.flushing {
		c.flushLocked()
	}
}

// flushSoonLocked writes what is to be sent, after the goroutines that can run now: handlers then
// share a system call, and the last message of one is sent with its trailers. The reader does so at
// the end of a burst that has woken handlers, unless it executes a request meanwhile, which may wait.
// Otherwise a goroutine does.
func (c *Conn) flushSoonLocked() {
	if c.woke && c.role.Load()%2 == 0 || c.out.flushing || c.out.soon || len(c.out.buf) == 0 && len(c.senders) == 0 {
		return
	}
	c.out.soon = true
	c.server.goroutines.Go(func() {
		runtime.Gosched()
		c.flushAside()
	})
}
