package batch

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
)

// ErrDuplicateKey means that one batch names a key twice.
var ErrDuplicateKey = errors.New("batch: key named twice")

// ErrReleased means that a batch is used again although its shared values were released.
var ErrReleased = errors.New("batch: the shared values were released")

// DuplicateKeyError names the key (without its keyspace byte) that a batch holds twice. It matches
// ErrDuplicateKey.
type DuplicateKeyError struct{ Key []byte }

func (e *DuplicateKeyError) Error() string {
	return fmt.Sprintf("%v: %s", ErrDuplicateKey, keys.Quote(e.Key))
}

// Unwrap makes the error match ErrDuplicateKey.
func (e *DuplicateKeyError) Unwrap() error { return ErrDuplicateKey }

// Builder collects operations and returns a sorted body. It keeps its buffers across Reset, so that
// a pooled builder allocates nothing in the steady state. The zero Builder is ready.
type Builder struct {
	buf      []byte   // room for the longest header, then operations in the order in which they came
	spans    []opSpan // where each operation is in buf; in order of the calls until Finish sorts them
	shared   [][]byte // values of SetShared that are not in buf
	body     Body     // what Finish returns
	sorter   keys.Sorter
	header   Header
	unsorted bool
	valueMax int // longest value added
	payload  int // bytes of the user's keys and values
	outside  int // bytes of the values that are not in buf
	sets     int // operations that are not deletions
	records  int // operations of SetRecord and DeleteRecord
	withMeta int // operations with metadata
}

// The first buffers share no cache line with those of other builders (see keys.LineBytes).
const (
	bufBytesMin = 2 * keys.LineBytes
	spansMin    = keys.LineBytes / spanBytes
)

// opSpan is where an operation is in buf, which is shorter than 4 GiB, as records are. Its value ends it, and goes on in the shared value of that number,
// from 1 on. A commit has up to three times as many spans as a request has operations.
type opSpan struct{ opStart, keyStart, keyEnd, valueStart, opEnd, shared uint32 }

// sharedBytesMin is the length from which SetShared does not copy a value. Below it, a copy costs less than another
// piece of memory. In a batch of more than hugeBytes it is hugeSharedBytesMin: the copies of many values would be in memory beside them.
const (
	sharedBytesMin     = 512
	hugeSharedBytesMin = 64
	hugeBytes          = 1 << 20
)

// shares reports whether SetShared does not copy the next value, of n bytes.
func (b *Builder) shares(n int) bool {
	return n >= sharedBytesMin || n >= hugeSharedBytesMin && len(b.buf) > hugeBytes
}

// OperationBytesMax is what an operation takes in a body beside its internal key and its value: its kind, and both lengths.
const OperationBytesMax = 1 + 2*binary.MaxVarintLen32

const (
	spanBytes  = int(unsafe.Sizeof(opSpan{}))
	sliceBytes = int(unsafe.Sizeof([]byte(nil)))
)

// Reset empties the builder. Buffers larger than keepBytesMax are given back to the runtime.
func (b *Builder) Reset() {
	const keepBytesMax = 8 << 20 // a rare huge batch must not stay in memory with every pooled session
	if cap(b.buf) > keepBytesMax {
		b.buf = nil
	}
	if cap(b.spans)*spanBytes > keepBytesMax {
		b.spans, b.sorter = nil, keys.Sorter{}
	}
	b.ReleaseShared()
	b.buf, b.spans, b.shared, b.unsorted = b.buf[:0], b.spans[:0], b.shared[:0], false
	b.valueMax, b.payload, b.outside, b.sets, b.records, b.withMeta, b.header = 0, 0, 0, 0, 0, 0, Header{}
	b.body = Body{} // which has the buffers, too
}

// ReleaseShared drops the references to the values of SetShared, after which their owner may change them. If there are
// any, the body is not valid any more, and Finish returns ErrReleased until Reset.
func (b *Builder) ReleaseShared() { clear(b.shared) }

// MemoryBytes is about how many bytes of memory the builder occupies.
func (b *Builder) MemoryBytes() int {
	return cap(b.buf) + cap(b.spans)*spanBytes + cap(b.shared)*sliceBytes
}

// Room is what operations will take in a batch.
type Room struct{ Operations, Bytes, shared, perhaps int }

// AddValue adds a value of n bytes for SetShared.
func (r *Room) AddValue(n int) {
	switch {
	case n < hugeSharedBytesMin:
		r.Bytes += n
	case n < sharedBytesMin:
		r.perhaps += n
		r.shared++
	default:
		r.shared++
	}
}

