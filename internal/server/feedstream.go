package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/transport"
)

// watchStream is one Feed.Watch stream and its watches.
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
	requests chan *pb.WatchRequest

	sending atomic.Int64 // since when a response is being sent, by the server's clock; 0: none is

	// The sender's own.
	watches map[uint64]*streamWatch // by the client's id
	walks   []*streamWatch          // of these, those with a walk; they take turns
	walking int                     // open walks
	later   []laterWalk             // that wait until another walk of the stream has ended
	ahead   aheadWatches            // that wait for the epoch at which they begin
	asked   bool                    // the client waits for progress of some watch
	due     time.Time               // before it no watch has to send progress, but for those that were asked
	looked  time.Time               // when that was looked at last
}

// watchWalksMax is how many walks of a stream are open. Each has a session, and a snapshot.
const watchWalksMax = 4

// laterWalk is a walk that is not open yet.
type laterWalk struct {
	watch *streamWatch
	begin func(ctx context.Context) error
}

// streamWatch is one watch of a stream. Until a snapshot at its begin has been sent, the feed does not know it.
type streamWatch struct {
	id      uint64
	options watchOptions
	watch   *feed.Watch
	walk    *watchWalk
	sent    time.Time // when something of it was sent last
	asked   bool      // the client has requested progress
	units   int64     // counted for it
}

