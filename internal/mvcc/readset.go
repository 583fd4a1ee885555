package mvcc

import (
	"context"

	"epochkv/internal/storage"
	"epochkv/internal/storage/keys"
)

// readSet is what a validated commit read and needs unchanged: at its snapshot, single keys and ranges of internal keys. Its
// buffers are reused, so that a retried transaction allocates nothing.
type readSet struct {
	at     keys.Epoch
	buf    []byte   // the keys, one behind the other
	points []span   // keys
	ranges []bounds // [lower, upper)
	pinned storage.Pinned
	err    ConflictError // the one error a session reports at a time; reused
}

// span is a place in a buffer. Offsets, because the buffer moves when it grows.
type span struct{ from, to int }

type bounds struct{ lower, upper span }

// init makes the first buffers, which share no cache line with those of other sessions (see keys.LineBytes).
func (r *readSet) init() {
	r.buf, r.points = keys.Scratch(), make([]span, 0, keys.LineBytes/16)
}

func (r *readSet) reset(at keys.Epoch) {
	if r.held() > keepBytesMax {
		*r = readSet{err: r.err} // which may just be told
	}
	r.at = at
	r.buf, r.points, r.ranges = r.buf[:0], r.points[:0], r.ranges[:0]
}

func (r *readSet) keep(key []byte) span {
	from := len(r.buf)
	r.buf = append(r.buf, key...)
	return span{from, len(r.buf)}
}

// addPoint remembers an internal key. Reading one key again and again in a row counts once.
func (r *readSet) addPoint(key []byte) {
	if n := len(r.points); n > 0 && string(r.key(r.points[n-1])) == string(key) {
		return
	}
	r.points = append(r.points, r.keep(key))
}

func (r *readSet) addRange(lower, upper []byte) {
	r.ranges = append(r.ranges, bounds{r.keep(lower), r.keep(upper)})
}

func (r *readSet) key(s span) []byte { return r.buf[s.from:s.to] }

func (r *readSet) size() int { return len(r.buf) + 32*len(r.ranges) + 16*len(r.points) }

// held is the memory that the read set keeps.
func (r *readSet) held() int { return cap(r.buf) + 32*cap(r.ranges) + 16*cap(r.points) }

// conflict fills the read set's error.
func (r *readSet) conflict(internal []byte, epoch keys.Epoch) error {
	r.err.Key = append(r.err.Key[:0], keys.User(internal)...)
	r.err.Epoch = epoch
	return &r.err
}

// validate checks that nothing in the read set has a version newer than the snapshot. It may read pages. The caller is inside
// its slot's protection and stays there until validateSince.
func (x *Session) validate(r *readSet) error {
	r.pinned = x.store.engine.Pin()
	err := x.unchanged(r, keys.MaxEpoch)
	if r.refused(err) {
		x.store.conflicts.Add(1)
		x.told = r.err.Epoch
	}
	return err
}

// unchanged looks for a version of something in the read set that came after the snapshot and before an epoch.
func (x *Session) unchanged(r *readSet, before keys.Epoch) error {
	for _, p := range r.points {
		key := r.key(p)
		v, _, err := x.reader.Get(key, before-1)
		if err != nil {
			return err
		}
		if v.Epoch > r.at {
			x.reveals(v.Sync, v.Epoch)
			return r.conflict(key, v.Epoch)
		}
	}
	for _, b := range r.ranges {
		epoch, changed, err := x.reader.ChangedSince(r.pinned, r.key(b.lower), r.key(b.upper), r.at, before)
		if err != nil {
			return err
		}
		if changed {
			x.reveals(true, epoch) // it may be: nothing tells
			return r.conflict(r.key(b.lower), epoch)
		}
	}
	return nil
}

// refused reports whether err is the conflict that this read set has told.
func (r *readSet) refused(err error) bool {
	return err == error(&r.err) //nolint:errorlint // identity: is it the one that is reused
}

// validateSince checks what came between validate and the reservation of epoch. It waits for every smaller epoch, which
// cannot deadlock: they hold all their latches already. If the context ends the wait, the commit cannot happen, and its epoch is given up. What came lies in the memtables that were pinned and in those
// that followed them, so there is no I/O, even if a checkpoint has merged some of them meanwhile.
func (x *Session) validateSince(ctx context.Context, r *readSet, epoch keys.Epoch) error {
	if err := x.store.horizon.wait(ctx, epoch-1, x.parker); err != nil {
		return err
	}
	if r.pinned == (storage.Pinned{}) {
		// The record was so large that its place came first, and nothing has been validated. This may read pages while later
		// commits wait: rare, and short beside copying the record.
		r.pinned = x.store.engine.Pin()
		return x.unchanged(r, epoch)
	}
	for _, p := range r.points {
		key := r.key(p)
		if newer, changed := x.store.engine.KeyChangedInMemory(r.pinned, key, r.at, epoch); changed {
			x.reveals(true, newer) // as above
			return r.conflict(key, newer)
		}
	}
	for _, b := range r.ranges {
		if newer, changed := x.store.engine.ChangedInMemory(r.pinned, r.key(b.lower), r.key(b.upper), r.at, epoch); changed {
			x.reveals(true, newer)
			return r.conflict(r.key(b.lower), newer)
		}
	}
	return nil
}
