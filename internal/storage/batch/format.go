// Package batch defines a write batch: the operations of one commit as bytes, the same in memory and in the log.
//
// A body is self-contained and carries decisions, not conditions: applying the same bodies in the same order gives the
// same database. Its operations are sorted by internal key and name each key once, so that memtable and tree take
// them with one descent per run of neighbours.
//
//	body
//	0        4       5          8
//	+--------+-------+----------+----+----+---
//	| count  | flags | reserved | op | op | ...
//	+--------+-------+----------+----+----+---
//
//	op
//	+----------+----------------+-----+------------------+-------+
//	| kind (1) | key len (uvar) | key | value len (uvar) | value |     value parts only for kinds that have one
//	+----------+----------------+-----+------------------+-------+
//
// The kind byte's top bit announces a metadata section, which nothing writes yet: readers refuse it, as they refuse
// unknown kinds and flags. An empty body (count 0) is a no-op: a reserved epoch that did nothing.
//
// The package knows nothing of epochs, files, or the network.
package batch

import (
	"encoding/binary"
	"errors"
	"fmt"

	"epochkv/internal/storage/keys"
)

// HeaderSize is the length of a body's header in bytes.
const HeaderSize = 8

const (
	flagsOffset = 4
	kindMeta    = 0x80 // announces a metadata section behind the kind byte; reserved
)

// ErrCorrupt is wrapped by every decoding error.
var ErrCorrupt = errors.New("batch: malformed body")

// Op is one operation. Key is an internal key. Key and Value alias the body that they came from.
type Op struct {
	Kind  keys.Kind
	Key   []byte
	Value []byte
}

// appendHeader appends a body header for count operations.
func appendHeader(dst []byte, count int) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(count))
	return append(dst, 0, 0, 0, 0)
}

// Reader iterates a body. The zero Reader is at the end. It trusts nothing: a malformed body ends with Err set.
type Reader struct {
	rest  []byte
	left  int
	count int
	err   error
}

// Read starts reading body.
func Read(body []byte) (Reader, error) {
	if len(body) < HeaderSize {
		return Reader{}, fmt.Errorf("%w: %d bytes, header needs %d", ErrCorrupt, len(body), HeaderSize)
	}
	if f := binary.LittleEndian.Uint32(body[flagsOffset:]); f != 0 {
		return Reader{}, fmt.Errorf("%w: unknown flags or reserved bytes %#x", ErrCorrupt, f)
	}
	n := int(binary.LittleEndian.Uint32(body))
	return Reader{rest: body[HeaderSize:], left: n, count: n}, nil
}

// Count is the number of operations that the header announces.
func (r *Reader) Count() int { return r.count }

// Err is what ended the iteration early, or nil.
func (r *Reader) Err() error { return r.err }

// Next returns the next operation, or false at the end or on a malformed body (see Err).
func (r *Reader) Next() (op Op, ok bool) {
	if r.left == 0 {
		if len(r.rest) != 0 && r.err == nil {
			r.err = fmt.Errorf("%w: %d bytes after the last operation", ErrCorrupt, len(r.rest))
		}
		return Op{}, false
	}
	if len(r.rest) == 0 {
		return r.fail("ends before operation %d", r.count-r.left)
	}
	op.Kind = keys.Kind(r.rest[0])
	r.rest = r.rest[1:]
	if op.Kind != keys.KindSet && op.Kind != keys.KindDelete {
		return r.fail("unknown kind %#x", byte(op.Kind))
	}
	if op.Key, ok = r.bytes(); !ok || len(op.Key) == 0 {
		return r.fail("bad key in operation %d", r.count-r.left)
	}
	if op.Kind == keys.KindSet {
		if op.Value, ok = r.bytes(); !ok {
			return r.fail("bad value in operation %d", r.count-r.left)
		}
	}
	r.left--
	return op, true
}

func (r *Reader) bytes() ([]byte, bool) {
	n, w := binary.Uvarint(r.rest)
	if w <= 0 || n > uint64(len(r.rest)-w) {
		return nil, false
	}
	b := r.rest[w : w+int(n) : w+int(n)]
	r.rest = r.rest[w+int(n):]
	return b, true
}

func (r *Reader) fail(format string, arg any) (Op, bool) {
	r.err = fmt.Errorf("%w: "+format, ErrCorrupt, arg)
	r.left, r.rest = 0, nil
	return Op{}, false
}

// Validate decodes the whole body and checks that its keys ascend strictly.
func Validate(body []byte) error {
	r, err := Read(body)
	if err != nil {
		return err
	}
	var last []byte
	for op, ok := r.Next(); ok; op, ok = r.Next() {
		if last != nil && string(last) >= string(op.Key) {
			return fmt.Errorf("%w: keys do not ascend", ErrCorrupt)
		}
		last = op.Key
	}
	return r.Err()
}
