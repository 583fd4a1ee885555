package server

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/wal"
)

// watchWalk sends the state of a watch's ranges in a snapshot, what has changed there between two epochs, or what a bulk load has
// set. Afterwards the watch continues after the snapshot's epoch. While the walk is open, it holds the snapshot and the log after it, so that nothing can
// be missed between the two.
type watchWalk struct {
	kind      walkKind
	since, at keys.Epoch
	conn      *connection // for which its sessions are counted
	session   *mvcc.Session
	previous  *mvcc.Session // walkLoad: in a snapshot at since, if the watch wants previous values and they are kept
	begin     *mvcc.Session // walkDifference: in a snapshot at since, which it keeps
	hold      *wal.Holder
	snapshot  *openSnapshot
	entry     int              // of the ranges: the one at hand
	last      []byte           // the last key that was sent; nil before the first
	changes   *mvcc.Difference // of the range at hand
	cursor    *mvcc.Cursor     // the same
	part      walkPart         // the one that is being filled
	room      int              // for the largest entry of it
	wanted    int              // bytes of the entry that was larger
}

// walkKind says what a walk sends.
type walkKind uint8

const (
	walkState      walkKind = iota // every key, at one epoch
	walkDifference                 // the keys that have changed between two epochs
	walkLoad                       // the keys that a bulk load has set, as a commit
)

// walkSessions are how many sessions a walk of each kind has at most: its own, one at the begin of a difference, and one of
// mvcc.Difference there; or one for previous values.
var walkSessions = [...]int{walkState: 1, walkDifference: 3, walkLoad: 2}

// walkPart is one response of a walk.
type walkPart struct {
	entries []*pb.Entry       // walkState
	events  []*pb.ChangeEvent // the others
	bytes   int
}

// walkResponse is a response with the part of a walk. Marshalling releases the part, so that nothing but encoded bytes waits for a client.
type walkResponse struct {
	pb.WatchResponse
	part *walkPart
}

// MarshalToSizedBufferVT encodes the response, once, and releases the part.
func (r *walkResponse) MarshalToSizedBufferVT(buf []byte) (int, error) {
	defer func() {
		r.WatchResponse.Reset()
		*r.part = walkPart{}
	}()
	return r.WatchResponse.MarshalToSizedBufferVT(buf)
}

// walkHoldLifetime is how long the log is kept for a walk after its last part was begun.
const walkHoldLifetime = 10 * time.Minute

// beginWalk begins the walk of a watch that begins with a snapshot, or that continues inside a walk.
func (w *watchStream) beginWalk(ctx context.Context, sw *streamWatch, start watchStart) error {
	walk := &watchWalk{since: start.after.Epoch, at: start.at, last: bytes.Clone(start.last)}
	if walk.since != 0 || start.first {
		walk.kind = walkDifference
	}
	if err := w.openWalk(ctx, sw, walk); err != nil {
		return err
	}
	out := &pb.WatchResponse{Body: &pb.WatchResponse_Created{Created: &pb.WatchCreated{AfterEpoch: uint64(walk.at)}}}
	if walk.kind == walkDifference {
		out.ResumeToken = walk.token(w, sw)
	}
	return w.respond(ctx, sw, out)
}

// beginDifference lets a watch cross a gap.
func (w *watchStream) beginDifference(ctx context.Context, sw *streamWatch, gap *feed.GapError) error {
	err := w.server.feed.feed.Await(ctx, gap.ResumeAt)
	if err == nil {
		err = w.openWalk(ctx, sw, &watchWalk{kind: walkDifference, since: gap.After.Epoch})
	}
	if err != nil {
		return w.end(ctx, sw, err)
	}
	return nil
}

// whenRoom begins a walk now, or after another one of the stream.
func (w *watchStream) whenRoom(ctx context.Context, sw *streamWatch, begin func(context.Context) error) error {
	if w.walking >= watchWalksMax {
		w.later = append(w.later, laterWalk{sw, begin})
		return nil
	}
	return begin(ctx)
}

