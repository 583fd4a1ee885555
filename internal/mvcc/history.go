package mvcc

import (
	"bytes"
	"context"
	"math"
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/wal"
)

// HistoryOptions say which versions History returns: those that commits in (From, To] wrote of keys in [Lower, Upper).
type HistoryOptions struct {
	Lower, Upper []byte     // a nil Upper means to the end
	From         keys.Epoch // zero: as far back as all versions are kept, with the version that each key has there
	To           keys.Epoch // zero: the newest epoch
	Values       bool

	AfterKey   []byte // continue after the version of this key with AfterEpoch; nil: begin
	AfterEpoch keys.Epoch

	Count, Bytes int           // end after about so much, but not before the first version
	Keep         time.Duration // how long To stays readable after a part that is not the last
	Client       string        // for which it does, see LeaseSnapshot
}

// KeyVersion is a version of a key, with what the log says of its commit.
type KeyVersion struct {
	Key, Value []byte
	VersionInfo
	Time   uint64       // microseconds since 1970, zero if it is not known; without a commit in the log that of a sample, which is not earlier
	Logged bool         // Origin is known
	Origin batch.Origin // of the commit
}

// History is a part of the versions of some keys: in key order, those of a key newest first.
type History struct {
	Versions   []KeyVersion
	To         keys.Epoch
	Oldest     keys.Epoch // all versions after it were kept
	OldestTime uint64     // no commit up to Oldest is later; zero if it is not known
	More       bool       // there may be more after the last version
	Await      keys.Epoch // must be durable before the client may see the versions; zero: nothing
}

// historyRead is a History in the making.
type historyRead struct {
	session *Session
	options *HistoryOptions
	key     []byte // internal key that is being read
	size    int
	out     History
}

// History reads versions. While it reads, all of them are kept; between two parts, only what the retention and holds keep.
// Errors: *SnapshotGoneError, why the context ended, and those of reads.
func (x *Session) History(ctx context.Context, o *HistoryOptions) (History, error) {
	to, err := x.OpenSnapshot(o.To)
	if err != nil {
		return History{}, err
	}
	defer x.CloseSnapshot()
	oldest, err := x.keepVersions(o.From)
	if err != nil {
		return History{}, err
	}
	defer x.endKeeping()
	if oldest > to { // a lease or another reader keeps the snapshot, and not the versions before it
		return History{}, x.store.keepable(to)
	}
	r := historyRead{session: x, options: o, out: History{To: to, Oldest: oldest, OldestTime: x.store.TimeOf(oldest)}}
	if err := r.read(ctx); err != nil {
		return History{}, err
	}
	if err := x.describeCommits(ctx, r.out.Versions); err != nil {
		return History{}, err
	}
	if r.out.More {
		x.store.LeaseSnapshot(to, o.Client, o.Keep) // without it, the next part may find that To is gone
	}
	return r.out, nil
}

// read walks over the keys with versions, and reads those of each.
func (r *historyRead) read(ctx context.Context) error {
	o := DifferenceOptions{Lower: r.options.Lower, Upper: r.options.Upper, Since: r.options.From, KeysOnly: true, Context: ctx}
	if r.options.AfterKey != nil {
		o.Lower = r.options.AfterKey
	}
	walk, err := r.session.Difference(o)
	if err != nil {
		return err
	}
	defer walk.Close()
	for !r.out.More && walk.Next() {
		r.out.Await = max(r.out.Await, walk.Await())
		if err := r.readKey(ctx, walk.Key()); err != nil {
			return err
		}
	}
	return walk.Err()
}

