package server

import (
	"bytes"
	"context"
	"errors"
	"io"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// watchRequest is a request of the client for the sender.
type watchRequest struct {
	*pb.WatchRequest
	refused error // a watch that is not created: only its id is left
}

// receive hands the client's requests to the sender. It ends when the client has ended its half of the stream, and closes the
// channel then, or with the stream. After another error of Recv the transport has ended the stream, whose context ends then.
func (w *watchStream) receive(ctx context.Context) {
	for {
		req, err := w.stream.Recv()
		if errors.Is(err, io.EOF) {
			close(w.requests)
		}
		if err != nil {
			return
		}
		compactWatch(req.GetCreate())
		if !w.hand(ctx, req) {
			return
		}
	}
}

// compactWatch copies keys that the decoder has left in more memory than they take, because the message had their field twice: a watch keeps them, and
// counts their lengths.
func compactWatch(c *pb.CreateWatch) {
	for _, r := range c.GetRanges() {
		r.Start, r.End, r.Prefix = compact(r.Start), compact(r.End), compact(r.Prefix)
	}
	if token, ok := c.GetStart().(*pb.CreateWatch_ResumeToken); ok {
		token.ResumeToken = compact(token.ResumeToken)
	}
}

// compact is b, or a copy if its memory is larger by more than an eighth, and some bytes.
func compact(b []byte) []byte {
	const some = 32
	if cap(b)-len(b) <= len(b)/8+some {
		return b
	}
	return bytes.Clone(b)
}

// hand waits until the sender takes a request. It reports false if the stream ends first. A sender that does not wait for its client takes it soon, unless
// it walks over very many keys. The other may take it in minutes: so it counts in the share of watches. If that has no room, the watch is refused once the
// sender waits for its client, or after a moment: a client has many streams.
func (w *watchStream) hand(ctx context.Context, req *pb.WatchRequest) bool {
	r, line, size := watchRequest{WatchRequest: req}, &w.server.admission.watches, watchRequestBytes(req)
	var look <-chan time.Time // whether the sender waits for its client; nil: there is room
	began := time.Now()
	if line.hold(w.conn, w.response.client, size) {
		w.turn.request.Store(size >= countedBytesMin)
		defer func() {
			w.turn.request.Store(false)
			line.unhold(w.conn, w.response.client, size)
		}()
	} else {
		ticker := time.NewTicker(watchRequestLook)
		defer ticker.Stop()
		look = ticker.C
	}
	for {
		if look != nil && (w.sending.Load() != 0 || time.Since(began) >= watchRequestPatience) {
			r, look = r.withoutRoom(), nil
			w.server.admission.refused.Add(1)
		}
		if look == nil {
			messageDropped(ctx) // it counts in the share of watches, or is refused
		}
		select {
		case w.requests <- r:
			if look != nil {
				messageDropped(ctx) // the sender has it, and may send nothing for hours
			}
			return true
		case <-look:
		case <-ctx.Done():
			return false
		}
	}
}

const (
	watchRequestLook     = time.Millisecond
	watchRequestPatience = 20 * time.Millisecond
)

// watchRequestBytes is about what a request takes that was decoded. The names of events and origins have a byte each before.
func watchRequestBytes(req *pb.WatchRequest) int {
	c := req.GetCreate()
	return req.SizeVT() + elementBytes[kindRead]*len(c.GetRanges()) + numberBytes*(len(c.GetKinds())+len(c.GetOrigins()))
}

// withoutRoom is what is left of a request for which there is no room.
func (r watchRequest) withoutRoom() watchRequest {
	left := watchRequest{WatchRequest: new(pb.WatchRequest)}
	switch of := r.Request.(type) {
	case *pb.WatchRequest_Create:
		left.Request, left.refused = &pb.WatchRequest_Create{Create: &pb.CreateWatch{WatchId: of.Create.GetWatchId()}}, errOverloaded
	case *pb.WatchRequest_Cancel:
		left.Request = &pb.WatchRequest_Cancel{Cancel: &pb.CancelWatch{WatchId: of.Cancel.GetWatchId()}}
	case *pb.WatchRequest_Progress:
		left.Request = &pb.WatchRequest_Progress{}
	}
	return left
}
