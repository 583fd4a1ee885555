package mvcc

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"strconv"
	"unsafe"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// InvokeKind names a read-modify-write operation.
type InvokeKind uint8

// The operations. An integer is the decimal text of an int64. For Add a missing key is 0.
const (
	InvokeAdd          InvokeKind = iota + 1 // value += Delta, within [Min, Max]
	InvokeAppend                             // value = value + Operand; a missing key is empty
	InvokeMin                                // value = min(value, Delta); a missing key becomes Delta
	InvokeMax                                // value = max(value, Delta); a missing key becomes Delta
	InvokeCompareSet                         // value = Operand if it equals Expect
	InvokePutIfAbsent                        // value = Operand if the key is missing
	InvokeGetAndSet                          // value = Operand
	InvokeGetAndDelete                       // the key is deleted
	InvokeTouch                              // the deadline = ExpiresAt, if the key exists
	InvokePersist                            // no deadline, if the key has one
)

// An operation that computes the new value from the old one (Add, Append, Min, Max, Touch, Persist) keeps the metadata of
// the key. One that replaces the value does not, as a put. ExpiresAt sets the deadline in both cases.

// Invoke is one read-modify-write of one key.
type Invoke struct {
	Kind    InvokeKind
	Bounded bool // InvokeAdd: the result must lie within [Min, Max]

	// What of the outcome the caller keeps. New values that it keeps are admitted as those that are read.
	ReturnOld, ReturnNew bool

	Key     []byte
	Operand []byte // must not change as long as an outcome is used, or the transaction is open
	Expect  []byte // InvokeCompareSet
	Delta   int64  // InvokeAdd, InvokeMin, InvokeMax
	Min     int64
	Max     int64

	ExpiresAt uint64 // the key's new deadline, in milliseconds since 1970; zero: as said above
}

// outcomeBytes is what an outcome takes in an answer beside its values, at most.
const outcomeBytes = 48

// Invoked is the outcome of one operation. Old and New are in buffers of the session or of the
// transaction, or New is the operand, and valid until its next call. InvokeAll leaves a large Old out unless ReturnOld asks for it.
type Invoked struct {
	Applied  bool // false: a comparison failed, and the key is as it was
	OldFound bool
	NewFound bool

	oldAlone, newAlone bool // the value is in memory of its own, see place, or is a large operand

	Old, New  []byte
	ExpiresAt uint64     // the deadline of New
	OldEpoch  keys.Epoch // of the commit that wrote Old, also if the operation is not applied; zero for a transaction's own write
}

// TakeOld is Old for a caller that keeps it: a copy, unless nothing changes it.
func (o *Invoked) TakeOld() []byte { return take(o.Old, o.oldAlone) }

// TakeNew is TakeOld for New.
func (o *Invoked) TakeNew() []byte { return take(o.New, o.newAlone) }

func take(value []byte, alone bool) []byte {
	if alone {
		return value
	}
	return append([]byte(nil), value...)
}

// TypeError means that the operation does not apply to the key's value, or that the result is out
// of bounds. Nothing was written.
type TypeError struct {
	Index  int // position in the request
	Key    []byte
	Reason string
}

func (e *TypeError) Error() string {
	return fmt.Sprintf("mvcc: operation %d on %s: %s", e.Index, keys.Quote(e.Key), e.Reason)
}

// apply computes the outcome of the operation on a key's value with its metadata, and the metadata that it leaves. A new value is the operand, or the old value, or in a place of buf.
func (op *Invoke) apply(index int, old []byte, found, alone bool, had metadata.Fields, buf *[]byte) (out Invoked, now metadata.Fields, err error) {
	out = Invoked{Applied: true, OldFound: found, NewFound: true, Old: old, New: op.Operand, oldAlone: alone, newAlone: op.isAlone()}
	switch op.Kind {
	case InvokeTouch:
		out.Applied, out.New, out.newAlone = found, old, alone
	case InvokePersist:
		out.Applied, out.New, out.newAlone = found && had.ExpiresAt != 0, old, alone
	case InvokeAdd, InvokeMin, InvokeMax:
		n, reason := op.number(old, found)
		if reason != "" {
			return out, had, &TypeError{Index: index, Key: bytes.Clone(op.Key), Reason: reason}
		}
		out.New, out.newAlone = strconv.AppendInt(place(buf, integerBytesMax), n, 10), false
	case InvokeAppend:
		size := len(old) + len(op.Operand)
		out.New, out.newAlone = append(append(place(buf, size), old...), op.Operand...), isAlone(size)
	case InvokeCompareSet:
		out.Applied = found && bytes.Equal(old, op.Expect)
	case InvokePutIfAbsent:
		out.Applied = !found
	case InvokeGetAndSet:
	case InvokeGetAndDelete:
		out.NewFound, out.New = false, nil
	default:
		return out, had, &TypeError{Index: index, Key: bytes.Clone(op.Key), Reason: "unknown operation"}
	}
	if !out.Applied {
		out.New, out.NewFound, out.ExpiresAt, out.newAlone = old, found, had.ExpiresAt, alone
		return out, had, nil
	}
	now = op.metadata(had)
	out.ExpiresAt = now.ExpiresAt
	return out, now, nil
}

