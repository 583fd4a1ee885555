package server

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/transport"
)

// watchStream is one FeedService.Watch stream and its watches.
//
//	receiver ─► requests ─► sender ─► Send      handler: ends the stream if Send takes too long
//	                          ▲
//	    feed ─► Consumer.Next ┘    walks (snapshots and differences), one part at a time
//
// The sender is one goroutine: it creates and cancels watches, takes what the feed has for them, and sends. It waits in Send
// while the client takes nothing, which concerns no other stream: the feed then lets the watches lag.
type watchStream struct {
	// Constant.
	server   *Server
	conn     *connection
	stream   grpc.BidiStreamingServer[pb.WatchRequest, pb.WatchResponse]
	consumer *feed.Consumer
	lineage  keys.Lineage
	requests chan watchRequest // the sender's own; nil once the client has ended its half of the stream

	sending atomic.Int64 // since when a response is being sent, or the client takes nothing of it, by the server's clock; 0: none is
	turn    watchTurn

	// The sender's own.
	watches  map[uint64]*streamWatch // by the client's id
	walks    []*streamWatch          // of these, those with a walk; they take turns
	walking  int                     // open walks
	later    []laterWalk             // that wait until another walk of the stream has ended
	ahead    aheadWatches            // that wait for the epoch at which they begin
	rights   watchRights
	timer    *time.Timer
	response takenResponse
	room     *watchRoom // for the large response at hand, or its place in the line; nil: there is none
	asked    bool       // the client waits for progress of some watch
	due      time.Time  // before it no watch has to send progress, but for those that were asked
	looked   time.Time  // when that was looked at last
}

// watchTurn says that the stream has room: see watchLine.
type watchTurn struct {
	holds atomic.Bool
	since atomic.Int64 // when it began to send with it, by the server's clock; 0: it has not

	request atomic.Bool // a request has room until it is taken
}

// watchRights are the rights to the watches of a stream as they were last checked.
type watchRights struct {
	table   uint64    // its number
	expires time.Time // when the token of the caller does; zero: never

	access access     // of the stream; its watches are checked with it one after another
	user   *auth.User // with which all of them were checked; nil: not all with the same one, or users were not checked
}

// watchWalksMax is how many walks of a stream are open. Each has a session, and a snapshot.
const watchWalksMax = 4

// laterWalk is a walk that is not open yet.
type laterWalk struct {
	watch *streamWatch
	begin func(ctx context.Context) error
}

// send is the sender.
func (w *watchStream) send(ctx context.Context) error {
	defer w.close()
	defer w.release()
	defer w.giveResponse()
	w.timer = time.NewTimer(progressIntervalMin)
	defer w.timer.Stop()
	for {
		if w.server.drain.active.Load() {
			return errShuttingDown
		}
		if w.requests == nil && len(w.watches) == 0 {
			return nil // nothing can come any more
		}
		select {
		case req, open := <-w.requests:
			if err := w.request(ctx, req, open); err != nil {
				return err
			}
		case err := <-w.ahead.arrived:
			if err := w.beginArrived(ctx, err); err != nil {
				return err
			}
		default:
		}
		if err := w.endForbidden(ctx); err != nil {
			return err
		}
		worked, err := w.step(ctx)
		if err != nil {
			return err
		}
		if worked { // the other watches of the stream may have progress nevertheless
			if now := time.Now(); now.Sub(w.looked) >= progressIntervalMin/2 && (w.asked || !now.Before(w.due)) {
				if err := w.sendProgress(ctx, now); err != nil {
					return err
				}
			}
			continue
		}
		if err := w.wait(ctx, nil, nil); err != nil {
			return err
		}
	}
}

// wait sends progress that is due, and returns when there is something to do.
func (w *watchStream) wait(ctx context.Context, room, ended <-chan struct{}) error {
	if now := time.Now(); w.asked || !now.Before(w.due) {
		if err := w.sendProgress(ctx, now); err != nil {
			return err
		}
	}
	return w.pause(ctx, max(time.Until(w.due), progressIntervalMin/2), room, ended)
}

