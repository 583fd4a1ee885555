package server

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/invariants"
)

// streamWatch is one watch of a stream. Until a snapshot at its begin has been sent, the feed does not know it.
type streamWatch struct {
	id      uint64
	options watchOptions
	watch   *feed.Watch
	walk    *watchWalk
	sent    time.Time     // when something of it was sent last
	asked   bool          // the client has requested progress
	unsent  bool          // of what has come out of the feed, something is not sent yet: there is no progress
	units   int64         // counted for it, and for the client of its stream
	named   *access       // has its claims, in builds with assertions; else nil
	limiter *auth.Limiter // that counts it; nil: none
}

// create begins a watch, unless it is refused already.
func (w *watchStream) create(ctx context.Context, req *pb.CreateWatch, refused error) error {
	if w.watches[req.GetWatchId()] != nil {
		return invalid("create.watch_id", fmt.Sprintf("%d is the id of an open watch of the stream", req.WatchId))
	}
	sw := &streamWatch{id: req.GetWatchId(), sent: time.Now()}
	if refused != nil {
		return w.end(ctx, sw, refused)
	}
	start, err := w.toWatchOptions(req, &sw.options)
	if err == nil {
		err = w.permit(ctx, sw, req)
	}
	if err == nil {
		err = w.reserve(sw, start.last)
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

// watchRow is what watches need.
var watchRow = rpcRows[pb.FeedService_Watch_FullMethodName]

// permit checks the right to a watch.
func (w *watchStream) permit(ctx context.Context, sw *streamWatch, req *pb.CreateWatch) error {
	a := &w.rights.access
	err := a.check(watchRow, sw)
	a.request = nil
	if invariants.Enabled {
		sw.named = &access{claims: a.claims}
	}
	if w.server.observer.audit.log != nil {
		err = w.server.auditWatch(ctx, a, sw, err)
	}
	if err != nil {
		return err
	}
	w.rights.expires = a.expires()
	if u := a.user(); len(w.watches) == 0 {
		w.rights.user = u
	} else if u != w.rights.user {
		w.rights.user = nil
	}
	if a.limiter() == nil {
		return nil
	}
	return a.take(req.SizeVT())
}

// reserve counts a watch among those of the server.
func (w *watchStream) reserve(sw *streamWatch, last []byte) error {
	units, client := unitsOf(sw.options.ranges, last), w.response.client
	if err := w.server.feed.units.reserve(client, units, w.server.config.Feed.Watches); err != nil {
		return err
	}
	l := w.rights.access.limiter()
	if err := l.Open(auth.Watches); err != nil {
		w.server.feed.units.release(client, units)
		return err
	}
	sw.units, sw.limiter = units, l
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
	})
}

func (w *watchStream) token(sw *streamWatch, p feed.Position) []byte {
	return (&feedToken{lineage: w.lineage, position: p, filter: sw.options.filter}).encode()
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
		body.Error = statusOf(w.server.conceal(err)).Proto()
	}
	return w.respond(ctx, sw, &pb.WatchResponse{Body: &pb.WatchResponse_Ended{Ended: body}})
}

// forget takes the watch out of those of the stream.
func (w *watchStream) forget(sw *streamWatch) {
	delete(w.watches, sw.id)
	w.server.feed.units.release(w.response.client, sw.units)
	sw.limiter.Close(auth.Watches)
	sw.units, sw.limiter = 0, nil
	if sw.options.expandLoads {
		w.server.feed.expanding.add(w.server, -1)
	}
}

// endForbidden ends the watches whose caller has lost a right, because the users have changed or its token has expired. Any user may change its own
// tokens as often as it likes, and there may be very many watches, so a change costs nothing for each of them: the caller is identified anew, and
// its watches are compared with its rights only if they were compared with another *auth.User before. Tables never change a user. They have another
// one if its rights change, or if it is deleted and made again.
func (w *watchStream) endForbidden(ctx context.Context) error {
	if w.isChecked() {
		return nil
	}
	r, a := &w.rights, &w.rights.access
	t := w.server.gate.table.Load()
	r.table = numberOf(t)
	if a.table = r.table; t == nil {
		a.caller, r.user, r.expires = nil, nil, time.Time{}
		return nil
	}
	denied := a.identify(t)
	if denied == nil {
		r.expires = a.expires() // users may have been checked only since now
		if a.caller.user == r.user {
			return nil
		}
	}
	r.user = a.user() // what has no right ends here
	for _, sw := range w.watches {
		err := denied
		if err == nil {
			err = a.compareWith(watchRow, sw)
		}
		if err == nil {
			continue
		}
		if err := w.end(ctx, sw, err); err != nil {
			return err
		}
	}
	return nil
}

// isChecked reports whether the rights to the watches were checked with the users as they are now.
func (w *watchStream) isChecked() bool {
	return numberOf(w.server.gate.table.Load()) == w.rights.table && w.untilExpiry() > 0
}

// untilExpiry is how long the stream may wait before the token of its caller expires.
func (w *watchStream) untilExpiry() time.Duration {
	if w.rights.expires.IsZero() || len(w.watches) == 0 {
		return math.MaxInt64
	}
	return time.Until(w.rights.expires)
}
