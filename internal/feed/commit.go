package feed

import (
	"bytes"
	"fmt"
	"slices"
	"sort"
	"sync/atomic"
	"unsafe"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/wal"
)

// Commit is a commit as all watches share it. It is never changed, but for what is attached to it.
type Commit struct {
	Epoch  keys.Epoch
	Time   uint64 // of the commit, in microseconds since 1970; zero if it is not known. A later commit may have an earlier time
	Origin batch.Origin
	Loaded *keys.LoadedRange // a bulk load, which has no operations; else nil

	feed     *Feed
	body     []byte
	spans    []span
	large    bool  // its record was larger than a read of the log: see room.go
	borrowed bool  // body and spans belong to a reader that goes on soon: a queue gets a copy
	slab     *slab // of which it is a part; nil if its memory is its own
	attached atomic.Pointer[any]

	// Guarded by Feed.mu.
	size         int64 // of its memory, without a slab
	attachedSize int64 // of that, what is attached
	refs         int   // references in queues
	inRing       bool
}

// span is where an operation is in a body. The value ends it. All operations from it up to alike are sets, or all are deletions.
type span struct {
	kind                         keys.Kind
	key, keyEnd, value, valueEnd uint32
	alike                        uint32
}

const (
	commitBytes = int64(unsafe.Sizeof(Commit{}))
	spanBytes   = int64(unsafe.Sizeof(span{}))
)

// decode decodes the record of a commit, and copies its body unless it may keep it.
func (f *Feed) decode(rec *wal.TailRecord) (*Commit, error) {
	body := rec.Body
	if !rec.Owned {
		body = bytes.Clone(body)
	}
	c := &Commit{feed: f, large: rec.Owned}
	if _, err := c.read(rec.Epoch, body, nil); err != nil {
		return nil, err
	}
	c.size = c.memory()
	return c, nil
}

// read reads the body of a commit. It appends the operations to spans, of which the commit has a part then.
func (c *Commit) read(e keys.Epoch, body []byte, spans []span) ([]span, error) {
	var r batch.Reader
	if err := r.Read(body); err != nil {
		return spans, fmt.Errorf("feed: epoch %d: %w", e, err)
	}
	h, from := r.Header(), len(spans)
	spans = slices.Grow(spans, min(r.Count(), len(body)))
	at := uintptr(unsafe.Pointer(unsafe.SliceData(body)))
	for r.Next() {
		s := span{kind: r.Kind}
		s.key = uint32(uintptr(unsafe.Pointer(unsafe.SliceData(r.Key))) - at)
		s.keyEnd = s.key + uint32(len(r.Key))
		s.value, s.valueEnd = s.keyEnd, s.keyEnd
		if len(r.Value) > 0 {
			s.value = uint32(uintptr(unsafe.Pointer(unsafe.SliceData(r.Value))) - at)
			s.valueEnd = s.value + uint32(len(r.Value))
		}
		spans = append(spans, s)
	}
	if err := r.Err(); err != nil {
		return spans[:from], fmt.Errorf("feed: epoch %d: %w", e, err)
	}
	c.Epoch, c.Time, c.Origin, c.body, c.spans = e, h.Time, h.Origin, body, spans[from:]
	for i := len(c.spans) - 1; i >= 0; i-- {
		one := &c.spans[i]
		if one.alike = uint32(i) + 1; i+1 < len(c.spans) && kindsOf(c.spans[i+1].kind) == kindsOf(one.kind) {
			one.alike = c.spans[i+1].alike
		}
	}
	return spans, nil
}

// kinds are the kinds of the operations.
func (c *Commit) kinds() Kinds {
	if len(c.spans) == 0 {
		return 0
	}
	first := &c.spans[0]
	if int(first.alike) < len(c.spans) {
		return kindOperations
	}
	return kindsOf(first.kind)
}

// memory is what the commit takes. Of a borrowed one that is what a copy takes: the memory of its reader goes on after it.
func (c *Commit) memory() int64 {
	if c.borrowed {
		return commitBytes + int64(len(c.body)) + int64(len(c.spans))*spanBytes
	}
	return commitBytes + int64(cap(c.body)) + int64(cap(c.spans))*spanBytes
}

// own is a copy of a borrowed commit in memory of its own.
func (c *Commit) own() *Commit {
	to := &Commit{}
	c.copyTo(to, bytes.Clone(c.body), slices.Clone(c.spans))
	to.size = to.memory()
	return to
}

