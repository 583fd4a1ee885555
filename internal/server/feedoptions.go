package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// watchOptions are what the client wants of a watch.
type watchOptions struct {
	ranges           []feed.Range // ascending and apart
	kinds            feed.Kinds
	origins          feed.Origins
	filter           uint64 // hash of ranges and kinds, for tokens
	values           pb.WatchValues
	difference       bool // on_gap DIFF
	expandLoads      bool
	progressInterval time.Duration
}

// watchStart is where a watch begins: now, after a position, or with a walk.
type watchStart struct {
	now   bool
	after feed.Position
	time  uint64 // after everything up to this time, if it is not zero
	walk  bool
	load  bool       // the walk is of a bulk load
	first bool       // the walk is a difference from before the first commit
	at    keys.Epoch // of the walk's snapshot; zero: the newest
	last  []byte     // the last key of the walk that the client has
}

// toWatchOptions reads a request, and returns where the watch begins.
func (w *watchStream) toWatchOptions(req *pb.CreateWatch, o *watchOptions) (start watchStart, err error) {
	if o.ranges, err = toWatchRanges(req.Ranges); err != nil {
		return start, err
	}
	if o.kinds, err = toKinds(req.Kinds); err != nil {
		return start, err
	}
	if o.origins, err = toOrigins(req.Origins); err != nil {
		return start, err
	}
	if o.values = req.Values; o.values < 0 || o.values > pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS {
		return start, invalid("create.values", fmt.Sprintf("%d is not known to this server", o.values))
	}
	if req.OnGap < 0 || req.OnGap > pb.OnGap_ON_GAP_DIFF {
		return start, invalid("create.on_gap", fmt.Sprintf("%d is not known to this server", req.OnGap))
	}
	o.difference = req.OnGap == pb.OnGap_ON_GAP_DIFF
	o.progressInterval = progressIntervalDefault
	if req.ProgressInterval != nil {
		if o.progressInterval = req.ProgressInterval.AsDuration(); o.progressInterval < progressIntervalMin {
			return start, invalid("create.progress_interval", fmt.Sprintf("is %v; it is at least %v", o.progressInterval, progressIntervalMin))
		}
	}
	o.filter = watchFilter(o.ranges, o.kinds)
	if o.expandLoads = req.ExpandLoads; o.expandLoads && o.kinds&feed.KindSets != 0 {
		o.kinds |= feed.KindLoads // their entries are sets
	}
	return w.toWatchStart(req, o)
}

// toWatchStart reads where the watch begins.
func (w *watchStream) toWatchStart(req *pb.CreateWatch, o *watchOptions) (start watchStart, err error) {
	switch s := req.Start.(type) {
	case nil, *pb.CreateWatch_Now:
		start.now = true
	case *pb.CreateWatch_AfterEpoch:
		if start.after.Epoch = keys.Epoch(s.AfterEpoch); start.after.Epoch > keys.MaxEpoch {
			return start, invalid("create.after_epoch", "is larger than any epoch")
		}
		return start, w.refuseRemoved(start.after)
	case *pb.CreateWatch_AfterTimeUs:
		if start.time = s.AfterTimeUs; start.time == 0 {
			return start, invalid("create.after_time_us", "is 0; give microseconds since 1970")
		}
	case *pb.CreateWatch_Snapshot:
		start.walk = true
	case *pb.CreateWatch_ResumeToken:
		t, err := decodeFeedToken(s.ResumeToken, w.server.limits.BatchBytes)
		switch {
		case err != nil:
			return start, err
		case t.lineage != w.lineage && t.lineage != keys.Lineage(w.server.store.ID()):
			return start, &lineageError{token: t.lineage, store: w.lineage}
		case t.filter != o.filter:
			return start, invalidToken("belongs to other ranges or kinds")
		}
		start.after = t.position
		if t.snapshot != 0 {
			start.walk, start.load, start.first, start.at, start.last = true, t.load, t.first, t.snapshot, t.last
		}
		return start, errors.Join(w.refuseRemoved(start.after), w.refuseRemoved(feed.Position{Epoch: start.at}))
	default:
		return start, invalid("create.start", "is not known to this server")
	}
	return start, nil
}

// refuseRemoved refuses a position after a commit that a repair of the log removed: no difference shows what that has undone.
func (w *watchStream) refuseRemoved(p feed.Position) error {
	if r, removed := w.server.store.Removed(p.Epoch, p.Operations); removed {
		return &feed.RemovedError{After: p, First: r.First, Last: r.Last}
	}
	return nil
}

// epochBefore is an epoch after which a watch has every commit that is later than a time.
func (w *watchStream) epochBefore(ctx context.Context, at uint64) (keys.Epoch, error) {
	changes := w.server.feed.changes
	e, ok, err := changes.EpochBefore(ctx, at)
	if err == nil && !ok {
		err = &historyGoneError{time: at, oldest: max(changes.OldestInLog(), 1) - 1}
	}
	return e, err
}

// toWatchRanges reads ranges, sorts them, and unites them where they meet.
func toWatchRanges(list []*pb.KeyRange) ([]feed.Range, error) {
	if len(list) == 0 || len(list) > watchRangesMax {
		return nil, invalid("create.ranges", fmt.Sprintf("has %d ranges; give 1 to %d", len(list), watchRangesMax))
	}
	all := make([]feed.Range, 0, len(list))
	for _, r := range list {
		b, err := toBounds(r)
		if err != nil {
			return nil, err
		}
		if b.upper != nil && bytes.Equal(b.lower, b.upper) {
			return nil, invalidRange("has no key")
		}
		all = append(all, feed.Range{Lower: b.lower, Upper: b.upper})
	}
	return feed.United(all), nil
}

func toKinds(list []pb.EventKind) (set feed.Kinds, err error) {
	for _, k := range list {
		switch k {
		case pb.EventKind_EVENT_KIND_SET:
			set |= feed.KindSets
		case pb.EventKind_EVENT_KIND_DELETE:
			set |= feed.KindDeletes
		case pb.EventKind_EVENT_KIND_LOADED:
			set |= feed.KindLoads
		default:
			return 0, invalid("create.kinds", fmt.Sprintf("%d is not known to this server", k))
		}
	}
	return set, nil
}

func toOrigins(list []pb.CommitOrigin) (feed.Origins, error) {
	var set []batch.Origin
	for _, o := range list {
		if o <= pb.CommitOrigin_COMMIT_ORIGIN_UNSPECIFIED || o > pb.CommitOrigin_COMMIT_ORIGIN_RESTORE {
			return 0, invalid("create.origins", fmt.Sprintf("%d is not known to this server", o))
		}
		set = append(set, batch.Origin(o-pb.CommitOrigin_COMMIT_ORIGIN_CLIENT))
	}
	return feed.OriginsOf(set...), nil
}

func originMessage(o batch.Origin) pb.CommitOrigin {
	return pb.CommitOrigin(o) + pb.CommitOrigin_COMMIT_ORIGIN_CLIENT
}