// pause waits until something happens, at most so long: a request has come, which it executes; the feed may have something; there is
// room; the snapshot of a walk has ended; rights have changed or expired.
func (w *watchStream) pause(ctx context.Context, most time.Duration, room, ended <-chan struct{}) error {
	w.timer.Reset(max(min(most, w.untilExpiry()), 0))
	user, token := w.rights.access.follow()
	select {
	case req, open := <-w.requests:
		w.consumer.Forgo() // the answer may have to wait for the client
		return w.request(ctx, req, open)
	case err := <-w.ahead.arrived:
		w.consumer.Forgo()
		return w.beginArrived(ctx, err)
	case <-w.consumer.Wake():
	case <-room:
	case <-ended:
	case <-user:
	case <-token:
	case <-w.timer.C:
	case <-w.server.drain.begun:
		return errShuttingDown
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

// close releases what the watches have.
func (w *watchStream) close() {
	w.consumer.Close()
	w.ahead.close()
	for _, sw := range w.watches {
		if sw.walk != nil {
			sw.walk.close(w.server, true)
		}
		w.forget(sw)
	}
}

// step sends a part of a walk and a delivery of the feed, and reports whether there was one of them.
func (w *watchStream) step(ctx context.Context) (worked bool, err error) {
	for n := len(w.later); n > 0 && len(w.later) > 0 && w.walking < watchWalksMax; n-- { // each once: it may have to wait again
		if err := w.beginLater(ctx); err != nil {
			return true, err
		}
	}
	if len(w.walks) > 0 {
		sw := w.walks[0]
		w.walks = append(w.walks[:0], w.walks[1:]...)
		more, err := w.sendWalk(ctx, sw)
		if err != nil {
			return true, err
		}
		if more {
			w.walks = append(w.walks, sw)
		}
		worked = true
	}
	bytes := w.responseLimit()
	limit := feed.Limit{
		Events: watchEventsMax, Bytes: bytes, Large: bytes, EventBytes: eventBytes, CommitBytes: commitBytes,
	}
	d, ok := w.consumer.Next(limit)
	if !ok {
		w.giveResponse()
		return worked, nil
	}
	if d.Large > 0 { // it stays where it is until there is room for it
		return true, w.takeLarge(ctx, &d, limit)
	}
	return true, w.deliver(ctx, &d)
}

// deliver sends what the feed has given for a watch. All of it was committed before the rights are checked here: the stream may have waited for
// its client since it checked them last.
func (w *watchStream) deliver(ctx context.Context, d *feed.Delivery) error {
	w.response.kept = true
	defer func() { w.response.kept = false }()
	if err := w.endForbidden(ctx); err != nil {
		return err
	}
	sw := d.Watch.Tag.(*streamWatch)
	gap := (*feed.GapError)(nil)
	switch {
	case w.watches[sw.id] != sw:
		return nil // cancelled, or forbidden
	case len(d.Parts) > 0:
		return w.sendChanges(ctx, sw, d)
	case errors.As(d.Err, &gap) && sw.options.difference:
		return w.whenRoom(ctx, sw, func(ctx context.Context) error { return w.beginDifference(ctx, sw, gap) })
	case d.Err != nil:
		return w.end(ctx, sw, d.Err)
	}
	return nil // or a large operation is next that has come meanwhile
}

// request executes a request of the client, or notes that there will be no other one. An error ends the stream.
func (w *watchStream) request(ctx context.Context, req watchRequest, open bool) error {
	if !open {
		w.requests = nil
		return nil
	}
	switch r := req.Request.(type) {
	case *pb.WatchRequest_Create:
		return w.create(ctx, r.Create, req.refused)
	case *pb.WatchRequest_Cancel:
		if sw := w.watches[r.Cancel.GetWatchId()]; sw != nil {
			return w.end(ctx, sw, nil)
		}
		return nil // it has ended meanwhile
	case *pb.WatchRequest_Progress:
		for _, sw := range w.watches {
			sw.asked, w.asked = true, true
		}
		return nil
	}
	return invalid("request", "is missing; give exactly one")
}

// sendProgress sends progress for the watches that have sent nothing for their interval.
func (w *watchStream) sendProgress(ctx context.Context, now time.Time) error {
	w.looked = now
	w.asked, w.due = false, now.Add(progressIntervalDefault)
	for _, sw := range w.watches {
		due := sw.sent.Add(sw.options.progressInterval)
		if sw.watch != nil && !sw.unsent && (sw.asked || !now.Before(due)) {
			if p, ok := sw.watch.Progress(); ok {
				sw.asked = false
				if err := w.respond(ctx, sw, &pb.WatchResponse{
					Body:        &pb.WatchResponse_Progress{Progress: &pb.WatchProgress{Epoch: uint64(p.Epoch)}},
					ResumeToken: w.token(sw, p),
				}); err != nil {
					return err
				}
				due = sw.sent.Add(sw.options.progressInterval)
			}
		}
		w.asked = w.asked || sw.asked
		if due.Before(w.due) {
			w.due = due
		}
	}
	return nil
}

// respond sends a response that has no keys and values, or few.
func (w *watchStream) respond(ctx context.Context, sw *streamWatch, out *pb.WatchResponse) error {
	out.WatchId = sw.id
	return w.sendMessage(ctx, sw, out, 0)
}

// sendMessage sends an encoder of a response, and returns when the client's windows have taken it: before the feed is asked for more.
func (w *watchStream) sendMessage(ctx context.Context, sw *streamWatch, out encoder, size int) error {
	w.rights.access.sent(out)
	now := max(int64(w.server.clock.now()), 1)
	if w.turn.holds.Load() {
		w.turn.since.CompareAndSwap(0, now)
	}
	w.sending.Store(now)
	defer w.sending.Store(0)
	defer w.giveResponse()
	if w.turn.holds.Load() && size > w.responseLimit() {
		w.giveResponse() // the large one has its room
		if err := w.sendLarge(ctx, out, size); err != nil {
			return err
		}
	} else {
		if invariants.Enabled {
			w.assertTaken(out, size)
		}
		w.keepResponse(size)
		if err := w.sendSmall(out); err != nil {
			return err
		}
	}
	sw.sent = time.Now()
	return nil
}

// assertTaken asserts that a response is no larger than what the stream has taken for it.
func (w *watchStream) assertTaken(out encoder, size int) {
	if limit := w.responseLimit(); size > limit+commitBytes {
		invariants.Fail("a response of a watch has %d bytes, and %d were taken", size, limit)
	}
	if encoded := out.SizeVT(); size > 0 && int64(encoded) > w.response.size {
		invariants.Fail("an encoded response of a watch has %d bytes, and %d were taken", encoded, w.response.size)
	}
}

// sendSmall sends a response, and returns when the client's windows have taken it.
func (w *watchStream) sendSmall(out encoder) error {
	ctx := w.stream.Context()
	if w.server.config.Transport == config.TransportGRPC { // which takes more than it sends
		m := newCountedMessage(out)
		if err := w.stream.SendMsg(m); err != nil {
			return err
		}
		return m.awaitSent(ctx)
	}
	if err := w.stream.SendMsg(out); err != nil {
		return err
	}
	return transport.AwaitSent(ctx, 0)
}
