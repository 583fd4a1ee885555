package mvcc

import (
	"context"
	"slices"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage"
)

// DifferenceOptions bound a walk over the client's keys that have changed.
type DifferenceOptions struct {
	Lower, Upper []byte     // [Lower, Upper); a nil Upper means to the end
	Since        keys.Epoch // keys with a newer version are shown; zero shows every key
	KeysOnly     bool       // values are not read
	SetsOnly     bool       // keys that were deleted are left out; the snapshot at Since is not needed then

	// Context ends the walk, however much of it finds nothing; nil if nothing ends it.
	Context context.Context

	// Admit is asked before a value is read, with the bytes of it and its key. Its error ends the walk. nil: all are admitted.
	Admit func(bytes int) error
}

// Difference walks over the keys that have changed after one epoch, in key order, with their newest version in the session's
// snapshot, which may be a deletion. It reads only those parts of the tree in which something has changed, and reads each key
// that it finds there again in the snapshot, as every read does. It is not for concurrent use.
type Difference struct {
	session *Session
	since   *Session // keeps what the snapshot before the changes sees; nil for Since 0
	options DifferenceOptions
	walk    storage.ChangedKeys
	lower   []byte // internal bounds; lower moves with the walk
	upper   []byte
	found   [][]byte // candidates of the current part of the walk
	next    int      // of found
	more    bool     // the walk continues at lower after found
	key     []byte
	value   []byte
	version VersionInfo
	await   keys.Epoch
	err     error
}

// VersionInfo says which commit wrote a version, and what it says beside its value.
type VersionInfo struct {
	Epoch    keys.Epoch
	Deleted  bool
	Metadata metadata.Fields
}

// Difference opens a walk in the session's snapshot. While it is open, it also keeps the snapshot at Since, because a deletion
// is certain to be found only as long as what it hides is kept; the error is *SnapshotGoneError if that snapshot cannot be had
// any more; SetsOnly does without it. The bounds are copied. Only Close ends the walk.
func (x *Session) Difference(o DifferenceOptions) (*Difference, error) {
	for _, bound := range [][]byte{o.Lower, o.Upper} {
		if err := x.checkBound(bound); err != nil {
			return nil, err
		}
	}
	d := &Difference{session: x, options: o, more: true}
	if o.Since > 0 && !o.SetsOnly {
		since, err := x.store.Session()
		if err != nil {
			return nil, err
		}
		if _, err := since.OpenSnapshot(o.Since); err != nil {
			since.Close()
			return nil, err
		}
		d.since = since
	}
	d.walk.Since, d.walk.At, d.walk.Bounds = o.Since, x.at, storage.DefaultChangedBounds
	d.lower = keys.Append(nil, keys.SpaceUser, o.Lower)
	d.upper = []byte{byte(keys.SpaceUser) + 1}
	if o.Upper != nil {
		d.upper = keys.Append(nil, keys.SpaceUser, o.Upper)
	}
	return d, nil
}

// Next moves to the next key, and reports whether there is one. After false, Err tells why.
func (d *Difference) Next() bool {
	for d.err == nil {
		for d.next < len(d.found) {
			key := d.found[d.next]
			if d.next++; d.next%stepsPerTurn == 0 {
				letOthersRun()
			}
			if d.read(key) {
				return true
			}
			if d.err != nil {
				return false
			}
		}
		if !d.more {
			return false
		}
		d.advance()
	}
	return false
}

// advance looks for the candidates of the next part of the walk.
func (d *Difference) advance() {
	if ctx := d.options.Context; ctx != nil && ctx.Err() != nil {
		d.err = context.Cause(ctx)
		return
	}
	letOthersRun()
	x := d.session
	x.slot.Enter()
	found, next, err := d.walk.Next(x.reader, d.lower, d.upper)
	x.slot.Leave()
	d.found, d.next, d.more, d.err = found, 0, next != nil, err
	d.lower = append(d.lower[:0], next...)
}

// read reads a candidate in the snapshot, and reports whether it has changed.
func (d *Difference) read(key []byte) bool {
	x := d.session
	x.slot.Enter()
	defer x.slot.Leave()
	v, ok, err := x.reader.Get(key, x.at)
	if err != nil || !ok || v.Epoch <= d.options.Since || d.options.SetsOnly && !v.Kind.HasValue() {
		d.err = err
		return false
	}
	if invariants.Enabled {
		x.assertRead(keys.User(key))
	}
	d.await = max(d.await, x.store.mustAwait(v.Sync, v.Epoch))
	d.key = append(d.key[:0], keys.User(key)...)
	d.value, d.version = d.value[:0], VersionInfo{Epoch: v.Epoch, Deleted: !v.Kind.HasValue()}
	if d.version.Deleted {
		return true
	}
	if admit := d.options.Admit; admit != nil && !d.options.KeysOnly {
		if d.err = admit(len(key) + v.Size()); d.err != nil {
			return false
		}
	}
	if d.version.Metadata, d.err = v.Metadata(); d.err == nil && !d.options.KeysOnly {
		d.value, d.err = x.reader.AppendScanned(d.value, v)
	}
	if d.err != nil {
		d.err = ofKey(d.err, key)
	}
	return d.err == nil
}

// Key is the client's key. It is valid until the next call of Next.
func (d *Difference) Key() []byte { return d.key }

// Value is the key's value in the snapshot, empty for a deletion and with KeysOnly. It is valid as long as Key.
func (d *Difference) Value() []byte { return slices.Clip(d.value) }

// Version is the key's newest version in the snapshot.
func (d *Difference) Version() VersionInfo { return d.version }

// Await is the newest epoch that must be durable before the client may see what was returned since the last call; zero if none.
func (d *Difference) Await() keys.Epoch {
	e := d.await
	d.await = 0
	return e
}

// Err is what ended the walk early, or nil.
func (d *Difference) Err() error { return d.err }

// Pause gives up a large value and the candidates while the caller blocks. Value becomes invalid. The next call of Next looks for the candidates
// again, from the first one on that has not been read.
func (d *Difference) Pause() {
	if cap(d.value) > pausedBytesMax {
		d.value = nil
	}
	if d.next < len(d.found) {
		d.lower, d.more = append(d.lower[:0], d.found[d.next]...), true
	}
	d.found, d.next = nil, 0
	d.walk.Release()
}

// Close ends the walk and the snapshot at Since. Closing twice is harmless.
func (d *Difference) Close() {
	if d.since != nil {
		d.since.Close()
		d.since = nil
	}
	d.more, d.found = false, nil
}
