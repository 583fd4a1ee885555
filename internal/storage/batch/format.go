// Package batch defines a write batch: the operations of one commit as bytes, the same in memory
// and in the log.
//
// A body is self-contained and has decisions, not conditions: applying the same bodies in the same
// order gives the same database. Its operations are sorted by internal key and name each key once,
// so that memtable and tree process neighbours with one descent.
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
// The top bit of the kind byte announces a metadata section. Nothing writes one yet; readers refuse
// it, as they refuse unknown kinds and flags. An empty body (count 0) is a no-op: a reserved epoch
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
)

// HeaderSize is the length of a body's header in bytes.
const HeaderSize = 8

// OperationOverheadMax is how many bytes an operation takes at most besides its key and value:
// kind, both lengths, keyspace.
const OperationOverheadMax = 1 + 3 + 5 + 1

const (
	flagsOffset = 4
	kindMeta    = 0x80 // announces a metadata section after the kind byte; reserved
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

// Reader iterates a body. The zero Reader is at the end. A malformed body ends the iteration with
// Err set, whatever its bytes are. The operation that Next has read stays in the Reader, because
// returning it took longer than reading it.
type Reader struct {
	Op
	rest   []byte
	left   int
	count  int
	pieces *Body // a body in pieces, which this process has made; else nil
	err    error
}

func kindAt(body []byte, at int) keys.Kind { return keys.Kind(body[at]) }

// ReadBody starts reading body.
func (r *Reader) ReadBody(body *Body) error {
	if body.spans == nil {
		return r.Read(body.buf)
	}
	r.left, r.count, r.rest, r.pieces, r.err = body.count, body.count, nil, body, nil
	return nil
}

// Read starts reading body.
func (r *Reader) Read(body []byte) error {
	r.left, r.count, r.pieces, r.err = 0, 0, nil, nil
	if len(body) < HeaderSize {
		return fmt.Errorf("%w: %d bytes, header needs %d", ErrCorrupt, len(body), HeaderSize)
	}
	if f := binary.LittleEndian.Uint32(body[flagsOffset:]); f != 0 {
		return fmt.Errorf("%w: unknown flags or reserved bytes %#x", ErrCorrupt, f)
	}
	r.count = int(binary.LittleEndian.Uint32(body))
	r.rest, r.left = body[HeaderSize:], r.count
	return nil
}

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
	if r.Kind != keys.KindSet && r.Kind != keys.KindDelete {
		return r.fail("unknown kind %#x", byte(r.Kind))
	}
	var ok bool
	if r.Key, ok = r.bytes(); !ok || len(r.Key) == 0 {
		return r.fail("bad key in operation %d", r.count-r.left)
	}
	r.Value = nil
	if r.Kind == keys.KindSet {
		if r.Value, ok = r.bytes(); !ok {
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
	}
	return r.Err()
}
