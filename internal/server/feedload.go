package server

import (
	"bytes"
	"context"
	"errors"
	"sync"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// beginLoad lets a watch send the entries of a bulk load instead of LOADED events. The feed forgets the watch meanwhile: a walk
// may take long, and the watch joins the feed after the load when it ends. If the state after the load is not readable any more,
// LOADED events come for what has not been sent.
func (w *watchStream) beginLoad(ctx context.Context, sw *streamWatch, loaded *keys.LoadedRange, last []byte) error {
	if sw.watch != nil {
		sw.watch.Cancel()
		sw.watch = nil
	}
	err := w.whenRoom(ctx, sw, func(ctx context.Context) error {
		walk := &watchWalk{kind: walkLoad, since: loaded.Since(), at: loaded.Epoch, last: last}
		err := w.openWalk(ctx, sw, walk)
		if err == nil {
			return walk.openPrevious(w.server.store, sw)
		}
		if !errors.As(err, new(*mvcc.SnapshotGoneError)) {
			return err
		}
		unread := func(ctx context.Context) error { return w.sendUnread(ctx, sw, loaded, last) }
		if w.room != nil { // a large response of another watch waits for room, or has it: these events may need room, too
			w.later = append(w.later, laterWalk{sw, unread})
			return nil
		}
		return unread(ctx)
	})
	if err != nil {
		return w.end(ctx, sw, err)
	}
	return nil
}

// expanding counts the watches that expand bulk loads. While there is one, the states before and after a bulk load are kept until
// the watch has had time to read them.
type expanding struct {
	mu    sync.Mutex
	count int
}

func (e *expanding) add(s *Server, n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.count += n; e.count > 0 {
		s.store.KeepBulkLoads(s.config.SnapshotLeaseTTL)
	} else {
		s.store.KeepBulkLoads(0)
	}
}

// resumeLoad continues after a token from within the entries of a bulk load.
func (w *watchStream) resumeLoad(ctx context.Context, sw *streamWatch, start watchStart) error {
	loaded := keys.WholeSpace(start.after.Epoch+1, start.at, keys.SpaceUser)
	if known, complete := w.server.feed.changes.BulkLoads(start.after.Epoch, start.at); complete && len(known) == 1 {
		loaded = known[0]
	}
	err := w.respond(ctx, sw, &pb.WatchResponse{
		Body:        &pb.WatchResponse_Created{Created: &pb.WatchCreated{AfterEpoch: uint64(start.after.Epoch)}},
		ResumeToken: (&watchWalk{kind: walkLoad, since: start.after.Epoch, at: start.at, last: start.last}).token(w, sw),
	})
	if err != nil {
		return err
	}
	return w.beginLoad(ctx, sw, &loaded, bytes.Clone(start.last))
}

// sendUnread sends LOADED events for the keys of a bulk load after one, and lets the watch join the feed after the load.
func (w *watchStream) sendUnread(ctx context.Context, sw *streamWatch, loaded *keys.LoadedRange, last []byte) error {
	rest := *loaded
	if len(last) > 0 {
		if next := append(keys.Append(nil, keys.SpaceUser, last), 0); bytes.Compare(next, rest.Lower) > 0 {
			rest.Lower = next
		}
	}
	list, size := loadedEvents(sw.options.ranges, &rest)
	if ok, err := w.chargeLoaded(ctx, sw, size); !ok {
		return err
	}
	defer w.release()
	out := &pb.WatchResponse{
		WatchId: sw.id, Body: loadCommit(loaded.Epoch, list, true), ResumeToken: w.token(sw, feed.Position{Epoch: loaded.Epoch}),
	}
	if err := w.sendMessage(ctx, sw, out, size); err != nil {
		return err
	}
	return w.open(ctx, sw, false, feed.Position{Epoch: loaded.Epoch})
}

// chargeLoaded waits for room for LOADED events that are too large for a response: of many and long ranges.
func (w *watchStream) chargeLoaded(ctx context.Context, sw *streamWatch, size int) (ok bool, err error) {
	if size <= w.responseLimit() {
		return true, nil
	}
	return w.charge(ctx, sw, size)
}

// loadCommit is a bulk load as a commit, or a part of it.
func loadCommit(at keys.Epoch, events []*pb.ChangeEvent, end bool) *pb.WatchResponse_Changes {
	commit := &pb.ChangedCommit{Epoch: uint64(at), Origin: pb.CommitOrigin_COMMIT_ORIGIN_CLIENT, Events: events, End: end}
	return &pb.WatchResponse_Changes{Changes: &pb.WatchChanges{Commits: []*pb.ChangedCommit{commit}}}
}

// openPrevious opens the state before a bulk load, if the watch wants previous values and that state is readable.
func (k *watchWalk) openPrevious(s *mvcc.Store, sw *streamWatch) error {
	if sw.options.values != pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS || k.since == 0 {
		return nil
	}
	x, err := s.Session()
	if err != nil {
		return err
	}
	if _, err := x.OpenSnapshot(k.since); err != nil {
		x.Close()
		return nil //nolint:nilerr // the events say that it is unavailable
	}
	k.previous = x
	return nil
}

// setPrevious sets the previous value of an event. What was before a difference is not read: there may have been versions between.
func (k *watchWalk) setPrevious(sw *streamWatch, e *pb.ChangeEvent) error {
	switch {
	case sw.options.values != pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS || k.kind == walkLoad && k.since == 0:
		return nil
	case k.previous == nil:
		e.PreviousUnavailable = true
		return nil
	}
	size := len(e.Key) + len(e.Value) // and not the event, which the session would keep
	k.previous.AdmitLarge(func(bytes int) error { return k.admit(size + bytes) })
	return k.previous.ReadAll(k.snapshot.ctx, [][]byte{e.Key}, func(_ int, v mvcc.Value) error {
		if err := k.admit(size + len(v.Data)); err != nil { // also if it is not large
			return err
		}
		if v.Found {
			e.PreviousValue = append([]byte{}, v.Data...)
		}
		return nil
	})
}
