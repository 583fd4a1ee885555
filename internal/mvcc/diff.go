package mvcc

import (
	"bytes"
	"context"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// DiffOptions bound a comparison of two snapshots.
type DiffOptions struct {
	Lower, Upper []byte     // [Lower, Upper); a nil Upper means to the end
	From, To     keys.Epoch // To zero: the newest epoch
	Values       bool

	After []byte // continue after this key; nil: begin

	Count, Bytes int           // end after about so much, but not before the first change
	Keys         int           // end after so many keys were read, whether they differ or not
	Keep         time.Duration // how long From and To stay readable after a part that is not the last
	Client       string        // for which they do, see LeaseSnapshot
}

// KeyState is what a snapshot sees of a key.
type KeyState struct {
	VersionInfo // Deleted also if there is no version
	Value       []byte
}

// KeyChange is a key that differs between two snapshots: it has another version, or exists in only one of them.
type KeyChange struct {
	Key      []byte
	Old, New KeyState
}

// Diff is a part of the keys that differ, in their order.
type Diff struct {
	Changes []KeyChange
	To      keys.Epoch
	Last    []byte     // up to this key everything was compared
	More    bool       // there may be more after it
	Await   keys.Epoch // must be durable before the client may see the changes; zero: nothing
}

// Diff compares two snapshots, by a walk over the keys that have changed after the first one. A key that was made and deleted
// between them does not differ. Errors: *SnapshotGoneError, why the context ended, and those of reads.
func (x *Session) Diff(ctx context.Context, o *DiffOptions) (Diff, error) {
	to, err := x.OpenSnapshot(o.To)
	if err != nil {
		return Diff{}, err
	}
	defer x.CloseSnapshot()
	d := Diff{To: to}
	lower := o.Lower
	if o.After != nil {
		lower = append(bytes.Clone(o.After), 0)
	}
	walk, err := x.Difference(DifferenceOptions{Lower: lower, Upper: o.Upper, Since: o.From, KeysOnly: true, Context: ctx})
	if err != nil {
		return Diff{}, err
	}
	defer walk.Close()
	if walk.since != nil {
		walk.since.AdmitLarge(x.admit)
	}
	for size, read := 0, 0; walk.Next(); read++ {
		if n := len(d.Changes); n > 0 && (n >= o.Count || size >= o.Bytes) || read > 0 && read >= o.Keys {
			d.More = true // there may be: whether the key differs is seen by the next part
			break
		}
		c := KeyChange{Key: bytes.Clone(walk.Key())}
		d.Last = c.Key
		if err := d.compare(ctx, walk, &c, o.Values); err != nil {
			return Diff{}, err
		}
		if c.Old.Deleted && c.New.Deleted {
			continue
		}
		d.Changes = append(d.Changes, c)
		size += 2*versionBytes + len(c.Key) + len(c.Old.Value) + len(c.New.Value)
	}
	if err := walk.Err(); err != nil {
		return Diff{}, err
	}
	if d.More { // without the leases, the next part may find that the snapshots are gone
		x.store.LeaseSnapshot(to, o.Client, o.Keep)
		x.store.LeaseSnapshot(o.From, o.Client, o.Keep)
	}
	return d, nil
}

// compare reads the key of a walk in both snapshots.
func (d *Diff) compare(ctx context.Context, walk *Difference, c *KeyChange, values bool) (err error) {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	c.Old.Deleted = true
	if walk.since != nil {
		if c.Old, err = d.state(walk.since, c.Key, values); err != nil {
			return err
		}
	}
	c.New, err = d.state(walk.session, c.Key, values)
	return err
}

// state reads a key in the snapshot of a session.
func (d *Diff) state(x *Session, key []byte, values bool) (s KeyState, err error) {
	x.slot.Enter()
	defer x.slot.Leave()
	internal := keys.Append(nil, keys.SpaceUser, key)
	v, ok, err := x.reader.Get(internal, x.at)
	if err != nil || !ok {
		return KeyState{VersionInfo: VersionInfo{Deleted: true}}, err
	}
	d.Await = max(d.Await, x.store.mustAwait(v.Sync, v.Epoch))
	s.Epoch, s.Deleted = v.Epoch, !v.Kind.HasValue()
	if !s.Deleted {
		s.Metadata, s.Value, err = x.readVersion(internal, v, values)
	}
	return s, err
}