func (c *Commit) copyTo(to *Commit, body []byte, spans []span) {
	to.Epoch, to.Time, to.Origin, to.feed, to.body, to.spans = c.Epoch, c.Time, c.Origin, c.feed, body, spans
}

// head is the commit without its operations.
func (c *Commit) head() *Commit {
	return &Commit{Epoch: c.Epoch, Time: c.Time, Origin: c.Origin, feed: c.feed, size: commitBytes}
}

// load is the commit of a bulk load.
func (f *Feed) load(one keys.LoadedRange) *Commit {
	return &Commit{Epoch: one.Epoch, feed: f, Loaded: &one, size: commitBytes + int64(unsafe.Sizeof(one)) + int64(cap(one.Lower)+cap(one.Upper))}
}

// before is the epoch before it: everything up to there comes before it. Bulk loads of which only the last epoch is known are one commit.
func (c *Commit) before() keys.Epoch {
	if c.Loaded != nil {
		return c.Loaded.Since()
	}
	return c.Epoch - 1
}

// Count is the number of its operations.
func (c *Commit) Count() int { return len(c.spans) }

// Operation is one operation; its key is an internal key.
func (c *Commit) Operation(i int) batch.Op {
	s := &c.spans[i]
	op := batch.Op{Kind: s.kind, Key: c.body[s.key:s.keyEnd:s.keyEnd]}
	if s.kind != keys.KindDelete {
		op.Value = c.body[s.value:s.valueEnd:s.valueEnd]
	}
	return op
}

func (c *Commit) key(i int) []byte { return c.body[c.spans[i].key:c.spans[i].keyEnd] }

// bytesOf is the size of the keys and values of an operation.
func (c *Commit) bytesOf(i int) int {
	s := &c.spans[i]
	return int(s.keyEnd-s.key) + int(s.valueEnd-s.value)
}

// search is the index of the first operation, from index on, whose key is not before a key.
func (c *Commit) search(from int, key []byte) int {
	const few = 4 // nearly all commits have no more
	n := len(c.spans)
	for ; from < n && n-from <= few; from++ {
		if bytes.Compare(c.key(from), key) >= 0 {
			return from
		}
	}
	if from == n || bytes.Compare(c.key(n-1), key) < 0 {
		return n
	}
	return c.searchIn(from, n, key)
}

// searchIn is the index of the first operation, from an index on, whose key is not before a key, or to if all of them before to are.
func (c *Commit) searchIn(from, to int, key []byte) int {
	return from + sort.Search(to-from, func(i int) bool { return bytes.Compare(c.key(from+i), key) >= 0 })
}

// Attach leaves something with the commit for all its watches, previous values for instance, unless something is there
// already, and returns what is there. It counts as memory of the feed, for as long as the ring or a queue has the commit: nothing is
// left with a commit that only responses have.
func (c *Commit) Attach(v any, size int64) any {
	f := c.feed
	f.lock()
	defer f.unlock()
	if there := c.attached.Load(); there != nil {
		return *there
	}
	if c.inRing || c.refs > 0 {
		c.attached.Store(&v)
		f.growLocked(c, size)
	}
	return v
}

// detachLocked removes what was left with a commit that neither the ring nor a queue has any more.
func (c *Commit) detachLocked() {
	c.attached.Store(nil)
	c.size, c.attachedSize = c.size-c.attachedSize, 0
}

// Attached is what was left with the commit, or nil.
func (c *Commit) Attached() any {
	if there := c.attached.Load(); there != nil {
		return *there
	}
	return nil
}

// run is a range of the operations of a commit. That of a bulk load is empty. The first operation is wanted, and later ones of another
// kind may not be.
type run struct{ from, to uint32 }

// ref is a reference of a queue. lastRun is set in the end of the last run that its watch wants of the commit.
type ref struct {
	commit *Commit
	run
}

const (
	lastRun  = 1 << 31
	refBytes = int64(unsafe.Sizeof(ref{}))
)

func (r *ref) end() uint32  { return r.to &^ lastRun }
func (r *ref) isLast() bool { return r.to&lastRun != 0 }

// firstBytes is the size of the key and value of the first operation of the reference.
func (r *ref) firstBytes() int {
	if r.commit.Loaded != nil {
		return 0
	}
	return r.commit.bytesOf(int(r.from))
}

// bytes is about how much of the commit the reference is for.
func (r *ref) bytes() int64 {
	if r.commit.Loaded != nil {
		return r.commit.size
	}
	return int64(r.commit.spans[r.end()-1].valueEnd - r.commit.spans[r.from].key)
}
