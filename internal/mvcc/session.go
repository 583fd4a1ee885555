package mvcc

import (
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage"
)

// Session is one reader and writer: its slot in the registry, its buffers, its place to park. It serves one goroutine at a
// time and is pooled, so that a request allocates nothing.
type Session struct {
	// Attachment is what the user of sessions keeps with each of them, so that both are pooled together: the session does
	// not look at it. It may be gone when the session comes from the pool again.
	Attachment any

	store   *Store
	slot    *pin.Slot
	reader  *storage.Reader
	parker  *waiter
	key     []byte // scratch: the internal key of the current request
	entry   []byte // scratch: the key of a record that belongs to it
	section []byte // metadata of the version that was read last, as it is stored; empty if it has none

	at          keys.Epoch // the snapshot, while hasSnapshot
	hasSnapshot bool
	await       keys.Epoch // what must be durable before the client may learn outcomes since the last Await
	committing  commitState
	buffers     sessionBuffers
	baseline    baselineState         // of benchmarks; empty in production
	admit       func(bytes int) error // see AdmitLarge
	made        func(bytes int) error // see AdmitMade
	permit      func() error          // see Permit
	touches     touchFunc             // see AssertTouches
	closed      atomic.Bool
	beside      *besideClient // of SessionOf, whose it is; nil: it is of Session. Guarded by the pool's mutex
}

func (s *Store) newSession() *Session {
	x := &Session{store: s, slot: s.registry.Slot(), reader: s.engine.NewReader(), parker: newWaiter(), key: keys.Scratch()}
	c := &x.buffers.cursor
	c.lower, c.upper, c.from = keys.Scratch(), keys.Scratch(), keys.Scratch()
	x.buffers.txn.own.init()
	x.buffers.txn.reads.init()
	return x
}

// Store is the store of the session.
func (x *Session) Store() *Store { return x.store }

// Close ends the session's snapshot and returns it to the pool. Closing twice is harmless.
func (x *Session) Close() {
	if x.closed.Swap(true) {
		return
	}
	x.buffers.txn.Rollback()
	x.CloseSnapshot()
	x.admit, x.made, x.permit, x.touches = nil, nil, nil, nil
	x.SetWaits(true)
	x.Trim()
	x.store.sessions.put(x)
}

// OpenSnapshot registers a snapshot: at a named epoch, or at the newest for zero. It returns the epoch that reads will see, or
// *SnapshotGoneError. A previous snapshot of the session ends.
func (x *Session) OpenSnapshot(at keys.Epoch) (keys.Epoch, error) {
	x.CloseSnapshot()
	if at == 0 {
		x.at = x.slot.OpenSnapshot()
	} else {
		if err := x.store.openSnapshotAt(x.slot, at); err != nil {
			return 0, err
		}
		x.at = at
	}
	x.hasSnapshot = true
	if invariants.Enabled {
		x.assertSnapshot()
	}
	return x.at, nil
}

// openSnapshotAt registers a snapshot at a named epoch in a slot. After an error the slot has none.
func (s *Store) openSnapshotAt(slot *pin.Slot, at keys.Epoch) error {
	if at > s.Visible() || !slot.OpenSnapshotAt(at) {
		return s.snapshotGone(at)
	}
	err := s.refuseRemoved(at)
	if err != nil {
		slot.CloseSnapshot()
	}
	return err
}

func (s *Store) snapshotGone(e keys.Epoch) *SnapshotGoneError {
	visible, oldest := s.Visible(), s.registry.LowWatermark()
	return &SnapshotGoneError{Epoch: e, Oldest: oldest, Newest: visible, OldestTime: s.TimeOf(oldest)}
}

// largeValueMin is the size from which AdmitLarge treats a value as large.
const largeValueMin = 64 << 10

// AdmitLarge sets the function that is called before a large value is read and copied, and for the outcomes of InvokeAll together, with the new
// values that its caller keeps, before anything is written. Its error ends the read. The function must not wait, and remains set until the next call of AdmitLarge or
// the end of the session.
func (x *Session) AdmitLarge(admit func(bytes int) error) { x.admit = admit }

// AdmitMade sets the function that is called while a commit is made of more than the request has: of the deletions of a range, or of values that the
// operations of InvokeAll write again. It gets the bytes of memory that these take, each time they are more, and before a value is copied: a small
// request can ask for very many. The rest is as for AdmitLarge.
func (x *Session) AdmitMade(admit func(bytes int) error) { x.made = admit }

// admitMade calls the function of AdmitMade if there is more than when it was called before, and returns how much there is.
func (x *Session) admitMade(before, bytes int) (int, error) {
	if bytes <= before || x.made == nil {
		return before, nil
	}
	return bytes, x.made(bytes)
}

// admitSmall is what AdmitLarge is for values that are not large, and are kept together: it admits them when they are as much as a large one.
func (x *Session) admitSmall(bytes int) error {
	if bytes >= largeValueMin { // it was admitted
		return nil
	}
	if x.committing.small += bytes; x.committing.small < largeValueMin {
		return nil
	}
	small := x.committing.small
	x.committing.small = 0
	return x.admitted(small)
}

