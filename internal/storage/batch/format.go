// Package batch defines a write batch: the operations of one commit as bytes, the same in memory
// and in the log.
//
// A body is self-contained and has decisions, not conditions: applying the same bodies in the same
// order gives the same database. Its operations are sorted by internal key and name each key once,
// so that memtable and tree process neighbours with one descent.
//
//	body
//	0        4       8              16           17
//	+--------+-------+--------------+------------+----+----+---
//	| count  | flags | commit time  | origin (1) | op | op | ...
//	+--------+-------+--------------+------------+----+----+---
//
//	op
//	+----------+----------------+-----+------------------+-------+
//	| kind (1) | key len (uvar) | key | value len (uvar) | value |     value parts only for kinds that have one
//	+----------+----------------+-----+------------------+-------+
//
// Commit time and origin are there if flags 1 and 2 say so. Flag 0x80 of the kind says that the value begins
// with a metadata section (see package metadata). Readers refuse other flags and kinds. An empty body (count 0) is a no-op: a reserved epoch
// (commit sequence number) that changes nothing.
//
// The package knows nothing of epochs, files, or the network: a body gets its epoch from the log
// record that contains it.
package batch

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
)

// HeaderSize is the length in bytes of the header of a body without time and origin; HeaderSizeMax of one with both.
const (
	HeaderSize    = 8
	HeaderSizeMax = HeaderSize + timeBytes + 1
)

// OperationOverheadMax is how many bytes an operation takes at most besides its key and value:
// kind, both lengths, keyspace.
const OperationOverheadMax = 1 + 3 + 5 + 1

const (
	flagsOffset = 4

	flagTime   = 1
	flagOrigin = 2
	timeBytes  = 8
)

// Origin says what made a commit.
type Origin uint8

// Origins. A body without one is of OriginClient.
const (
	OriginClient  Origin = 0
	OriginExpiry  Origin = 1
	OriginLease   Origin = 2 // the revocation of a lease
	OriginCleanup Origin = 3 // retention, or the removal of records that are not needed any more
	OriginRestore Origin = 4
	originCount          = 5
)

// Header is what a body says of its commit as a whole.
type Header struct {
	// Time is when the commit was made, in microseconds since 1970 by the writer's clock; zero if it is not known. A
	// later commit may have an earlier time: the time of an epoch is the largest of all epochs up to it.
	Time   uint64
	Origin Origin
}

// size is the length of the encoded header, the count included.
func (h *Header) size() int {
	n := HeaderSize
	if h.Time != 0 {
		n += timeBytes
	}
	if h.Origin != 0 {
		n++
	}
	return n
}

// ErrCorrupt is wrapped by every decoding error.
var ErrCorrupt = errors.New("batch: malformed body")

// Op is one operation. Key is an internal key. Value begins with the metadata of the version if the kind says that it
// has any. They alias the body that they came from.
type Op struct {
	Kind  keys.Kind
	Key   []byte
	Value []byte
	Rest  []byte // what follows Value in a body in pieces (see ReadBody); else nil
}

// StoredBytes is the length of the whole value, with its metadata.
func (o *Op) StoredBytes() int { return len(o.Value) + len(o.Rest) }

// putHeader writes a header that takes the whole of dst.
func putHeader(dst []byte, count int, h Header) {
	flags := uint32(0)
	if h.Time != 0 {
		flags |= flagTime
		binary.LittleEndian.PutUint64(dst[HeaderSize:], h.Time)
	}
	if h.Origin != 0 {
		flags |= flagOrigin
		dst[len(dst)-1] = byte(h.Origin)
	}
	binary.LittleEndian.PutUint32(dst, uint32(count))
	binary.LittleEndian.PutUint32(dst[flagsOffset:], flags)
}

// readHeader reads the header of a body and returns the operations after it.
func readHeader(body []byte) (h Header, count int, ops []byte, err error) {
	if len(body) < HeaderSize {
		return h, 0, nil, fmt.Errorf("%w: %d bytes, header needs %d", ErrCorrupt, len(body), HeaderSize)
	}
	flags := binary.LittleEndian.Uint32(body[flagsOffset:])
	if flags&^(flagTime|flagOrigin) != 0 {
		return h, 0, nil, fmt.Errorf("%w: unknown flags %#x", ErrCorrupt, flags)
	}
	count, ops = int(binary.LittleEndian.Uint32(body)), body[HeaderSize:]
	if flags&flagTime != 0 {
		if len(ops) < timeBytes {
			return h, 0, nil, fmt.Errorf("%w: ends in its commit time", ErrCorrupt)
		}
		h.Time, ops = binary.LittleEndian.Uint64(ops), ops[timeBytes:]
	}
	if flags&flagOrigin != 0 {
		if len(ops) == 0 || ops[0] == 0 || ops[0] >= originCount {
			return h, 0, nil, fmt.Errorf("%w: unknown origin", ErrCorrupt)
		}
		h.Origin, ops = Origin(ops[0]), ops[1:]
	}
	return h, count, ops, nil
}

