package mvcc

import (
	"context"
	"errors"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
)

// Isolation is the isolation level of a transaction.
type Isolation uint8

const (
	// IsolationSnapshot reads at one epoch and lets the first committer of a key win: no lost
	// updates, no dirty, fuzzy or phantom reads; write skew is possible.
	IsolationSnapshot Isolation = iota + 1
	// IsolationSerializable is strictly serializable: it also validates everything that was read.
	IsolationSerializable
)

// Errors of transactions.
var (
	// ErrNoTransaction means that the session has no open transaction.
	ErrNoTransaction = errors.New("mvcc: no transaction is open")
	// ErrReadOnly means a write in a read-only transaction.
	ErrReadOnly = errors.New("mvcc: transaction is read-only")
	// ErrNoSavepoint means that a savepoint does not exist, or was removed by a rollback to an
	// earlier one.
	ErrNoSavepoint = errors.New("mvcc: no such savepoint")
)

// TxnOptions are the options of Begin.
type TxnOptions struct {
	Isolation  Isolation  // IsolationSerializable
	ReadOnly   bool       // never conflicts, and writes no shared memory except its slot
	At         keys.Epoch // read-only: the epoch to read at; 0: the newest
	Durability Durability
}

// Txn is a session's transaction. Its reads see its own writes. It ends with Commit, with Rollback
// or with its session. The session reuses it, so that a retry allocates nothing. It is not for
// concurrent use.
type Txn struct {
	session *Session
	options TxnOptions
	at      keys.Epoch
	open    bool
	own     overlay
	reads   readSet
	write   Write
	await   keys.Epoch // newest SYNC epoch that the transaction read and that was not durable
	cursor  TxnCursor
	old     []byte // values of Invoke
	fresh   []byte
}

// Begin starts the session's transaction. A transaction that is still open is rolled back before.
// The error is *SnapshotGoneError.
func (x *Session) Begin(o TxnOptions) (*Txn, error) {
	t := &x.buffers.txn
	t.Rollback()
	if o.Isolation == 0 {
		o.Isolation = IsolationSerializable
	}
	at, err := x.OpenSnapshot(o.At)
	if err != nil {
		return nil, err
	}
	t.session, t.options, t.at, t.open, t.await = x, o, at, true, 0
	t.reads.reset(at)
	return t, nil
}

// Store is the store of the transaction.
func (t *Txn) Store() *Store { return t.session.store }

// At is the transaction's snapshot.
func (t *Txn) At() keys.Epoch { return t.at }

// Await is the newest epoch that must be durable before the client may see what the transaction has
// read. It is zero if there is none.
func (t *Txn) Await() keys.Epoch { return t.await }

// Visit calls written for each key that the transaction would write, with the lease that its value would have, and read for each
// key and range of keys that the commit validates. A nil upper bound is none.
func (t *Txn) Visit(written func(key []byte, lease uint64), read func(lower, upper []byte, single bool)) {
	for i := range t.own.entries {
		e := &t.own.entries[i]
		f, _ := metadata.Read(e.kind, t.own.bytes(e.value)) // which the transaction has encoded itself
		written(t.own.bytes(e.key), f.Lease)
	}
	for _, p := range t.reads.points {
		read(keys.User(t.reads.key(p)), nil, true)
	}
	for _, r := range t.reads.ranges {
		lower, upper := t.reads.key(r.lower), t.reads.key(r.upper)
		if len(upper) == 1 { // the end of the keyspace
			read(keys.User(lower), nil, false)
			continue
		}
		read(keys.User(lower), keys.User(upper), false)
	}
}

// Size is the memory of the transaction's write set and read set in bytes, overhead included.
func (t *Txn) Size() int { return t.own.size() + t.reads.size() }

// WriteBytes is the part of Size for the write set.
func (t *Txn) WriteBytes() int { return t.own.size() }

// Trim gives up what an invocation has read and made, if that is large: the transaction may be idle for long after it, and Size does not have it.
// What Invoke has returned is not valid any more.
func (t *Txn) Trim() {
	if cap(t.old)+cap(t.fresh) > pausedBytesMax {
		t.old, t.fresh = nil, nil
	}
}

// validated reports whether the commit validates the reads, so that they are added to the read set.
func (t *Txn) validated() bool {
	return t.options.Isolation == IsolationSerializable && !t.options.ReadOnly
}

// Get reads key: the transaction's own write, or else the version at its snapshot. The value is
// appended to dst. The epoch of an own write is 0.
func (t *Txn) Get(dst, key []byte) (v Value, err error) {
	if !t.open {
		return Value{Data: dst}, ErrNoTransaction
	}
	if invariants.Enabled {
		t.session.assertRead(key)
	}
	if t.own.count() > 0 {
		if i := t.own.find(key); i >= 0 {
			e := &t.own.entries[i]
			t.session.section = t.session.section[:0]
			if e.kind == keys.KindDelete {
				return Value{Data: dst, At: t.at}, nil
			}
			stored := t.own.bytes(e.value)
			t.session.keepSection(stored[:metadata.Size(e.kind, stored)])
			return Value{Found: true, Data: append(dst, metadata.Value(e.kind, stored)...), At: t.at}, nil
		}
	}
	if err = t.session.read(&v, dst, key); err != nil {
		return v, err
	}
	t.await = max(t.await, v.Await)
	if t.validated() {
		t.reads.addPoint(t.session.key) // read has put the internal key there
		err = t.checkSize()
	}
	return v, err
}