// beginLater begins the walk that has waited longest.
func (w *watchStream) beginLater(ctx context.Context) error {
	first := w.later[0]
	w.later = slices.Delete(w.later, 0, 1)
	if err := first.begin(ctx); err != nil {
		return w.end(ctx, first.watch, err)
	}
	return nil
}

// openWalk takes what a walk needs. Its epoch is durable afterwards, because everything that it shows must be.
func (w *watchStream) openWalk(ctx context.Context, sw *streamWatch, walk *watchWalk) (err error) {
	if err := w.server.admission.holdWalk(w.conn, walkSessions[walk.kind]); err != nil {
		return err
	}
	walk.conn, sw.walk = w.conn, walk
	w.walking++
	defer func() {
		if err != nil {
			w.dropWalk(sw)
			err = walkGone(err, walk.since)
		}
	}()
	if walk.session, err = w.server.store.Session(); err != nil {
		return err
	}
	walk.session.AssertTouches(sw.named.hasNamed)
	if walk.at, err = walk.session.OpenSnapshot(walk.at); err != nil {
		return err
	}
	walk.hold = w.server.feed.changes.Hold(wal.HolderOptions{
		Name: "watch snapshot", Owner: peerOf(ctx), From: walk.at + 1, Lifetime: walkHoldLifetime, Yields: true,
	})
	if err = w.server.store.AwaitDurable(ctx, walk.at); err != nil {
		return err
	}
	walk.snapshot = w.server.openSnapshot(ctx, pb.SnapshotInfo_KIND_WATCH, walk.at, walk.session.CloseSnapshot)
	if walk.kind == walkDifference && walk.since != 0 {
		if err = walk.keepBegin(w.server.store); err != nil {
			return err
		}
	}
	w.walks = append(w.walks, sw)
	return nil
}

// keepBegin keeps the begin of a difference until the walk ends, also between two ranges and while a part waits for room.
func (k *watchWalk) keepBegin(s *mvcc.Store) (err error) {
	if k.begin, err = s.Session(); err == nil {
		_, err = k.begin.OpenSnapshot(k.since)
	}
	return err
}

// walkGone says that a snapshot is gone in the words of watches.
func walkGone(err error, after keys.Epoch) error {
	if gone := (*mvcc.SnapshotGoneError)(nil); errors.As(err, &gone) {
		return &historyGoneError{after: after, oldest: gone.Newest, cause: err}
	}
	return err
}

// dropWalk ends the walk of a watch.
func (w *watchStream) dropWalk(sw *streamWatch) {
	if i := slices.Index(w.walks, sw); i >= 0 {
		w.walks = slices.Delete(w.walks, i, i+1)
	}
	sw.walk.close(w.server, false)
	sw.walk = nil
	w.walking--
}

// close releases what the walk has. If it was interrupted, its snapshot stays readable for as long as that of other resume tokens.
func (k *watchWalk) close(s *Server, interrupted bool) {
	k.closeRange()
	if k.snapshot != nil && k.snapshot.close() && interrupted && k.last != nil {
		client := networkOf(k.snapshot.ctx)
		s.store.LeaseSnapshot(k.at, client, s.config.SnapshotLeaseTTL)
		if k.since != 0 && (k.kind == walkDifference || k.previous != nil) {
			s.store.LeaseSnapshot(k.since, client, s.config.SnapshotLeaseTTL)
		}
	}
	for _, x := range []*mvcc.Session{k.session, k.previous, k.begin} {
		if x != nil {
			x.Close()
		}
	}
	s.admission.sessions.walks.release(k.conn.owns(ownedWalks), int64(walkSessions[k.kind]))
	if k.hold != nil {
		k.hold.Release()
	}
}

func (k *watchWalk) closeRange() {
	if k.changes != nil {
		k.changes.Close()
	}
	if k.cursor != nil {
		k.cursor.Close()
	}
	k.changes, k.cursor = nil, nil
}

// pause keeps nothing in memory, and nothing from reclamation but the snapshot, while the client takes the part.
func (k *watchWalk) pause() {
	if k.cursor != nil {
		k.cursor.Pause()
	}
	if k.changes != nil {
		k.changes.Pause()
	}
	if k.previous != nil {
		k.previous.Trim()
	}
}

