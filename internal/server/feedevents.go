package server

import (
	"bytes"
	"context"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// changesResponse is a response that is being filled. Its messages are used again: with a thousand streams, and a thousand events
// in a response, they were most of what the collector had to do. Marshalling releases it, so that nothing but encoded bytes waits
// for a client.
type changesResponse struct {
	pb.WatchResponse
	body    pb.WatchResponse_Changes
	changes pb.WatchChanges

	commits   [watchEventsMax]pb.ChangedCommit
	times     [watchEventsMax]timestamppb.Timestamp
	all       [watchEventsMax]pb.ChangeEvent
	pointers  [watchEventsMax]*pb.ChangeEvent
	commitsTo [watchEventsMax]*pb.ChangedCommit

	events, begun int               // in use
	commit        *pb.ChangedCommit // the last one
	bytes         int
	position      feed.Position // after what it has
	time          uint64        // of the last commit, in microseconds since 1970; 0 if it is not known
}

var changesResponses = sync.Pool{New: func() any { return new(changesResponse) }}

func newChangesResponse() *changesResponse { return changesResponses.Get().(*changesResponse) }

// MarshalToSizedBufferVT encodes the response, once, and releases it.
func (r *changesResponse) MarshalToSizedBufferVT(buf []byte) (int, error) {
	defer r.release()
	return r.WatchResponse.MarshalToSizedBufferVT(buf)
}

// release makes the response empty, so that it refers to no commit, and lets others use it.
func (r *changesResponse) release() {
	clear(r.all[:r.events])
	clear(r.commits[:r.begun])
	r.WatchResponse.Reset()
	r.body.Changes, r.changes.Commits, r.commit = nil, nil, nil
	r.events, r.begun, r.bytes, r.time, r.position = 0, 0, 0, 0, feed.Position{}
	changesResponses.Put(r)
}

// What an event and a commit count in a response beside keys and values: about what they take there.
const (
	eventBytes  = 32
	commitBytes = 40
)

// delivering is a delivery of the feed that is being sent, in as many responses as that needs: the feed does not count previous values.
type delivering struct {
	*watchStream
	sw       *streamWatch
	out      *changesResponse
	lagging  bool
	limit    int             // of the response at hand
	previous *previousValues // those of the part at hand that were read last; none while a response waits for the client
}

// sendChanges sends what the feed has delivered for a watch.
func (w *watchStream) sendChanges(ctx context.Context, sw *streamWatch, d *feed.Delivery) error {
	sw.unsent = true
	defer func() { sw.unsent = false }()
	s := delivering{watchStream: w, sw: sw, out: newChangesResponse(), lagging: d.State == feed.StateLagging}
	for i := range d.Parts {
		p := &d.Parts[i]
		loaded := p.Commit.Loaded
		if loaded != nil && sw.options.expandLoads {
			if err := s.flush(ctx); err != nil {
				return err
			}
			return w.beginLoad(ctx, sw, loaded, nil) // what follows is delivered again after it
		}
		s.begin(p.Commit)
		for index, op := range p.Operations {
			if ok, err := s.add(ctx, p, index, op); !ok {
				return err
			}
		}
		if loaded != nil {
			if ok, err := s.addLoaded(ctx, p.Commit, d.Position); !ok {
				return err
			}
		}
		if p.End {
			s.out.commit.End, s.out.position = true, feed.Position{Epoch: p.Commit.Epoch}
		}
		s.previous, d.Parts[i] = nil, feed.Part{}
	}
	s.out.position = d.Position
	d.Release() // while the response waits for the client, nothing refers to the commits
	w.response.kept = false
	return w.sendResponse(ctx, sw, s.out)
}

// begin begins a commit, or a further part of it.
func (s *delivering) begin(c *feed.Commit) {
	if s.out == nil {
		s.out = newChangesResponse()
	}
	s.limit = s.responseLimit()
	s.out.begin(c, s.lagging)
}

// flush sends what there is.
func (s *delivering) flush(ctx context.Context) error {
	out := s.out
	s.out, s.previous = nil, nil
	if out.events == 0 {
		out.release()
		return nil
	}
	return s.sendResponse(ctx, s.sw, out)
}

// proceed sends what there is, and reports whether more may follow: the client decides how long the response takes, and its rights may have
// ended meanwhile.
func (s *delivering) proceed(ctx context.Context) (ok bool, err error) {
	if err = s.flush(ctx); err == nil {
		err = s.endForbidden(ctx)
	}
	return err == nil && s.isOpen(s.sw), err
}

// add adds an operation. It reports false if the watch has ended, or the stream has to.
func (s *delivering) add(ctx context.Context, p *feed.Part, index int, op batch.Op) (ok bool, err error) {
	before, ok, err := s.previousAt(ctx, p, index, op)
	if ok && !s.out.fits(sizeBefore(op, before), s.limit) {
		before = previousValue{} // it is read again: a response that waits has nothing beside it
		if ok, err = s.proceed(ctx); ok {
			s.begin(p.Commit)
			before, ok, err = s.previousAt(ctx, p, index, op)
		}
	}
	if !ok {
		return false, err
	}
	size := sizeBefore(op, before)
	if invariants.Enabled {
		s.sw.named.assertNamed(keys.User(op.Key))
	}
	e := s.out.add(size, feed.Position{Epoch: p.Commit.Epoch - 1, Operations: uint32(index) + 1})
	describeEvent(e, s.sw, op, before)
	return true, nil
}

// addLoaded adds the events of a bulk load. It reports false like add.
func (s *delivering) addLoaded(ctx context.Context, c *feed.Commit, after feed.Position) (ok bool, err error) {
	list, size := loadedEvents(s.sw.options.ranges, c.Loaded)
	if s.out.events+len(list) > watchEventsMax || s.out.bytes+size > s.limit {
		if ok, err := s.proceed(ctx); !ok {
			return false, err
		}
		if ok, err := s.chargeLoaded(ctx, s.sw, size); !ok {
			return false, err
		}
		s.begin(c)
	}
	for _, e := range list {
		into := s.out.add(sizeOf(e), after)
		into.Kind, into.Key, into.EndKey = e.Kind, e.Key, e.EndKey
	}
	return true, nil
}

// previousAt is the previous value of an operation, if the watch wants it. It reports false if the watch has ended, or the stream has to.
func (s *delivering) previousAt(ctx context.Context, p *feed.Part, index int, op batch.Op) (v previousValue, ok bool, err error) {
	if !s.sw.wantsPrevious() {
		return v, true, nil
	}
	if v = s.previous.of(index); v.unread {
		if s.previous, err = s.previousOf(ctx, p, index); err != nil {
			if err := s.flush(ctx); err != nil { // or a client that continues here would never get it
				return v, false, err
			}
			return v, false, s.end(ctx, s.sw, err)
		}
		v = s.previous.of(index)
	}
	if !v.unread && s.hasRoom(sizeBefore(op, v)) {
		return v, true, nil
	}
	v = previousValue{}
	if ok, err = s.proceed(ctx); !ok { // nothing else is kept while a large one waits for room
		return v, false, err
	}
	if v, ok, err = s.largePrevious(ctx, s.sw, p.Commit.Epoch, op); ok {
		s.begin(p.Commit)
	}
	return v, ok, err
}

// sendResponse sends what was filled.
func (w *watchStream) sendResponse(ctx context.Context, sw *streamWatch, r *changesResponse) error {
	if r.time != 0 {
		now := w.server.store.Clock().Now()
		w.server.feed.delays.Observe(time.Duration(max(now, r.time)-r.time) * time.Microsecond)
	}
	if len(r.commit.Events) == 0 {
		r.begun-- // its first event did not fit
		r.bytes -= commitBytes
	}
	r.changes.Commits = r.commitsTo[:r.begun]
	r.body.Changes = &r.changes
	r.WatchId, r.Body, r.ResumeToken = sw.id, &r.body, w.token(sw, r.position)
	defer w.release() // of a large value
	return w.sendMessage(ctx, sw, r, r.bytes)
}

// begin begins a commit, or a further part of it.
func (r *changesResponse) begin(c *feed.Commit, lagging bool) {
	r.commit = &r.commits[r.begun]
	r.commitsTo[r.begun] = r.commit
	r.commit.Epoch, r.commit.Origin, r.commit.Lagging = uint64(c.Epoch), originMessage(c.Origin), lagging
	if r.time = c.Time; c.Time != 0 {
		t := &r.times[r.begun]
		t.Seconds, t.Nanos = int64(c.Time/1e6), int32(c.Time%1e6)*1e3
		r.commit.Time = t
	}
	r.begun++
	r.bytes += commitBytes
}

// fits reports whether there is room for an event. There is for one, whatever its size is.
func (r *changesResponse) fits(size, limit int) bool {
	return r.events == 0 || r.events < watchEventsMax && r.bytes+size <= limit
}

// add adds an event to the last commit.
func (r *changesResponse) add(size int, after feed.Position) *pb.ChangeEvent {
	e := &r.all[r.events]
	r.pointers[r.events] = e
	r.events++
	r.commit.Events = r.pointers[r.events-1-len(r.commit.Events) : r.events : r.events]
	r.position = after
	r.bytes += size
	return e
}

// hasRoom reports whether the stream has room for an event of so many bytes, in a response or for a large one.
func (s *delivering) hasRoom(size int) bool {
	return size <= s.limit || s.room != nil && size <= s.room.bytes
}

// sizeBefore is what an operation and what was before it count in a response.
func sizeBefore(op batch.Op, before previousValue) int {
	return eventBytes + len(op.Key) + len(op.Value) + len(before.value)
}

// sizeOf is what an event counts in a response.
func sizeOf(e *pb.ChangeEvent) int {
	return eventBytes + len(e.Key) + len(e.Value) + len(e.PreviousValue) + len(e.EndKey)
}

// describeEvent fills the event of an operation. It refers to the memory of the commit.
func describeEvent(e *pb.ChangeEvent, sw *streamWatch, op batch.Op, previous previousValue) {
	e.Kind, e.Key = pb.EventKind_EVENT_KIND_DELETE, keys.User(op.Key)
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
}

// describeVersion says what a version says beside its value. A section that this program does not understand is left out: the
// engine refuses the version where it is read.
func describeVersion(e *pb.ChangeEvent, kind keys.Kind, stored []byte) {
	if f, err := metadata.Read(kind, stored); err == nil {
		e.LeaseId, e.ExpiresAtMs = f.Lease, int64(f.ExpiresAt)
	}
}

// loadedEvents are the events of a bulk load: one for each watched range that it meets, of the keys that both have. Together they count so many bytes.
func loadedEvents(ranges []feed.Range, loaded *keys.LoadedRange) (list []*pb.ChangeEvent, size int) {
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
			size += sizeOf(e)
		}
	}
	return list, size
}
