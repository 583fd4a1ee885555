package server

import (
	"bytes"
	"context"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// changesResponse is a response that is being filled.
type changesResponse struct {
	changes  *pb.WatchChanges
	commit   *pb.ChangedCommit // the last one of changes
	events   int
	bytes    int
	position feed.Position // after what it has
	time     uint64        // of the last commit, in microseconds since 1970; 0 if it is not known
}

// eventBytes is what an event counts in a response beside its key and values.
const eventBytes = 32

// sendChanges sends what the feed has delivered for a watch, in as many responses as that needs: the feed does not count
// previous values.
func (w *watchStream) sendChanges(ctx context.Context, sw *streamWatch, d *feed.Delivery) error {
	out := changesResponse{changes: &pb.WatchChanges{}}
	limit := w.server.feed.responseBytes()
	for i := range d.Parts {
		p := &d.Parts[i]
		if loaded := p.Commit.Loaded; loaded != nil && sw.options.expandLoads {
			if out.events > 0 {
				if err := w.sendResponse(ctx, sw, &out); err != nil {
					return err
				}
			}
			return w.beginLoad(ctx, sw, loaded, nil) // what follows is delivered again after it
		}
		previous, err := w.previousOf(ctx, sw, p)
		if err != nil {
			return err
		}
		out.begin(p.Commit, d.State == feed.StateLagging)
		for index, op := range p.Operations {
			before, err := w.previousAt(ctx, p.Commit, previous, index)
			if err != nil {
				return err
			}
			e := eventOf(sw, op, before)
			if size := sizeOf(e); out.events > 0 && out.bytes+size > limit {
				if err := w.sendResponse(ctx, sw, &out); err != nil {
					return err
				}
				out.begin(p.Commit, d.State == feed.StateLagging)
			}
			out.add(e, feed.Position{Epoch: p.Commit.Epoch - 1, Operations: uint32(index) + 1})
		}
		if loaded := p.Commit.Loaded; loaded != nil {
			for _, e := range loadedEvents(sw.options.ranges, loaded) {
				out.add(e, d.Position)
			}
		}
		if p.End {
			out.commit.End, out.position = true, feed.Position{Epoch: p.Commit.Epoch}
		}
	}
	out.position = d.Position
	return w.sendResponse(ctx, sw, &out)
}

// sendResponse sends what was filled, and empties it.
func (w *watchStream) sendResponse(ctx context.Context, sw *streamWatch, r *changesResponse) error {
	changes, bytes, position := r.changes, r.bytes, r.position
	if r.time != 0 {
		now := w.server.store.Clock().Now()
		w.server.feed.delays.Observe(time.Duration(max(now, r.time)-r.time) * time.Microsecond)
	}
	*r = changesResponse{changes: &pb.WatchChanges{}}
	return w.respond(ctx, sw, &pb.WatchResponse{Body: &pb.WatchResponse_Changes{Changes: changes}, ResumeToken: w.token(sw, position)}, bytes)
}

// begin begins a commit, or a further part of it.
func (r *changesResponse) begin(c *feed.Commit, lagging bool) {
	r.commit = &pb.ChangedCommit{Epoch: uint64(c.Epoch), Origin: originMessage(c.Origin), Lagging: lagging}
	if r.time = c.Time; c.Time != 0 {
		r.commit.Time = timestamppb.New(time.UnixMicro(int64(c.Time)))
	}
	r.changes.Commits = append(r.changes.Commits, r.commit)
}

func (r *changesResponse) add(e *pb.ChangeEvent, after feed.Position) {
	r.commit.Events = append(r.commit.Events, e)
	r.events++
	r.bytes += sizeOf(e)
	r.position = after
}

func sizeOf(e *pb.ChangeEvent) int {
	return eventBytes + len(e.Key) + len(e.Value) + len(e.PreviousValue) + len(e.EndKey)
}

// eventOf is the event of an operation. It refers to the memory of the commit.
func eventOf(sw *streamWatch, op batch.Op, previous previousValue) *pb.ChangeEvent {
	e := &pb.ChangeEvent{Kind: pb.EventKind_EVENT_KIND_DELETE, Key: keys.User(op.Key)}
	if op.Kind.HasValue() {
		e.Kind = pb.EventKind_EVENT_KIND_SET
		describeVersion(e, op.Kind, op.Value)
		if sw.options.values != pb.WatchValues_WATCH_VALUES_NONE {
			e.Value = metadata.Value(op.Kind, op.Value)
		}
	}
	if previous.found {
		e.PreviousValue = previous.value
	}
	e.PreviousUnavailable = previous.unavailable
	return e
}

// describeVersion says what a version says beside its value. A section that this program does not understand is left out: the
// engine refuses the version where it is read.
func describeVersion(e *pb.ChangeEvent, kind keys.Kind, stored []byte) {
	if f, err := metadata.Read(kind, stored); err == nil {
		e.LeaseId, e.ExpiresAtMs = f.Lease, int64(f.ExpiresAt)
	}
}

// loadedEvents are the events of a bulk load: one for each watched range that it meets, of the keys that both have.
func loadedEvents(ranges []feed.Range, loaded *keys.LoadedRange) (list []*pb.ChangeEvent) {
	var lower, upper []byte
	if len(loaded.Lower) > 0 {
		lower = keys.User(loaded.Lower)
	}
	if len(loaded.Upper) > 0 && loaded.Upper[0] == byte(keys.SpaceUser) {
		upper = keys.User(loaded.Upper)
	}
	for _, r := range ranges {
		e := &pb.ChangeEvent{Kind: pb.EventKind_EVENT_KIND_LOADED, Key: r.Lower, EndKey: r.Upper}
		if bytes.Compare(lower, e.Key) > 0 {
			e.Key = lower
		}
		if upper != nil && (e.EndKey == nil || bytes.Compare(upper, e.EndKey) < 0) {
			e.EndKey = upper
		}
		if e.EndKey == nil || bytes.Compare(e.Key, e.EndKey) < 0 {
			list = append(list, e)
		}
	}
	return list
}