// Reserve makes room for the operations that the caller is going to add. Room that grew would be
// allocated five times over, and be in memory twice while it is copied.
func (b *Builder) Reserve(r Room) {
	bytes := r.Bytes + min(r.perhaps, hugeBytes+sharedBytesMin) + HeaderSizeMax
	b.spans, b.shared, b.buf = slices.Grow(b.spans, r.Operations), slices.Grow(b.shared, r.shared), slices.Grow(b.buf, bytes)
}

// SetHeader says what the body tells of its commit. It is called before Finish.
func (b *Builder) SetHeader(h Header) { b.header = h }

// Set adds "user key in space s becomes value". Key and value are copied.
func (b *Builder) Set(s keys.Space, user, value []byte) {
	b.add(keys.KindSet, s, user, nil, value, false)
}

// SetShared is Set without a copy of a long value, which must not change until Reset or ReleaseShared. A batch of long
// values is larger than the processor's caches, so each copy of it costs as much as writing it to the log.
func (b *Builder) SetShared(s keys.Space, user, value []byte) {
	b.add(keys.KindSet, s, user, nil, value, b.shares(len(value)))
}

// SetStored adds what is stored of a version: its kind, and the value, which begins with metadata if the kind says so. A
// deletion has no value. What the client is charged for does not include the metadata.
func (b *Builder) SetStored(kind keys.Kind, s keys.Space, user, stored []byte) {
	b.setStored(kind, s, user, stored, false)
}

// SetStoredShared is SetStored with the rules of SetShared.
func (b *Builder) SetStoredShared(kind keys.Kind, s keys.Space, user, stored []byte) {
	b.setStored(kind, s, user, stored, b.shares(len(stored)))
}

func (b *Builder) setStored(kind keys.Kind, s keys.Space, user, stored []byte, share bool) {
	section := metadata.Size(kind, stored)
	b.add(kind, s, user, stored[:section], stored[section:], share)
}

// SetMetadataShared is SetShared of a value with metadata.
func (b *Builder) SetMetadataShared(s keys.Space, user []byte, f *metadata.Fields, value []byte) {
	var room [metadata.SectionBytesMax]byte
	b.add(keys.KindSetMetadata, s, user, f.Append(room[:0]), value, b.shares(len(value)))
}

// WithMetadata is the number of operations with metadata.
func (b *Builder) WithMetadata() int { return b.withMeta }

// HasMetadata reports whether operation i, in the order of Key, has metadata.
func (b *Builder) HasMetadata(i int) bool { return kindAt(b.buf, b.spans[i].opStart).HasMetadata() }

// Metadata is the metadata of operation i, in the order of Key; without any, it is zero.
func (b *Builder) Metadata(i int) (metadata.Fields, error) {
	m := &b.spans[i]
	kind := kindAt(b.buf, m.opStart)
	if !kind.HasMetadata() {
		return metadata.Fields{}, nil
	}
	return metadata.Read(kind, b.buf[m.valueStart:m.opEnd])
}

// Delete adds a tombstone for user key in space s.
func (b *Builder) Delete(s keys.Space, user []byte) { b.add(keys.KindDelete, s, user, nil, nil, false) }

// SetRecord is Set for a record that the store itself adds to a client's commit. What the client is charged for does not
// include it: PayloadBytes, ValueBytesMax, Operations and OnlyDeletes.
func (b *Builder) SetRecord(s keys.Space, user, value []byte) {
	payload, longest, sets := b.payload, b.valueMax, b.sets
	b.add(keys.KindSet, s, user, nil, value, false)
	b.payload, b.valueMax, b.sets = payload, longest, sets
	b.records++
}

// DeleteRecord is Delete of such a record.
func (b *Builder) DeleteRecord(s keys.Space, user []byte) {
	payload := b.payload
	b.add(keys.KindDelete, s, user, nil, nil, false)
	b.payload = payload
	b.records++
}

// OnlyDeletes reports whether all operations of the batch are deletions.
func (b *Builder) OnlyDeletes() bool { return b.sets == 0 }

// Operations is the number of operations added, without those of SetRecord and DeleteRecord.
func (b *Builder) Operations() int { return len(b.spans) - b.records }

// Count is the number of all operations added.
func (b *Builder) Count() int { return len(b.spans) }

// Size is the length of the body in bytes.
func (b *Builder) Size() int {
	return b.header.size() + max(len(b.buf)-HeaderSizeMax, 0) + b.outside
}

