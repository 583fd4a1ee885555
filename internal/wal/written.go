package wal

import (
	"encoding/binary"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/keys"
)

// Position is a boundary between two records of a segment.
type Position struct {
	Epoch  keys.Epoch // of the record that begins there
	offset uint32
}

// Position is the position of the segment's next reservation. Once the segment is sealed it is the end.
func (s *Segment) Position() Position {
	word := s.end()
	return Position{s.first + keys.Epoch(word>>offsetBits), uint32(headerPage + word&offsetMask*recordAlign)}
}

// Written reads the record at p and moves p after it. The caller knows that the record is published. The
// body of a no-op record is nil. Written reports false when p has reached the caller's own reservation,
// which is not published yet. Until it is published, the flusher keeps the segment buffer.
func (s *Segment) Written(p *Position, until Reservation) (body []byte, epoch keys.Epoch, ok bool) {
	if p.offset >= until.offset {
		return nil, 0, false
	}
	rec := s.buffer[p.offset:until.offset]
	length := uint32(littleEndian(atomic.LoadUint64(firstWord(rec))) >> 32)
	word := binary.LittleEndian.Uint64(rec[epochOffset:])
	if uint8(word>>flagsShift)&flagNoOp == 0 {
		body = rec[recordHeaderSize:length:length]
	}
	epoch = keys.Epoch(word & uint64(keys.MaxEpoch))
	p.Epoch, p.offset = epoch+1, p.offset+recordSpace(length)
	return body, epoch, true
}