// readKey reads the versions of a key, newest first.
func (r *historyRead) readKey(ctx context.Context, key []byte) error {
	at := r.out.To
	if bytes.Equal(key, r.options.AfterKey) {
		if at = r.options.AfterEpoch - 1; at < r.out.Oldest {
			return nil // the floor has risen meanwhile: that was the version with which the history of the key begins
		}
	}
	x := r.session
	if invariants.Enabled {
		x.assertRead(key)
	}
	x.slot.Enter()
	defer x.slot.Leave()
	r.key = keys.Append(r.key[:0], keys.SpaceUser, key)
	key, from := bytes.Clone(key), r.options.From
	var failed error
	err := x.reader.Versions(r.key, at, func(v storage.Version) bool {
		switch base := v.Epoch <= r.out.Oldest; {
		case v.Epoch <= from || base && !v.Kind.HasValue():
			return false
		case r.full():
			r.out.More = true
			return false
		case ctx.Err() != nil:
			failed = context.Cause(ctx)
			return false
		default:
			failed = r.add(key, v)
			return failed == nil && !base
		}
	})
	if err == nil {
		err = failed
	}
	return err
}

func (r *historyRead) full() bool {
	n := len(r.out.Versions)
	return n > 0 && (n >= r.options.Count || r.size >= r.options.Bytes)
}

// versionBytes is what a version counts at least: its message takes so much memory beside key and value.
const versionBytes = 64

func (r *historyRead) add(key []byte, found storage.Version) (err error) {
	x := r.session
	v := KeyVersion{Key: key, VersionInfo: VersionInfo{Epoch: found.Epoch, Deleted: !found.Kind.HasValue()}}
	r.out.Await = max(r.out.Await, x.store.mustAwait(found.Sync, found.Epoch))
	if !v.Deleted {
		v.Metadata, v.Value, err = x.readVersion(r.key, found, r.options.Values)
	}
	r.out.Versions = append(r.out.Versions, v)
	r.size += versionBytes + len(key) + len(v.Value)
	return err
}

// readVersion reads what a version with a value has. The caller is inside the slot's protection.
func (x *Session) readVersion(internal []byte, found storage.Version, withValue bool) (f metadata.Fields, value []byte, err error) {
	if f, err = found.Metadata(); err == nil && withValue {
		if err = x.admitted(found.Size()); err == nil {
			value, err = x.reader.AppendValue(nil, found)
		}
	}
	if err != nil {
		err = ofKey(err, internal)
	}
	return f, value, err
}

// describeCommits says when the commits of versions were, and what made them: from the log, the newest first, as far as it has
// them and reading them is not too much, and else from the samples. Its error is that of what counts a large record.
func (x *Session) describeCommits(ctx context.Context, versions []KeyVersion) error {
	s := x.store
	if len(versions) == 0 {
		return nil
	}
	of := map[keys.Epoch][]*KeyVersion{}
	for i := range versions {
		v := &versions[i]
		v.Time = s.TimeOf(v.Epoch)
		of[v.Epoch] = append(of[v.Epoch], v)
	}
	left := make([]keys.Epoch, 0, len(of))
	oldest := s.engine.OldestLogEpoch()
	for e := range of {
		if e >= oldest {
			left = append(left, e)
		}
	}
	slices.Sort(left)
	if len(left) == 0 || s.engine.WaitDurable(ctx, left[len(left)-1]) != nil {
		return nil //nolint:nilerr // the samples say it
	}
	for budget := int64(commitsReadMax); len(left) > 0 && budget > 0; {
		newest := left[len(left)-1]
		mark := s.timeline.marks.newest(newest, math.MaxUint64)
		first, _ := slices.BinarySearch(left, mark.Epoch())
		read, _, refused := s.readCommits(ctx, x, &s.timeline.logReads, left[first]-1, newest, mark, budget, func(e keys.Epoch, _ wal.TailMark, h batch.Header) bool {
			for _, v := range of[e] {
				if h.Time != 0 {
					v.Time, v.Logged, v.Origin = h.Time, true, h.Origin
				}
			}
			return true
		})
		if refused != nil {
			return refused
		}
		left, budget = left[:first], budget-max(read, 1)
	}
	return nil
}