// admitKept is admitSmall for a value that may be large, and was not admitted.
func (x *Session) admitKept(bytes int) error {
	if err := x.admitted(bytes); err != nil {
		return err
	}
	return x.admitSmall(bytes)
}

// Permit sets the function that a commit calls once it holds its latches, before it reads or changes anything, and once more
// when it has its epoch: a permission that ended before the epoch was reserved permits nothing, however long the commit waited
// in between. Its error ends the commit, as *NotPermittedError. A commit that fails calls it once more, see commit. The function must not wait, and
// remains set until the end of the session.
func (x *Session) Permit(permit func() error) { x.permit = permit }

func (x *Session) permitted() error {
	if x.permit == nil {
		return nil
	}
	if err := x.permit(); err != nil {
		return &NotPermittedError{Cause: err}
	}
	return nil
}

func (x *Session) admitted(bytes int) error {
	if bytes < largeValueMin || x.admit == nil {
		return nil
	}
	return x.admit(bytes)
}

// CloseSnapshot ends the snapshot. Without one it does nothing.
func (x *Session) CloseSnapshot() {
	if !x.hasSnapshot {
		return
	}
	x.buffers.cursor.Close()
	x.hasSnapshot = false
	x.slot.CloseSnapshot()
}

// Get reads one key at a named epoch, or at the newest for zero, and appends its value to dst.
func (x *Session) Get(dst, key []byte, at keys.Epoch) (Value, error) {
	if _, err := x.OpenSnapshot(at); err != nil {
		return Value{Data: dst}, err
	}
	v, err := x.Read(dst, key)
	x.CloseSnapshot()
	return v, err
}

// ErrWouldWait is the error of a read without waiting that would wait for the device.
var ErrWouldWait = storage.ErrWouldWait

// SetWaits says whether Read and ReadAll wait for the device, as they do at first. Otherwise their
// error is ErrWouldWait where they would, and they can be repeated in the same snapshot. Commits and
// other operations must wait.
func (x *Session) SetWaits(waits bool) { x.reader.SetWaits(waits) }

// Read reads one key at the session's snapshot and appends its value to dst.
func (x *Session) Read(dst, key []byte) (v Value, err error) {
	err = x.read(&v, dst, key)
	return v, err
}

// read is Read with the result in v, which must be zero: returning a Value through three functions
// took a third of the time of a read.
func (x *Session) read(v *Value, dst, key []byte) error {
	if invariants.Enabled {
		x.assertRead(key)
	}
	v.Data, v.At, x.section = dst, x.at, x.section[:0]
	if err := x.store.checkKey(key); err != nil && !x.hasBeyondLimit(key) {
		return err
	}
	x.key = keys.Append(x.key[:0], keys.SpaceUser, key)
	x.slot.Enter()
	if invariants.Enabled {
		x.assertSnapshot()
	}
	p := x.store.engine.Pin()
	r, err := p.Find(x.key, x.at), error(nil)
	if r.Found() {
		v.Await = x.store.mustAwait(r.Sync(), r.Epoch())
		if kind := r.Kind(); kind.HasValue() {
			v.Found, v.Epoch = true, r.Epoch()
			stored := r.Value()
			value := metadata.Value(kind, stored)
			x.keepSection(stored[:len(stored)-len(value)])
			if err = x.admitted(len(value)); err == nil {
				v.Data = append(dst, value...)
			}
		}
	} else {
		err = x.readTree(v, p)
	}
	x.slot.Leave()
	return err
}

// readTree is read for a key without a version in a memtable.
func (x *Session) readTree(v *Value, p storage.Pinned) error {
	found, ok, err := x.reader.FindInTree(p, x.key, x.at)
	if err != nil || !ok || !found.Kind.HasValue() {
		return err
	}
	v.Found, v.Epoch = true, found.Epoch
	x.keepSection(found.Section())
	if err := x.admitted(found.Size()); err != nil {
		return err
	}
	if v.Data, err = x.reader.AppendValue(v.Data, found); err != nil {
		return ofKey(err, x.key)
	}
	return nil
}

// mustAwait is the epoch that must be durable before a reply may reveal a version of epoch e: a
// SYNC commit is never shown while a crash could still take it back. That holds for deletions as
// for values.
func (s *Store) mustAwait(sync bool, e keys.Epoch) keys.Epoch {
	if sync && e > s.engine.Durable() {
		return e
	}
	return 0
}

// hasBeyondLimit reports whether there are versions of a key that checkKey refuses. They come from
// a log of another program or of another page size, and are in a memtable or in quarantine. Such
// keys can be read and deleted, and not set.
func (x *Session) hasBeyondLimit(key []byte) bool {
	if len(key) == 0 {
		return false
	}
	internal := keys.Append(nil, keys.SpaceUser, key)
	x.slot.Enter()
	defer x.slot.Leave()
	return x.store.engine.Pin().Find(internal, keys.MaxEpoch).Found()
}

func (s *Store) checkKey(key []byte) error {
	if len(key) == 0 {
		return ErrEmptyKey
	}
	if len(key) > s.options.Limits.KeyBytes {
		return &LimitError{What: "key bytes", Limit: s.options.Limits.KeyBytes, Got: len(key)}
	}
	return nil
}