// HeaderOf is the header of a body.
func HeaderOf(body []byte) (Header, error) {
	h, _, _, err := readHeader(body)
	return h, err
}

// Reader iterates a body. The zero Reader is at the end. A malformed body ends the iteration with
// Err set, whatever its bytes are. The operation that Next has read stays in the Reader, because
// returning it took longer than reading it.
type Reader struct {
	Op
	rest   []byte
	left   int
	count  int
	header Header
	pieces *Body // a body in pieces, which this process has made; else nil
	err    error
}

func kindAt(body []byte, at uint32) keys.Kind { return keys.Kind(body[at]) }

// ReadBody starts reading body. A long value may be in two pieces, Value and Rest.
func (r *Reader) ReadBody(body *Body) error {
	if body.spans == nil {
		return r.Read(body.buf[body.start:])
	}
	r.left, r.count, r.rest, r.pieces, r.err = body.count, body.count, nil, body, nil
	r.header = body.header
	return nil
}

// Read starts reading body.
func (r *Reader) Read(body []byte) error {
	r.left, r.count, r.rest, r.pieces, r.Rest = 0, 0, nil, nil, nil
	if r.header, r.count, r.rest, r.err = readHeader(body); r.err != nil {
		return r.err
	}
	r.left = r.count
	return nil
}

// Header is what the body says of its commit.
func (r *Reader) Header() Header { return r.header }

// Count is the number of operations that the body announces.
func (r *Reader) Count() int { return r.count }

// Err is what ended the iteration early, or nil.
func (r *Reader) Err() error { return r.err }

// Next reads the next operation. It reports false at the end, or on a malformed body (see Err).
func (r *Reader) Next() bool {
	if r.left == 0 {
		if len(r.rest) != 0 && r.err == nil {
			r.err = fmt.Errorf("%w: %d bytes after the last operation", ErrCorrupt, len(r.rest))
		}
		return false
	}
	if r.pieces != nil {
		r.pieces.operation(r.count-r.left, &r.Op)
		r.left--
		return true
	}
	if len(r.rest) == 0 {
		return r.fail("ends before operation %d", r.count-r.left)
	}
	r.Kind = keys.Kind(r.rest[0])
	r.rest = r.rest[1:]
	if !r.Kind.HasValue() && r.Kind != keys.KindDelete {
		return r.fail("unknown kind %#x", byte(r.Kind))
	}
	var ok bool
	if r.Key, ok = r.bytes(); !ok || len(r.Key) == 0 {
		return r.fail("bad key in operation %d", r.count-r.left)
	}
	r.Value = nil
	if r.Kind != keys.KindDelete {
		if r.Value, ok = r.bytes(); !ok || metadata.Check(r.Kind, r.Value) != nil {
			return r.fail("bad value in operation %d", r.count-r.left)
		}
	}
	r.left--
	return true
}

func (r *Reader) bytes() ([]byte, bool) {
	var n uint64
	var w int
	if len(r.rest) > 0 && r.rest[0] < 0x80 { // nearly always, and no call
		n, w = uint64(r.rest[0]), 1
	} else if n, w = binary.Uvarint(r.rest); w <= 0 {
		return nil, false
	}
	if n > uint64(len(r.rest)-w) {
		return nil, false
	}
	b := r.rest[w : w+int(n) : w+int(n)]
	r.rest = r.rest[w+int(n):]
	return b, true
}

func (r *Reader) fail(format string, arg any) bool {
	r.err = fmt.Errorf("%w: "+format, ErrCorrupt, arg)
	r.left, r.rest = 0, nil
	return false
}

// Validate decodes the whole body and checks that its keys ascend strictly.
func Validate(body []byte) error {
	var r Reader
	if err := r.Read(body); err != nil {
		return err
	}
	var last []byte
	for r.Next() {
		if last != nil && string(last) >= string(r.Key) {
			return fmt.Errorf("%w: keys do not ascend", ErrCorrupt)
		}
		last = r.Key
		if _, err := metadata.Read(r.Kind, r.Value); err != nil {
			return fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
	}
	return r.Err()
}