// openRange opens the walk of the range at hand, after the last key.
func (k *watchWalk) openRange(sw *streamWatch) (err error) {
	r := sw.options.ranges[k.entry]
	if k.last != nil && bytes.Compare(k.last, r.Lower) >= 0 {
		r.Lower = append(bytes.Clone(k.last), 0)
		if r.Upper != nil && bytes.Compare(r.Lower, r.Upper) > 0 {
			r.Lower = r.Upper
		}
	}
	keysOnly := sw.options.values == pb.WatchValues_WATCH_VALUES_NONE
	if k.kind == walkState {
		k.cursor, err = k.session.Scan(mvcc.ScanOptions{Lower: r.Lower, Upper: r.Upper, KeysOnly: keysOnly, Context: k.snapshot.ctx, Admit: k.admit})
		return err
	}
	k.changes, err = k.session.Difference(mvcc.DifferenceOptions{
		Lower: r.Lower, Upper: r.Upper, Since: k.since, KeysOnly: keysOnly, SetsOnly: k.kind == walkLoad, Context: k.snapshot.ctx, Admit: k.admit,
	})
	return err
}

// sendWalk sends the next part of a walk, and reports whether there is more of it. After the last part the watch goes on with
// what the feed has after the snapshot.
func (w *watchStream) sendWalk(ctx context.Context, sw *streamWatch) (more bool, err error) {
	if err := w.endForbidden(ctx); err != nil || sw.walk == nil { // its snapshot may be newer than the last check
		return false, err
	}
	k := sw.walk
	if k.hold.Renew() != nil {
		k.hold = w.server.feed.changes.Hold(k.hold.HolderOptions) // it ended for lack of space; try again
	}
	more, ok, err := w.fillCharged(ctx, sw, k)
	if !ok {
		return false, err
	}
	k.pause()
	k.snapshot.wait()
	err = w.sendMessage(ctx, sw, k.response(w, sw, more), k.part.bytes) // which releases the part
	w.release()
	if err != nil {
		return false, err
	}
	if err := k.snapshot.resume(); err != nil {
		return false, w.end(ctx, sw, err)
	}
	if more {
		return true, nil
	}
	if sw.watch != nil {
		err = sw.watch.Resume(k.at)
	} else {
		err = w.open(ctx, sw, false, feed.Position{Epoch: k.at})
	}
	if err != nil {
		return false, w.end(ctx, sw, err)
	}
	if k.kind == walkDifference {
		w.server.feed.gaps.crossed.Add(1)
	}
	w.dropWalk(sw)
	return false, nil
}

// fillCharged makes the next part. A large value ends the part before it. Then it waits for room, and is read once there is: nothing
// is in memory meanwhile. It reports false if the watch has ended, or the stream has to.
func (w *watchStream) fillCharged(ctx context.Context, sw *streamWatch, k *watchWalk) (more, ok bool, err error) {
	for k.room = k.limit(w); ; k.room = w.room.bytes {
		more, err = k.fill(sw, k.limit(w))
		switch {
		case err == nil:
			return more, true, nil
		case !errors.Is(err, errSized):
			return false, false, w.end(ctx, sw, k.snapshot.reason(walkGone(err, k.since)))
		}
		k.closeRange()
		if k.part.bytes > 0 {
			return true, true, nil
		}
		k.part = walkPart{}
		k.snapshot.wait()
		if ok, err = w.charge(ctx, sw, k.wanted); err != nil || sw.walk != k {
			return false, false, err
		}
		if err := k.snapshot.resume(); err != nil {
			return false, false, w.end(ctx, sw, err)
		}
		if !ok {
			return false, false, nil
		}
	}
}

// limit is how large the next part may become. Its token has a key, too.
func (k *watchWalk) limit(w *watchStream) int {
	limit := w.responseLimit()
	return limit - min(w.server.limits.KeyBytes, limit/2)
}