// Set writes key.
func (t *Txn) Set(key, value []byte) error {
	if err := t.checkValue(value); err != nil {
		return err
	}
	return t.put(key, nil, value, keys.KindSet, false)
}

func (t *Txn) checkValue(value []byte) error {
	if limit := t.session.store.options.Limits.ValueBytes; len(value) > limit {
		return &LimitError{What: "value bytes", Limit: limit, Got: len(value)}
	}
	return nil
}

// Delete deletes key, whether it exists or not.
func (t *Txn) Delete(key []byte) error { return t.put(key, nil, nil, keys.KindDelete, false) }

func (t *Txn) put(key, section, value []byte, kind keys.Kind, alone bool) error {
	switch {
	case !t.open:
		return ErrNoTransaction
	case t.options.ReadOnly:
		return ErrReadOnly
	}
	if err := t.session.store.checkKey(key); err != nil && !(kind == keys.KindDelete && t.session.hasBeyondLimit(key)) {
		return err
	}
	t.own.set(key, section, value, kind, alone)
	return t.checkSize()
}

// checkSize compares the size of the transaction with its limit. A transaction above the limit can
// roll back, or roll back to a savepoint. The latter frees the memory of writes, not of reads.
func (t *Txn) checkSize() error {
	limits := &t.session.store.options.Limits
	if size := t.Size(); size > limits.BatchBytes {
		return &LimitError{What: "transaction bytes", Limit: limits.BatchBytes, Got: size}
	}
	if n := t.own.count(); n > limits.BatchOps {
		return &LimitError{What: "transaction operations", Limit: limits.BatchOps, Got: n}
	}
	return nil
}

// DeleteRange deletes every key in [lower, upper) that the transaction sees. It returns their
// number.
func (t *Txn) DeleteRange(ctx context.Context, lower, upper []byte) (int, error) {
	if t.open && t.options.ReadOnly {
		return 0, ErrReadOnly
	}
	c, err := t.Scan(ScanOptions{Lower: lower, Upper: upper, KeysOnly: true, Context: ctx})
	if err != nil {
		return 0, err
	}
	defer c.Close()
	n, before, admitted := 0, t.Size(), 0
	for c.Next() {
		if err := t.Delete(c.Key()); err != nil {
			return n, err
		}
		if admitted, err = t.session.admitMade(admitted, t.Size()-before); err != nil {
			return n, err
		}
		n++
	}
	return n, c.Err()
}

// Savepoint sets a savepoint after the writes so far and returns its number, from 1. The savepoint
// exists even if the error says that the transaction is too large.
func (t *Txn) Savepoint() (int, error) {
	if !t.open {
		return 0, ErrNoTransaction
	}
	n := t.own.savepoint()
	return n, t.checkSize()
}

// RollbackTo undoes every write since the savepoint and removes later savepoints. The savepoint and
// the read set remain.
func (t *Txn) RollbackTo(savepoint int) error {
	switch {
	case !t.open:
		return ErrNoTransaction
	case savepoint < 1 || savepoint > len(t.own.savepoints):
		return ErrNoSavepoint
	}
	t.cursor.Close()
	t.own.rollback(savepoint)
	return nil
}

// Commit ends the transaction. It returns the epoch of the commit, or of the snapshot if the
// transaction wrote nothing. The caller calls Store.Wait before it acknowledges the commit; for a
// transaction that wrote nothing, it calls Store.AwaitDurable with Await. *ConflictError means that
// the transaction is rolled back and may run again with Begin; the error is valid until the
// session's next call.
func (t *Txn) Commit(ctx context.Context) (keys.Epoch, error) { return t.CommitRequest(ctx, nil) }

// CommitRequest is Commit of a request that is applied at most once; nil is Commit.
func (t *Txn) CommitRequest(ctx context.Context, request *Request) (keys.Epoch, error) {
	if !t.open {
		return 0, ErrNoTransaction
	}
	defer t.Rollback()
	t.cursor.Close()
	if t.own.count() == 0 && request == nil {
		return t.at, nil // in the serial order the transaction is at its snapshot
	}
	w := &t.write
	w.Reset()
	w.Durability = t.options.Durability
	w.snapshot, w.firstWins = t.at, true
	if t.validated() {
		w.reads = &t.reads
	}
	w.Identify(request)
	defer w.Batch.ReleaseShared() // values of own
	t.own.fill(&w.Batch)
	if t.own.count() > 0 {
		return t.session.commit(ctx, w)
	}
	w.checkOnly, w.reads = true, nil // the snapshot is its place in the serial order: only the request is looked up
	_, err := t.session.commit(ctx, w)
	return t.at, err
}

// Discard gives up the writes, the savepoints and the read set of the transaction, which stays open, with their buffers: it is charged for nothing
// more, however long it stays. The caller must not commit it.
func (t *Txn) Discard() {
	t.cursor.Close()
	t.own = overlay{}
	t.reads = readSet{err: t.reads.err} // see reset
	t.reads.reset(t.at)
}

// Rollback ends the transaction and discards its writes. Without a transaction it does nothing.
func (t *Txn) Rollback() {
	if !t.open {
		return
	}
	t.cursor.Close()
	t.open = false
	t.own.reset()
	t.reads.reset(0)
	t.session.CloseSnapshot()
}