// send is the sender.
func (w *watchStream) send(ctx context.Context) error {
	defer w.close()
	timer := time.NewTimer(progressIntervalMin)
	defer timer.Stop()
	for {
		if w.server.drain.active.Load() {
			return errShuttingDown
		}
		select {
		case req := <-w.requests:
			if err := w.request(ctx, req); err != nil {
				return err
			}
		case err := <-w.ahead.arrived:
			if err := w.beginArrived(ctx, err); err != nil {
				return err
			}
		default:
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
		if err := w.wait(ctx, timer); err != nil {
			return err
		}
	}
}

// wait sends progress that is due, and returns when there is something to do.
func (w *watchStream) wait(ctx context.Context, timer *time.Timer) error {
	if now := time.Now(); w.asked || !now.Before(w.due) {
		if err := w.sendProgress(ctx, now); err != nil {
			return err
		}
	}
	timer.Reset(max(time.Until(w.due), progressIntervalMin/2))
	select {
	case req := <-w.requests:
		return w.request(ctx, req)
	case err := <-w.ahead.arrived:
		return w.beginArrived(ctx, err)
	case <-w.consumer.Wake():
	case <-timer.C:
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

// forget takes the watch out of those of the stream.
func (w *watchStream) forget(sw *streamWatch) {
	delete(w.watches, sw.id)
	w.server.feed.units.release(sw.units)
	sw.units = 0
	if sw.options.expandLoads {
		w.server.feed.expanding.add(w.server, -1)
	}
}

// step sends a part of a walk and a delivery of the feed, and reports whether there was one of them.
func (w *watchStream) step(ctx context.Context) (worked bool, err error) {
	for len(w.later) > 0 && w.walking < watchWalksMax {
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
	d, ok := w.consumer.Next(feed.Limit{
		Events: watchEventsMax, Bytes: w.server.feed.responseBytes(), EventBytes: eventBytes, CommitBytes: commitBytes,
	})
	if !ok {
		return worked, nil
	}
	return true, w.deliver(ctx, &d)
}

// deliver sends what the feed has for a watch.
func (w *watchStream) deliver(ctx context.Context, d *feed.Delivery) error {
	sw := d.Watch.Tag.(*streamWatch)
	gap := (*feed.GapError)(nil)
	switch {
	case w.watches[sw.id] != sw:
		return nil // cancelled
	case len(d.Parts) > 0:
		return w.sendChanges(ctx, sw, d)
	case errors.As(d.Err, &gap) && sw.options.difference:
		return w.whenRoom(ctx, sw, func(ctx context.Context) error { return w.beginDifference(ctx, sw, gap) })
	case d.Err != nil:
		return w.end(ctx, sw, d.Err)
	}
	return nil
}

// request executes a request of the client. An error ends the stream.
func (w *watchStream) request(ctx context.Context, req *pb.WatchRequest) error {
	switch r := req.Request.(type) {
	case *pb.WatchRequest_Create:
		return w.create(ctx, r.Create)
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

// create begins a watch.
func (w *watchStream) create(ctx context.Context, req *pb.CreateWatch) error {
	if w.watches[req.GetWatchId()] != nil {
		return invalid("create.watch_id", fmt.Sprintf("%d is the id of an open watch of the stream", req.WatchId))
	}
	sw := &streamWatch{id: req.GetWatchId(), sent: time.Now()}
	start, err := w.toWatchOptions(req, &sw.options)
	if err == nil {
		err = w.reserve(sw)
	}
	if err == nil {
		w.watches[sw.id] = sw
		if sw.options.expandLoads {
			w.server.feed.expanding.add(w.server, 1)
		}
		if due := sw.sent.Add(sw.options.progressInterval); due.Before(w.due) {
			w.due = due
		}
		err = w.begin(ctx, sw, start)
	}
	if err != nil {
		return w.end(ctx, sw, err)
	}
	return nil
}

// reserve counts a watch among those of the server.
func (w *watchStream) reserve(sw *streamWatch) error {
	units, most := unitsOf(sw.options.ranges), w.server.config.Feed.Watches
	if !w.server.feed.units.reserve(units, most) {
		return &feed.LimitError{What: "watches of the server", Limit: most}
	}
	sw.units = units
	return nil
}

// begin begins a watch where the client wants it to begin.
func (w *watchStream) begin(ctx context.Context, sw *streamWatch, start watchStart) error {
	if most := w.server.config.Feed.WatchesPerStream; len(w.watches) > most {
		return &feed.LimitError{What: "watches of a stream", Limit: most}
	}
	switch {
	case start.needs() > w.server.feed.feed.Stable():
		w.beginLaterAhead(ctx, sw, start)
		return nil
	case start.load:
		return w.resumeLoad(ctx, sw, start)
	case start.walk:
		return w.whenRoom(ctx, sw, func(ctx context.Context) error { return w.beginWalk(ctx, sw, start) })
	case start.time != 0:
		var err error
		if start.after.Epoch, err = w.epochBefore(ctx, start.time); err != nil {
			return err
		}
	}
	if err := w.open(ctx, sw, start.now, start.after); err != nil {
		return err
	}
	return w.created(ctx, sw, sw.watch.Start())
}

// open lets the feed know the watch.
func (w *watchStream) open(ctx context.Context, sw *streamWatch, now bool, after feed.Position) (err error) {
	o := feed.WatchOptions{Ranges: sw.options.ranges, Kinds: sw.options.kinds, Origins: sw.options.origins, Now: now, After: after, Tag: sw}
	sw.watch, err = w.consumer.Watch(o)
	if ahead := (*feed.AheadError)(nil); errors.As(err, &ahead) && ahead.After.Epoch <= w.server.store.Visible() {
		// The snapshot of a walk has an ASYNC write that is not durable yet.
		if err = w.server.feed.feed.Await(ctx, after.Epoch); err == nil {
			sw.watch, err = w.consumer.Watch(o)
		}
	}
	return err
}

func (w *watchStream) created(ctx context.Context, sw *streamWatch, start feed.Position) error {
	return w.respond(ctx, sw, &pb.WatchResponse{
		Body:        &pb.WatchResponse_Created{Created: &pb.WatchCreated{AfterEpoch: uint64(start.Epoch)}},
		ResumeToken: w.token(sw, start),
	}, 0)
}

// end ends a watch, with an error or, without one, because the client wants it.
func (w *watchStream) end(ctx context.Context, sw *streamWatch, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if errors.Is(err, feed.ErrClosed) {
		return errShuttingDown
	}
	if w.watches[sw.id] == sw {
		w.forget(sw)
	}
	if sw.watch != nil {
		sw.watch.Cancel()
	}
	if sw.walk != nil {
		w.dropWalk(sw)
	}
	w.later = slices.DeleteFunc(w.later, func(l laterWalk) bool { return l.watch == sw })
	w.ahead.forget(sw)
	body := &pb.WatchEnded{}
	if err != nil {
		if classify(err).reason == pb.ErrorReason_ERROR_REASON_HISTORY_GONE {
			w.server.feed.gaps.gone.Add(1)
		}
		body.Error = statusOf(err).Proto()
	}
	return w.respond(ctx, sw, &pb.WatchResponse{Body: &pb.WatchResponse_Ended{Ended: body}}, 0)
}

func (w *watchStream) token(sw *streamWatch, p feed.Position) []byte {
	return (&feedToken{lineage: w.lineage, position: p, filter: sw.options.filter}).encode()
}

// sendProgress sends progress for the watches that have sent nothing for their interval.
func (w *watchStream) sendProgress(ctx context.Context, now time.Time) error {
	w.looked = now
	w.asked, w.due = false, now.Add(progressIntervalDefault)
	for _, sw := range w.watches {
		due := sw.sent.Add(sw.options.progressInterval)
		if sw.watch != nil && (sw.asked || !now.Before(due)) {
			if p, ok := sw.watch.Progress(); ok {
				sw.asked = false
				if err := w.respond(ctx, sw, &pb.WatchResponse{
					Body:        &pb.WatchResponse_Progress{Progress: &pb.WatchProgress{Epoch: uint64(p.Epoch)}},
					ResumeToken: w.token(sw, p),
				}, 0); err != nil {
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

// respond sends a response with about so many bytes of keys and values.
func (w *watchStream) respond(ctx context.Context, sw *streamWatch, out *pb.WatchResponse, size int) error {
	out.WatchId = sw.id
	return w.sendMessage(ctx, sw, out, size)
}

// sendMessage sends an encoder of a response. One that is larger than a response should be is counted among the answers, and
// waits until there is room for it.
func (w *watchStream) sendMessage(ctx context.Context, sw *streamWatch, out encoder, size int) error {
	if size > 2*watchResponseBytes {
		charge, err := w.charge(ctx, size)
		if err != nil {
			return err
		}
		defer charge.release()
	}
	w.sending.Store(max(int64(w.server.clock.now()), 1))
	defer w.sending.Store(0)
	if err := w.stream.SendMsg(out); err != nil {
		return err
	}
	sw.sent = time.Now()
	return transport.AwaitSent(w.stream.Context()) // before the feed is asked for more
}

// charge counts a large response, when there is room for it.
func (w *watchStream) charge(ctx context.Context, size int) (*memoryCharge, error) {
	for {
		c, err := w.server.admission.charge(w.conn, size, false)
		if err == nil {
			return c, nil
		}
		select {
		case <-time.After(retryOverloaded):
		case <-w.server.drain.begun:
			return nil, errShuttingDown
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}