// admit refuses a key and its value, or these and the previous value, that are larger than what is left of a response, unless there is room for them. What was
// refused begins the next part.
func (k *watchWalk) admit(bytes int) error {
	if bytes += eventBytes; bytes > k.room-k.part.bytes {
		k.wanted = bytes
		return errSized
	}
	return nil
}

// response is the part that was filled.
func (k *watchWalk) response(w *watchStream, sw *streamWatch, more bool) *walkResponse {
	out := &walkResponse{part: &k.part}
	out.WatchId, out.ResumeToken = sw.id, k.token(w, sw)
	if !more {
		out.ResumeToken = w.token(sw, feed.Position{Epoch: k.at})
	}
	switch k.kind {
	case walkState:
		out.Body = &pb.WatchResponse_Snapshot{Snapshot: &pb.WatchSnapshotPart{Epoch: uint64(k.at), Entries: k.part.entries, End: !more}}
	case walkDifference:
		out.Body = &pb.WatchResponse_Difference{Difference: &pb.WatchDifference{Epoch: uint64(k.at), Events: k.part.events, End: !more}}
	case walkLoad:
		out.Body = loadCommit(k.at, k.part.events, !more)
	}
	return out
}

// token continues the walk after the last key.
func (k *watchWalk) token(w *watchStream, sw *streamWatch) []byte {
	return (&feedToken{
		lineage: w.lineage, position: feed.Position{Epoch: k.since}, filter: sw.options.filter, snapshot: k.at, last: k.last,
		load: k.kind == walkLoad, first: k.kind == walkDifference && k.since == 0,
	}).encode()
}

// fill makes the next part, and reports whether there may be more after it.
func (k *watchWalk) fill(sw *streamWatch, limit int) (more bool, err error) {
	k.part = walkPart{}
	for count := 0; k.entry < len(sw.options.ranges); {
		if k.changes == nil && k.cursor == nil {
			if err := k.openRange(sw); err != nil {
				return false, err
			}
		}
		if count == watchEventsMax || k.part.bytes >= limit {
			return true, nil
		}
		found, err := k.next(sw)
		if err != nil {
			return false, err
		}
		if found {
			count++
			continue
		}
		k.closeRange()
		k.entry++
	}
	return false, nil
}

// next adds the next key to the part.
func (k *watchWalk) next(sw *streamWatch) (found bool, err error) {
	if k.kind == walkState {
		if !k.cursor.Next() {
			return false, k.cursor.Err()
		}
		if err := k.admit(len(k.cursor.Key()) + len(k.cursor.Value())); err != nil { // also if there is no value
			return false, err
		}
		e := &pb.Entry{Key: bytes.Clone(k.cursor.Key()), Value: bytes.Clone(k.cursor.Value()), Epoch: uint64(k.cursor.Epoch())}
		k.part.entries = append(k.part.entries, e)
		k.part.bytes += eventBytes + len(e.Key) + len(e.Value)
		k.last = e.Key
		return true, nil
	}
	if !k.changes.Next() {
		return false, k.changes.Err()
	}
	if err := k.admit(len(k.changes.Key()) + len(k.changes.Value())); err != nil {
		return false, err
	}
	v := k.changes.Version()
	e := &pb.ChangeEvent{Kind: pb.EventKind_EVENT_KIND_DELETE, Key: bytes.Clone(k.changes.Key())}
	if !v.Deleted {
		e.Kind, e.Value = pb.EventKind_EVENT_KIND_SET, bytes.Clone(k.changes.Value())
		e.LeaseId, e.ExpiresAtMs = v.Metadata.Lease, int64(v.Metadata.ExpiresAt)
	}
	if err := k.setPrevious(sw, e); err != nil {
		return false, err
	}
	k.last = e.Key
	if k.kind == walkLoad || wanted(sw.options.kinds, v.Deleted) {
		k.part.events = append(k.part.events, e)
		k.part.bytes += sizeOf(e)
	}
	return true, nil
}

// wanted reports whether a watch wants sets or deletions.
func wanted(kinds feed.Kinds, deleted bool) bool {
	if deleted {
		return kinds == 0 || kinds&feed.KindDeletes != 0
	}
	return kinds == 0 || kinds&feed.KindSets != 0
}