// add adds an operation. What is stored is section and value; only the value can be shared.
func (b *Builder) add(kind keys.Kind, s keys.Space, user, section, value []byte, share bool) {
	if len(b.buf) == 0 {
		if b.buf == nil {
			b.spans = make([]opSpan, 0, spansMin)
		}
		b.reserveHeader()
	}
	if kind != keys.KindDelete {
		b.sets++
	}
	b.spans = append(b.spans, opSpan{})
	m := &b.spans[len(b.spans)-1]
	m.opStart = uint32(len(b.buf))
	b.buf = append(b.buf, byte(kind))
	b.buf = binary.AppendUvarint(b.buf, uint64(len(user)+1))
	m.keyStart = uint32(len(b.buf))
	b.buf = keys.Append(b.buf, s, user)
	m.keyEnd = uint32(len(b.buf))
	if kind != keys.KindDelete {
		b.buf = binary.AppendUvarint(b.buf, uint64(len(section)+len(value)))
		m.valueStart = uint32(len(b.buf))
		if len(section) > 0 {
			b.buf = append(b.buf, section...)
			b.withMeta++
		}
		if share {
			b.shared = append(b.shared, value)
			m.shared = uint32(len(b.shared))
			b.outside += len(value)
		} else {
			b.buf = append(b.buf, value...)
		}
	}
	m.opEnd = uint32(len(b.buf))
	if n := len(b.spans) - 1; n > 0 && !b.unsorted {
		b.unsorted = bytes.Compare(b.Key(n-1), b.Key(n)) >= 0
	}
	b.valueMax = max(b.valueMax, len(value))
	b.payload += len(user) + len(value)
}

// reserveHeader begins the buffer with room for the longest header. Finish writes the header at the end of the room, so that
// it may be as long as what the commit turns out to have.
func (b *Builder) reserveHeader() {
	if b.buf == nil {
		b.buf = make([]byte, 0, bufBytesMin)
	}
	b.buf = b.buf[:HeaderSizeMax]
}

// PayloadBytes is the size of the keys and values added, as the client counts them: without the
// encoding and the keyspace.
func (b *Builder) PayloadBytes() int { return b.payload }

// ValueBytesMax is the length of the longest value added.
func (b *Builder) ValueBytesMax() int { return b.valueMax }

// Key is the internal key of operation i; after Finish, in sorted order. It aliases the builder's
// buffer.
func (b *Builder) Key(i int) []byte {
	m := &b.spans[i]
	return b.buf[m.keyStart:m.keyEnd]
}

// Deletes reports whether operation i, in the order of Key, is a deletion.
func (b *Builder) Deletes(i int) bool { return kindAt(b.buf, b.spans[i].opStart) == keys.KindDelete }

// Finish sorts the operations and returns the body, which aliases the builder and is valid until
// Reset. A key named twice is a *DuplicateKeyError.
func (b *Builder) Finish() (*Body, error) {
	if len(b.shared) > 0 && b.shared[0] == nil {
		return nil, ErrReleased
	}
	if len(b.buf) == 0 {
		b.reserveHeader()
	}
	if b.unsorted {
		if err := b.sort(); err != nil {
			return nil, err
		}
	}
	start := HeaderSizeMax - b.header.size()
	putHeader(b.buf[start:HeaderSizeMax], len(b.spans), b.header)
	b.body = Body{buf: b.buf, start: start, header: b.header, count: len(b.spans), size: b.Size(), onlyDeletes: b.OnlyDeletes()}
	if b.unsorted || b.outside > 0 {
		b.body.spans, b.body.shared = b.spans, b.shared
	}
	return &b.body, nil
}

// sort brings the spans into the order of their keys, where they are: a second array would be the most that a commit of many small operations has. The
// operations stay where they are.
func (b *Builder) sort() error {
	order := b.sorter.Sort(len(b.spans), b.Key)
	for i := range order { // one cycle of the permutation after the other; a place that is filled has its own index
		first, to := b.spans[i], i
		for from := int(order[to]); from != i; from = int(order[to]) {
			b.spans[to], order[to] = b.spans[from], uint64(to)
			to = from
		}
		b.spans[to], order[to] = first, uint64(to)
	}
	for i := 1; i < len(b.spans); i++ {
		if bytes.Equal(b.Key(i-1), b.Key(i)) {
			return &DuplicateKeyError{Key: bytes.Clone(keys.User(b.Key(i)))}
		}
	}
	return nil
}