// integerBytesMax is the longest text of an int64.
const integerBytesMax = 20

// place is where a value of n bytes comes: in buf, which never moves, or, if the value is large, in memory of its own, which is not used again.
// A buffer that grew with the values would be copied, and be in memory twice meanwhile.
func place(buf *[]byte, n int) []byte {
	const least, most = 256, 1 << 20
	if isAlone(n) {
		return make([]byte, 0, n)
	}
	at := len(*buf)
	if n > cap(*buf)-at {
		*buf, at = make([]byte, 0, max(n, min(2*cap(*buf), most), least)), 0
	}
	*buf = (*buf)[:at+n]
	return (*buf)[at : at : at+n]
}

// isAlone reports whether place takes memory of its own for a value of n bytes.
func isAlone(n int) bool { return n >= largeValueMin }

// isAlone reports whether the operand may be kept in place of a copy: its memory has little more than its bytes. A decoder that meets a field twice
// leaves the shorter value in the memory of the longer one.
func (op *Invoke) isAlone() bool { return isAlone(len(op.Operand)) && op.hasLittleMore() }

func (op *Invoke) hasLittleMore() bool { return cap(op.Operand)-len(op.Operand) <= len(op.Operand)/8 }

// writtenAgain is how much of the old value the new one has, which the request has not.
func (op *Invoke) writtenAgain(old []byte) int {
	switch op.Kind {
	case InvokeAppend, InvokeTouch, InvokePersist:
		return len(old)
	}
	return 0
}

// keptBytes is how much of a new value the caller keeps, beside the old value, which was admitted when it was read.
func (op *Invoke) keptBytes(out *Invoked) int {
	isOld := !out.Applied || op.Kind == InvokeTouch || op.Kind == InvokePersist
	if !op.ReturnNew || isOld && !op.ReturnOld {
		return 0
	}
	return len(out.New)
}

// returnedBytes is how much of the values the caller keeps.
func (op *Invoke) returnedBytes(out *Invoked) (n int) {
	if op.ReturnOld {
		n += len(out.Old)
	}
	if op.ReturnNew {
		n += len(out.New)
	}
	return n
}

// metadata is the metadata that an operation leaves.
func (op *Invoke) metadata(had metadata.Fields) metadata.Fields {
	switch op.Kind {
	case InvokeGetAndDelete:
		return metadata.Fields{}
	case InvokeCompareSet, InvokePutIfAbsent, InvokeGetAndSet:
		had = metadata.Fields{}
	}
	if op.ExpiresAt != 0 || op.Kind == InvokePersist {
		had.ExpiresAt = op.ExpiresAt
	}
	return had
}

// number computes the integer operations. If there is no result, it returns the reason.
func (op *Invoke) number(old []byte, found bool) (n int64, reason string) {
	if found {
		var err error
		if n, err = strconv.ParseInt(string(old), 10, 64); err != nil {
			return 0, "the value is not a decimal integer of 64 bits"
		}
	}
	switch op.Kind {
	case InvokeMin:
		if !found {
			return op.Delta, ""
		}
		return min(n, op.Delta), ""
	case InvokeMax:
		if !found {
			return op.Delta, ""
		}
		return max(n, op.Delta), ""
	}
	if op.Delta > 0 && n > math.MaxInt64-op.Delta || op.Delta < 0 && n < math.MinInt64-op.Delta {
		return 0, "the sum exceeds 64 bits"
	}
	n += op.Delta
	if op.Bounded && (n < op.Min || n > op.Max) {
		return 0, fmt.Sprintf("the sum %d is outside [%d, %d]", n, op.Min, op.Max)
	}
	return n, ""
}

