package batch

import "encoding/binary"

// Body is a batch as it will be in the log. Its bytes are contiguous, or in pieces: then the operations are in the
// order of the spans, and long values are outside of buf. Pieces go to the log and to the memtable directly from
// where they are, because copying a large batch to bring its pieces together takes as long as logging it.
type Body struct {
	buf         []byte // from start on the header, and the operations if there are no spans
	start       int
	spans       []opSpan // nil if the body is contiguous
	shared      [][]byte // values that are not in buf
	header      Header
	count       int
	size        int
	onlyDeletes bool // see OnlyDeletes
}

// Contiguous is the body of given bytes, which may be malformed.
func Contiguous(body []byte) *Body {
	b := &Body{buf: body, size: len(body)}
	if len(body) >= HeaderSize {
		b.count = int(binary.LittleEndian.Uint32(body))
	}
	return b
}

// Size is the length of the body in bytes.
func (b *Body) Size() int { return b.size }

// OnlyDeletes is that of the Builder that has made the body; false for Contiguous.
func (b *Body) OnlyDeletes() bool { return b.onlyDeletes }

// Count is the number of operations that the body announces.
func (b *Body) Count() int { return b.count }

// SetTime replaces the commit time of a body that a Builder has made with one, and reports whether it has one.
func (b *Body) SetTime(at uint64) bool {
	if b.header.Time == 0 {
		return false
	}
	b.header.Time = at
	binary.LittleEndian.PutUint64(b.buf[b.start+HeaderSize:], at)
	return true
}

// Pieces calls yield with the body's bytes, piece by piece in their order.
func (b *Body) Pieces(yield func(piece []byte) bool) {
	if b.spans == nil {
		yield(b.buf[b.start:])
		return
	}
	if !yield(b.buf[b.start : b.start+b.header.size()]) {
		return
	}
	for i := range b.spans {
		m := &b.spans[i]
		if !yield(b.buf[m.opStart:m.opEnd]) || m.shared > 0 && !yield(b.shared[m.shared-1]) {
			return
		}
	}
}

// Bytes is the body as one slice, which is a copy if the body is in pieces.
func (b *Body) Bytes() []byte {
	if b.spans == nil {
		return b.buf[b.start:]
	}
	out := make([]byte, 0, b.size)
	for piece := range b.Pieces {
		out = append(out, piece...)
	}
	return out
}

// operation reads the operation at a position of a body in pieces.
func (b *Body) operation(i int, op *Op) {
	m := &b.spans[i]
	op.Kind = kindAt(b.buf, m.opStart)
	op.Key = b.buf[m.keyStart:m.keyEnd:m.keyEnd]
	op.Value, op.Rest = nil, nil
	if m.valueStart > 0 {
		op.Value = b.buf[m.valueStart:m.opEnd:m.opEnd]
	}
	if m.shared > 0 {
		op.Rest = b.shared[m.shared-1]
	}
}
