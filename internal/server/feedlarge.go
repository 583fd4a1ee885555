package server

import (
	"context"
	"math"
	"sync"

	"google.golang.org/grpc/mem"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/transport"
)

// takeLarge sends a large operation, when there is room for it and for its previous value. While the stream waits for room, the
// watch may lose its queue. The stream keeps the room until the watch has the operation again: then it is delivered also where both
// take long. It sends nothing while a queue is kept for it, because others may wait for that.
func (w *watchStream) takeLarge(ctx context.Context, next *feed.Delivery, limit feed.Limit) error {
	sw := next.Watch.Tag.(*streamWatch)
	before, err := w.previousSize(sw, next.Epoch, next.Key)
	if err != nil {
		return w.end(ctx, sw, err)
	}
	defer w.release()
	if ok, err := w.charge(ctx, sw, next.Large+before); !ok {
		return err
	}
	defer w.consumer.Forgo()
	for limit.Large = next.Large; w.isOpen(sw); {
		limit.Bytes = w.responseLimit() // of what may have come instead, and may be several operations
		if d, ok := w.consumer.Take(next.Watch, limit); ok {
			if len(d.Parts) == 0 { // it has ended, or the log does not have the operation any more
				w.release()
			}
			return w.deliver(ctx, &d)
		}
		w.giveResponse()
		if err := w.pause(ctx, math.MaxInt64, nil, nil); err != nil {
			return err
		}
		if !w.isChecked() {
			return nil // the rights are checked first
		}
	}
	return nil
}

// charge waits until there is room for a large response, which the stream then has until release. A delivery that is in memory keeps what was taken for it.
// Meanwhile the stream executes requests, sends progress, and checks the rights to the watches. It reports false if the watch has ended: then the stream has no room.
func (w *watchStream) charge(ctx context.Context, sw *streamWatch, bytes int) (ok bool, err error) {
	w.release() // a stream that waits for room has none
	w.giveResponse()
	room := w.server.admission.watches.enter(w.conn, w.response.client, bytes, &w.turn.holds)
	w.room = room
	defer func() {
		if !ok {
			w.release()
		}
	}()
	var ended <-chan struct{}
	if sw.walk != nil {
		ended = sw.walk.snapshot.ended
	}
	for {
		if err := w.endForbidden(ctx); err != nil || !w.isOpen(sw) {
			return false, err
		}
		select {
		case <-room.given:
			return true, nil
		case <-ended:
			return false, nil
		default:
		}
		if err := w.wait(ctx, room.given, ended); err != nil {
			return false, err
		}
	}
}

// release gives back the room that the stream has, if any.
func (w *watchStream) release() {
	w.room.leave()
	w.room = nil
	w.turn.since.Store(0)
}

// isOpen reports whether a watch of the stream has not ended.
func (w *watchStream) isOpen(sw *streamWatch) bool {
	return w.watches[sw.id] == sw && (sw.watch == nil || !sw.watch.Ended())
}

// sendLarge sends a large response, and returns when the client's windows have taken it.
func (w *watchStream) sendLarge(ctx context.Context, out encoder, size int) error {
	m := newCountedMessage(out)
	if err := w.stream.SendMsg(m); err != nil {
		return err
	}
	for left := size - sentStep; left > 0; left -= sentStep {
		if err := transport.AwaitSent(w.stream.Context(), left); err != nil {
			return err
		}
		w.sending.Store(max(int64(w.server.clock.now()), 1)) // the client has taken something
	}
	return m.awaitSent(ctx)
}

// sentStep is how much of a large response a client that takes it slowly takes at least within --watch-stall-timeout.
const sentStep = 64 << 10

// countedMessage is a message that says when the transport has sent it. That of the gRPC library does so after SendMsg has returned.
type countedMessage struct {
	encoder
	sent chan struct{}
	once sync.Once
}

func newCountedMessage(m encoder) *countedMessage {
	return &countedMessage{encoder: m, sent: make(chan struct{})}
}

// awaitSent waits until the transport has sent the message.
func (m *countedMessage) awaitSent(ctx context.Context) error {
	select {
	case <-m.sent:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// MarshalToSizedBufferVT encodes the message, once, and lets go of it: only its bytes wait for the client, and it takes many times as much.
func (m *countedMessage) MarshalToSizedBufferVT(buf []byte) (int, error) {
	message := m.encoder
	m.encoder = nil
	return message.MarshalToSizedBufferVT(buf)
}

// BufferPool is the pool from which the codec takes the message's buffer.
func (m *countedMessage) BufferPool() mem.BufferPool { return m }

// Get implements mem.BufferPool.
func (m *countedMessage) Get(length int) *[]byte { return pb.Buffers.Get(length) }

// Put implements mem.BufferPool.
func (m *countedMessage) Put(b *[]byte) {
	pb.Buffers.Put(b)
	m.Sent()
}

// Sent implements transport.Counted.
func (m *countedMessage) Sent() { m.once.Do(func() { close(m.sent) }) }
