package mvcc

import (
	"bytes"
	"hash/maphash"
	"slices"
	"unsafe"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// overlay is the write set of a transaction: the last operation on each key. It can be searched by
// key and walked in key order. Keys are those of the client. The buffers are reused.
type overlay struct {
	buf        []byte
	large      [][]byte       // values in memory of their own; a span with a negative beginning is one of them, see bytes
	largeBytes int            // of large
	entries    []overlayEntry // in order of first write
	table      []int32        // open addressing, entry index + 1; used above linearMax entries
	order      []int32        // entry indexes by key; the first sorted of them are in order
	sorted     int
	undo       []overlayUndo      // since the first savepoint
	savepoints []overlaySavepoint // savepoints
}

// init makes the first buffers, which share no cache line with those of other sessions (see
// keys.LineBytes).
func (o *overlay) init() {
	o.buf, o.entries, o.order = keys.Scratch(), make([]overlayEntry, 0, linearMax), make([]int32, 0, keys.LineBytes/4)
}

type overlayEntry struct {
	key   span
	value span
	kind  keys.Kind
	level int32 // number of savepoints when the operation was written
}

// overlayUndo restores an entry's former operation. Each entry has at most one per savepoint,
// because a rollback undoes all overwrites since the savepoint together.
type overlayUndo struct {
	entry int32
	level int32
	value span
	kind  keys.Kind
}

// overlaySavepoint is the state to which a rollback returns.
type overlaySavepoint struct{ buf, large, entries, undo int }

// linearMax is the number of entries up to which find compares one by one, without hashing: most
// transactions write few keys.
const linearMax = 16

// overlaySeed prevents clients from choosing keys that collide.
var overlaySeed = maphash.MakeSeed()

// size is the memory of the write set in bytes that the transaction is charged for: everything that
// grows with the client's requests. The capacity of the slices may be up to twice as large.
func (o *overlay) size() int {
	return len(o.buf) + o.largeBytes + entryBytes*len(o.entries) + 4*(len(o.order)+len(o.table)) + undoBytes*len(o.undo) + savepointBytes*len(o.savepoints)
}

// held is the memory of the buffers in bytes, whether they are in use or not.
func (o *overlay) held() int {
	return cap(o.buf) + o.largeBytes + cap(o.large)*largeSliceBytes + entryBytes*cap(o.entries) + 4*(cap(o.order)+cap(o.table)) + undoBytes*cap(o.undo) + savepointBytes*cap(o.savepoints)
}

const (
	entryBytes     = int(unsafe.Sizeof(overlayEntry{}))
	undoBytes      = int(unsafe.Sizeof(overlayUndo{}))
	savepointBytes = int(unsafe.Sizeof(overlaySavepoint{}))

	largeSliceBytes = int(unsafe.Sizeof([]byte{}))
)

func (o *overlay) reset() {
	if o.held() > pooledBytesMax {
		*o = overlay{}
		return
	}
	o.buf, o.entries, o.order, o.sorted = o.buf[:0], o.entries[:0], o.order[:0], 0
	o.undo, o.savepoints, o.table = o.undo[:0], o.savepoints[:0], o.table[:0]
	o.forgetLarge(0)
}

func (o *overlay) count() int { return len(o.entries) }

func (o *overlay) bytes(s span) []byte {
	if s.from < 0 {
		return o.large[-s.from-1]
	}
	return o.buf[s.from:s.to]
}

// forgetLarge drops the large values from a number on.
func (o *overlay) forgetLarge(from int) {
	for _, value := range o.large[from:] {
		o.largeBytes -= len(value)
	}
	clear(o.large[from:])
	o.large = o.large[:from]
}

func (o *overlay) copy(b []byte) span {
	from := len(o.buf)
	o.buf = append(o.buf, b...)
	return span{from, len(o.buf)}
}

// copyStored copies what is stored of a value: its metadata, and the value. A large one has memory of its own, of its size: a buffer that grew with
// large values would be in memory twice meanwhile. One that is alone, and so does not change, is not copied.
func (o *overlay) copyStored(section, value []byte, alone bool) span {
	if n := len(section) + len(value); isAlone(n) {
		if !alone || len(section) > 0 {
			value = append(append(make([]byte, 0, n), section...), value...)
		}
		o.large = append(o.large, value)
		o.largeBytes += n
		return span{-len(o.large), 0}
	}
	from := len(o.buf)
	o.buf = append(append(o.buf, section...), value...)
	return span{from, len(o.buf)}
}

// find returns the entry of key, or -1.
func (o *overlay) find(key []byte) int {
	if len(o.entries) <= linearMax {
		for i := range o.entries {
			if bytes.Equal(o.bytes(o.entries[i].key), key) {
				return i
			}
		}
		return -1
	}
	mask := uint64(len(o.table) - 1)
	for at := maphash.Bytes(overlaySeed, key) & mask; ; at = (at + 1) & mask {
		i := o.table[at] - 1
		if i < 0 {
			return -1
		}
		if bytes.Equal(o.bytes(o.entries[i].key), key) {
			return int(i)
		}
	}
}

// set makes kind and value, with its metadata before it, the last operation on key.
func (o *overlay) set(key, section, value []byte, kind keys.Kind, alone bool) {
	if i := o.find(key); i >= 0 {
		e := &o.entries[i]
		if level := int32(len(o.savepoints)); e.level < level {
			o.undo = append(o.undo, overlayUndo{int32(i), e.level, e.value, e.kind})
			e.level = level
		}
		e.value, e.kind = o.copyStored(section, value, alone), kind
		return
	}
	o.order = append(o.order, int32(len(o.entries)))
	o.entries = append(o.entries, overlayEntry{})
	e := &o.entries[len(o.entries)-1]
	e.key, e.value, e.kind, e.level = o.copy(key), o.copyStored(section, value, alone), kind, int32(len(o.savepoints))
	if len(o.entries) > linearMax {
		o.index()
	}
}

// index puts the newest entry into the table. When the table is used for the first time, or must
// grow, all entries are put into a new one.
func (o *overlay) index() {
	n := len(o.entries)
	if n > linearMax+1 && 2*n <= len(o.table) {
		o.insert(n - 1)
		return
	}
	if 2*n > len(o.table) {
		size := max(4*linearMax, 2*len(o.table))
		o.table = slices.Grow(o.table[:0], size)[:size]
		clear(o.table)
	}
	for i := range o.entries {
		o.insert(i)
	}
}

func (o *overlay) insert(i int) {
	mask := uint64(len(o.table) - 1)
	at := maphash.Bytes(overlaySeed, o.bytes(o.entries[i].key)) & mask
	for o.table[at] != 0 {
		at = (at + 1) & mask
	}
	o.table[at] = int32(i) + 1
}

// insertedMax is how many entries sort puts into their places one by one, which takes less than sorting all.
const insertedMax = 256

// sort makes order complete: all entries, ascending by key. A transaction may scan after each of its writes.
func (o *overlay) sort() {
	byKey := func(a, b int32) int {
		return bytes.Compare(o.bytes(o.entries[a].key), o.bytes(o.entries[b].key))
	}
	if o.sorted == 0 || len(o.order)-o.sorted > insertedMax {
		slices.SortFunc(o.order, byKey)
		o.sorted = len(o.order)
	}
	for ; o.sorted < len(o.order); o.sorted++ {
		added := o.order[o.sorted]
		at, _ := slices.BinarySearchFunc(o.order[:o.sorted], added, byKey)
		copy(o.order[at+1:o.sorted+1], o.order[at:o.sorted])
		o.order[at] = added
	}
}

// within are the indexes of the entries with keys in [lower, upper), in key order. A nil upper is no bound. They are a part of
// order, which set leaves as it is: they are valid until the next call of within, fill, rollback or reset.
func (o *overlay) within(lower, upper []byte) []int32 {
	o.sort()
	place := func(key []byte) int {
		at, _ := slices.BinarySearchFunc(o.order, key, func(i int32, k []byte) int { return bytes.Compare(o.bytes(o.entries[i].key), k) })
		return at
	}
	from, to := place(lower), len(o.order)
	if upper != nil {
		to = max(from, place(upper))
	}
	return o.order[from:to]
}

// fill adds every operation to a batch, in key order.
func (o *overlay) fill(b *batch.Builder) {
	o.sort()
	for _, i := range o.order {
		e := &o.entries[i]
		if e.kind == keys.KindDelete {
			b.Delete(keys.SpaceUser, o.bytes(e.key))
		} else {
			b.SetStoredShared(e.kind, keys.SpaceUser, o.bytes(e.key), o.bytes(e.value))
		}
	}
}

// savepoint sets a savepoint and returns its number, from 1.
func (o *overlay) savepoint() int {
	o.savepoints = append(o.savepoints, overlaySavepoint{len(o.buf), len(o.large), len(o.entries), len(o.undo)})
	return len(o.savepoints)
}

// rollback restores the state of a savepoint and removes later savepoints. The savepoint remains.
func (o *overlay) rollback(savepoint int) {
	m := o.savepoints[savepoint-1]
	for i := len(o.undo) - 1; i >= m.undo; i-- {
		u := o.undo[i]
		e := &o.entries[u.entry]
		e.value, e.kind, e.level = u.value, u.kind, u.level
	}
	o.undo, o.savepoints = shrink(o.undo[:m.undo]), shrink(o.savepoints[:savepoint])
	o.buf, o.entries = shrink(o.buf[:m.buf]), shrink(o.entries[:m.entries])
	o.forgetLarge(m.large)
	o.order, o.sorted = shrink(o.order[:0]), 0
	for i := range o.entries {
		o.order = append(o.order, int32(i))
	}
	o.indexAll()
}

// indexAll makes a new table of the smallest size that fits.
func (o *overlay) indexAll() {
	size := 0
	if n := len(o.entries); n > linearMax {
		for size = 4 * linearMax; size < 2*n; {
			size *= 2
		}
	}
	if size < len(o.table) {
		o.table = nil
		if size > 0 {
			o.table = make([]int32, size)
		}
	}
	clear(o.table)
	if size > 0 {
		for i := range o.entries {
			o.insert(i)
		}
	}
}

// shrink replaces a buffer by a smaller one if a rollback has left little in it: memory that is not
// charged any more must be freed.
func shrink[T any](s []T) []T {
	if cap(s) < 2*len(s)+shrinkMin {
		return s
	}
	return append(make([]T, 0, len(s)+shrinkMin/2), s...)
}

// shrinkMin is the number of elements of a buffer that may be unused.
const shrinkMin = 1024