// InvokeAll applies all operations in one commit. It reads and writes while it holds the latches of
// the keys, so it never conflicts. The keys must be distinct. out must be as long as ops. The epoch
// is zero if nothing was written.
//
// After an error (*TypeError, or one of Commit) nothing has changed. Await returns the epoch that
// the outcome reveals.
func (x *Session) InvokeAll(ctx context.Context, ops []Invoke, conditions []Condition, d Durability, out []Invoked) (keys.Epoch, error) {
	return x.InvokeRequest(ctx, nil, ops, conditions, d, out)
}

// InvokeRequest is InvokeAll of a request that is applied at most once; its Result is called when out is complete. Nil is
// InvokeAll.
func (x *Session) InvokeRequest(
	ctx context.Context, request *Request, ops []Invoke, conditions []Condition, d Durability, out []Invoked,
) (keys.Epoch, error) {
	w := &x.buffers.ranged.write
	w.Reset()
	defer func() { // a session that is pooled keeps nothing of the request
		w.Reset()
		x.buffers.forgetAlone()
	}()
	w.Conditions, w.Durability = append(w.Conditions, conditions...), d
	w.ops, w.outcomes = ops, out
	room := x.store.options.Limits.roomOf(ops)
	if err := room.checkRequest(ops); err != nil {
		return 0, err
	}
	w.reserve(false)
	w.setRequest(request)
	for i := range ops {
		if err := x.store.checkKey(ops[i].Key); err != nil {
			return 0, err
		}
		w.Batch.Delete(keys.SpaceUser, ops[i].Key) // a placeholder for limits and latches, which compute replaces
	}
	return x.commit(ctx, w)
}

// reserve makes room in the batch for many operations of an InvokeAll, with their operands and records of the expiry queue or without.
func (w *Write) reserve(withRecords bool) {
	if len(w.ops) < readBeforeMin {
		return
	}
	room := batch.Room{Operations: len(w.ops)}
	for i := range w.ops {
		internal := batch.OperationBytesMax + 1 + len(w.ops[i].Key)
		if room.Bytes += internal; !withRecords {
			continue
		}
		if w.ops[i].ExpiresAt != 0 {
			room.Bytes += metadata.DeadlineBytesMax
		}
		records := w.ops[i].queueRecordsMax()
		room.AddValue(len(w.ops[i].Operand))
		room.Operations, room.Bytes = room.Operations+records, room.Bytes+records*(internal+keys.OwnedBytes)
	}
	w.Batch.Reserve(room)
}

// applyAll computes every outcome from the newest versions and fills the batch. The limit of a
// batch also bounds the values that it reads: a request of many short keys must not read the whole
// store into memory. It bounds those that the caller keeps, too, but for those of one operation. What
// it reads, and what it writes, is bounded together with its operations: see invokeRoom.
func (x *Session) applyAll(ctx context.Context, ops []Invoke, w *Write, out []Invoked) error {
	w.Batch.Reset()
	w.reserve(true)
	room := x.store.options.Limits.roomOf(ops)
	buf, read, written, returned, made, admitted := x.buffers.invoked, x.buffers.keptValueBytes(), 0, 0, 0, 0
	if len(x.buffers.before) > 0 {
		buf = nil
	}
	for i := range ops {
		if i%checkContextEvery == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if invariants.Enabled {
			x.assertRead(ops[i].Key)
		}
		x.key = keys.Append(x.key[:0], keys.SpaceUser, ops[i].Key)
		old, found, epoch, kept := x.recall(i)
		if !kept {
			if i < len(x.buffers.before) { // it has changed since, or was not kept
				read -= x.buffers.valueBytes(&x.buffers.before[i])
			}
			var err error
			if old, found, epoch, err = x.newestValue(&buf, read, &room); err != nil {
				return err
			}
			if err = x.admitSmall(len(old)); err != nil {
				return err
			}
			read += len(old)
		}
		had, err := x.Metadata()
		if err != nil {
			return ofKey(err, x.key)
		}
		made += ops[i].writtenAgain(old)
		if admitted, err = x.admitMade(admitted, made); err != nil {
			return err
		}
		var now metadata.Fields
		if out[i], now, err = ops[i].apply(i, old, found, isAlone(len(old)), had, &buf); err != nil {
			return err
		}
		out[i].OldEpoch = epoch
		if out[i].oldAlone && !ops[i].ReturnOld {
			out[i].Old = nil // so that of many, for which there may be large new ones, one is in memory
		}
		if returned += ops[i].returnedBytes(&out[i]); i > 0 && returned > x.store.options.Limits.BatchBytes {
			return &LimitError{What: "batch bytes", Limit: x.store.options.Limits.BatchBytes, Got: returned}
		}
		if err := x.admitKept(outcomeBytes + ops[i].keptBytes(&out[i])); err != nil {
			return err
		}
		switch {
		case !out[i].Applied:
			continue
		case out[i].NewFound:
			written += len(out[i].New)
			if err := room.check(written); err != nil {
				return err
			}
			w.SetWithMetadata(ops[i].Key, out[i].New, &now)
		default:
			w.Delete(ops[i].Key)
		}
		x.requeue(w, had.ExpiresAt, now.ExpiresAt)
	}
	w.derived.queued = true
	switch {
	case len(x.buffers.before) == 0: // or it has what recall finds
		x.buffers.invoked = buf[:0]
	case cap(x.buffers.invoked) > pooledBytesMax && 2*returned >= cap(x.buffers.invoked):
		x.giveInvoked(ops, out)
	}
	if len(x.buffers.before) > pooledBytesMax/int(unsafe.Sizeof(readVersion{})) {
		x.buffers.before = nil // the session would not keep it, and the log buffer and the memtable come now
	}
	if w.request != nil && w.Batch.Count() > 0 {
		w.Identify(w.request)
	}
	return nil
}

