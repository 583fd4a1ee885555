package client

import (
	"context"
	"errors"
	"io"
	"iter"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// WatchOptions change a watch. The zero WatchOptions begins now, with new values.
type WatchOptions struct {
	// Token continues a watch of the same ranges exactly after the update that returned it.
	Token []byte
	// After begins after the commit with this epoch, if it is not nil; 0 is before the first commit.
	After *Epoch
	// AfterTime begins with the first commit that is later than this time of the past, by the
	// server's clock, if it is not zero.
	AfterTime time.Time
	// Snapshot begins with the state of the ranges, and goes on with every change after it.
	Snapshot bool
	// Difference sends what has changed if the log does not reach back to where the watch begins.
	// Without it such a watch ends with HISTORY_GONE.
	Difference bool
	// KeysOnly leaves the values out.
	KeysOnly bool
	// Previous adds the values before each commit.
	Previous bool
	// ExpandLoads delivers the entries of bulk loads as set events. What the server does not keep as it
	// was then still comes as loaded events.
	ExpandLoads bool
	// Progress is how often an update without changes comes while nothing changes; 10 s if it is 0.
	Progress time.Duration
}

// EventKind says what happened to a key.
type EventKind = kvpb.EventKind

// Kinds of events.
const (
	EventSet    = kvpb.EventKind_EVENT_KIND_SET
	EventDelete = kvpb.EventKind_EVENT_KIND_DELETE
	EventLoaded = kvpb.EventKind_EVENT_KIND_LOADED
)

// Event is what a commit did to a key.
type Event struct {
	Kind EventKind
	Key  []byte
	// Value is what was set.
	Value []byte
	// Previous is the value before the commit; nil if the key did not exist. PreviousUnavailable
	// says that the server does not have it any more.
	Previous            []byte
	PreviousUnavailable bool
	// EndKey ends the range of a bulk load, which begins at Key; empty means no bound.
	EndKey []byte
}

// Commit is what a commit did in the watched ranges, or a part of it.
type Commit struct {
	Epoch Epoch
	// Time of the commit by the server's clock; zero if it is not known.
	Time   time.Time
	Events []Event
	// End is false if the next update continues the commit.
	End bool
}

// Update is the next part of what a watch delivers. When it has been processed, Token is what to
// keep: a watch with that token continues exactly after it. A watch without a token and a snapshot
// delivers an update without changes first: its token is that of where the watch begins.
type Update struct {
	// Commits are changes, in order.
	Commits []Commit
	// Snapshot is a part of the state with which the watch begins. The first part has Begin set:
	// what came of an earlier snapshot does not count any more.
	Snapshot []Entry
	Begin    bool
	// Difference has the newest versions of keys that changed while the log did not reach back far
	// enough, in key order.
	Difference []Event
	// Partial is true for parts of a snapshot or a difference that are not the last.
	Partial bool
	// Epoch: everything up to it has come, unless the update is Partial or ends inside a commit.
	Epoch Epoch
	Token []byte
}

// Watch iterates over the changes of ranges, without an end. It continues by itself after a lost
// connection and after a restart of the server, exactly where it was, for as long as ctx lasts. An
// error ends the iteration: it is about the request, or the history is gone.
func (c *Client) Watch(ctx context.Context, ranges []Range, o WatchOptions) iter.Seq2[Update, error] {
	return func(yield func(Update, error) bool) {
		w := &watching{client: c, ranges: ranges, options: o, yield: yield}
		w.run(ctx)
	}
}

// watching is one iteration of Watch.
type watching struct {
	client  *Client
	ranges  []Range
	options WatchOptions
	yield   func(Update, error) bool
	partial bool // the last update was a part of a snapshot
	begun   bool // there was an update
	stopped bool // the consumer wants no more
}

var errWatchStopped = errors.New("client: the consumer of the watch has stopped")

func (w *watching) run(ctx context.Context) {
	for attempt := 1; ; attempt++ {
		progress, err := w.stream(ctx)
		if w.stopped {
			return
		}
		if progress {
			attempt, w.begun = 1, true
		}
		e := newError(err)
		switch {
		case w.partial && snapshotLost(e):
			w.options.Token, w.options.Snapshot, w.partial = nil, true, false
		case !w.continues(e) || !w.client.retry.pause(ctx, attempt, e):
			if ctx.Err() != nil {
				e = newError(status.FromContextError(ctx.Err()).Err())
			}
			w.yield(Update{}, e)
			return
		}
	}
}

// snapshotLost reports whether the server cannot continue the snapshot of which parts have come.
func snapshotLost(e *Error) bool {
	return e.Reason == kvpb.ErrorReason_ERROR_REASON_HISTORY_GONE || e.Reason == kvpb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE
}

// continues reports whether the watch goes on after an error.
func (w *watching) continues(e *Error) bool {
	switch {
	case e.Reason == kvpb.ErrorReason_ERROR_REASON_WATCH_STALLED:
		return true
	case e.Reason == kvpb.ErrorReason_ERROR_REASON_WATCH_AHEAD:
		return w.begun // else the caller has named a position that may never come
	case e.Reason == kvpb.ErrorReason_ERROR_REASON_UNSPECIFIED && (e.Code == codes.Internal || e.Code == codes.Unknown):
		return true // of the connection
	}
	return e.Retryable()
}

// stream watches on one stream, and returns why that ended.
func (w *watching) stream(ctx context.Context) (progress bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := w.client.feed.Watch(ctx)
	if err != nil {
		return false, err
	}
	if err := stream.Send(&kvpb.WatchRequest{Request: &kvpb.WatchRequest_Create{Create: w.request()}}); err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	unknown := len(w.options.Token) == 0 // the caller has no token for where the watch begins
	begin := w.options.Snapshot && unknown
	for {
		r, err := stream.Recv()
		if err != nil {
			return progress, err
		}
		if ended := r.GetEnded(); ended != nil {
			return progress, status.ErrorProto(ended.GetError())
		}
		progress = true
		u := updateOf(r)
		u.Begin = begin && r.GetSnapshot() != nil
		if u.Begin {
			begin = false
		}
		if r.GetCreated() == nil || unknown && len(u.Token) > 0 {
			w.partial = u.Partial && r.GetSnapshot() != nil
			if !w.yield(u, nil) {
				w.stopped = true
				return true, errWatchStopped
			}
		}
		if len(u.Token) > 0 {
			w.options.Token = u.Token
		}
	}
}

// request is the request with which the watch begins, or continues.
func (w *watching) request() *kvpb.CreateWatch {
	o := &w.options
	r := &kvpb.CreateWatch{Values: kvpb.WatchValues_WATCH_VALUES_NEW, OnGap: kvpb.OnGap_ON_GAP_FAIL, ExpandLoads: o.ExpandLoads}
	for _, one := range w.ranges {
		r.Ranges = append(r.Ranges, one.wire())
	}
	switch {
	case len(o.Token) > 0:
		r.Start = &kvpb.CreateWatch_ResumeToken{ResumeToken: o.Token}
	case o.Snapshot:
		r.Start = &kvpb.CreateWatch_Snapshot{Snapshot: &kvpb.WatchSnapshot{}}
	case o.After != nil:
		r.Start = &kvpb.CreateWatch_AfterEpoch{AfterEpoch: uint64(*o.After)}
	case !o.AfterTime.IsZero():
		r.Start = &kvpb.CreateWatch_AfterTimeUs{AfterTimeUs: wireTime(o.AfterTime)}
	}
	switch {
	case o.KeysOnly:
		r.Values = kvpb.WatchValues_WATCH_VALUES_NONE
	case o.Previous:
		r.Values = kvpb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS
	}
	if o.Difference {
		r.OnGap = kvpb.OnGap_ON_GAP_DIFF
	}
	if o.Progress > 0 {
		r.ProgressInterval = durationpb.New(o.Progress)
	}
	return r
}

func updateOf(r *kvpb.WatchResponse) Update {
	u := Update{Token: r.GetResumeToken()}
	switch body := r.GetBody().(type) {
	case *kvpb.WatchResponse_Created:
		u.Epoch = Epoch(body.Created.GetAfterEpoch())
	case *kvpb.WatchResponse_Progress:
		u.Epoch = Epoch(body.Progress.GetEpoch())
	case *kvpb.WatchResponse_Snapshot:
		u.Snapshot, u.Partial, u.Epoch = entriesOf(body.Snapshot.GetEntries()), !body.Snapshot.GetEnd(), Epoch(body.Snapshot.GetEpoch())
	case *kvpb.WatchResponse_Difference:
		u.Difference, u.Partial, u.Epoch = eventsOf(body.Difference.GetEvents()), !body.Difference.GetEnd(), Epoch(body.Difference.GetEpoch())
	case *kvpb.WatchResponse_Changes:
		u.Commits = make([]Commit, 0, len(body.Changes.GetCommits()))
		for _, c := range body.Changes.GetCommits() {
			commit := Commit{Epoch: Epoch(c.GetEpoch()), Events: eventsOf(c.GetEvents()), End: c.GetEnd()}
			if c.GetTime() != nil {
				commit.Time = c.GetTime().AsTime()
			}
			u.Commits, u.Epoch = append(u.Commits, commit), commit.Epoch
		}
	}
	return u
}

func eventsOf(list []*kvpb.ChangeEvent) []Event {
	all := make([]Event, len(list))
	for i, e := range list {
		all[i] = Event{
			Kind: e.GetKind(), Key: e.GetKey(), Value: e.GetValue(), Previous: e.PreviousValue,
			PreviousUnavailable: e.GetPreviousUnavailable(), EndKey: e.GetEndKey(),
		}
	}
	return all
}

// Config returns every option of the server, with its value and where the value comes from.
func (c *Client) Config(ctx context.Context) ([]*kvpb.ConfigOption, error) {
	out, err := call(ctx, c, safe, c.admin.GetConfig, &kvpb.GetConfigRequest{})
	return out.GetOptions(), err
}

// Watches lists the watches of all clients of the server.
func (c *Client) Watches(ctx context.Context) ([]*kvpb.WatchInfo, error) {
	out, err := call(ctx, c, safe, c.admin.ListWatches, &kvpb.ListWatchesRequest{})
	return out.GetWatches(), err
}

// EndWatch ends a watch of any client.
func (c *Client) EndWatch(ctx context.Context, id uint64) error {
	_, err := call(ctx, c, safe, c.admin.EndWatch, &kvpb.EndWatchRequest{Id: id})
	return err
}