// giveInvoked leaves the values of readBefore to the outcomes, whose caller keeps most of them: the session would not keep so large a buffer, and many small copies
// would be in memory beside it. The operands are left to them, too.
func (x *Session) giveInvoked(ops []Invoke, out []Invoked) {
	x.buffers.invoked = nil
	for i := range out {
		o, op := &out[i], &ops[i]
		o.oldAlone = true
		switch isOld := !o.Applied || op.Kind == InvokeTouch || op.Kind == InvokePersist; op.Kind {
		case InvokeCompareSet, InvokePutIfAbsent, InvokeGetAndSet:
			o.newAlone = isOld || op.hasLittleMore()
		default:
			o.newAlone = o.newAlone || isOld
		}
	}
}

// newestValue reads the newest version of the key in x.key into a place of buf. Its metadata is in Metadata. The
// caller passes the number of bytes of values that were read before, and the room for all of them.
func (x *Session) newestValue(buf *[]byte, read int, room *invokeRoom) (value []byte, found bool, epoch keys.Epoch, err error) {
	x.section = x.section[:0]
	x.slot.Enter()
	defer x.slot.Leave()
	v, ok, err := x.reader.Newest(x.key)
	if err != nil || !ok {
		return nil, false, 0, err
	}
	x.reveals(v.Sync, v.Epoch)
	if !v.Kind.HasValue() {
		return nil, false, 0, nil
	}
	x.keepSection(v.Section())
	if read > 0 {
		if err := room.check(read + v.Size()); err != nil {
			return nil, false, 0, err
		}
	}
	if err := x.admitted(v.Size()); err != nil {
		return nil, false, 0, err
	}
	value, err = x.reader.AppendValue(place(buf, v.Size()), v)
	return value, true, v.Epoch, err
}

// Invoke applies one operation inside the transaction.
func (t *Txn) Invoke(op *Invoke) (Invoked, error) {
	if t.open && t.options.ReadOnly {
		return Invoked{}, ErrReadOnly
	}
	v, err := t.Get(t.old[:0], op.Key)
	if err != nil {
		return Invoked{}, err
	}
	t.old = v.Data
	had, err := t.Metadata()
	if err != nil {
		return Invoked{}, err
	}
	t.fresh = t.fresh[:0]
	out, now, err := op.apply(0, v.Data, v.Found, false, had, &t.fresh)
	out.OldEpoch = v.Epoch
	if err == nil {
		err = t.session.admitted(op.keptBytes(&out))
	}
	if err != nil || !out.Applied {
		return out, err
	}
	if out.NewFound {
		return out, t.setWithMetadata(op.Key, out.New, &now, out.newAlone)
	}
	return out, t.Delete(op.Key)
}
