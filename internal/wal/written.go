package wal

import (
	"encoding/binary"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/keys"
)

// Position is a place between two records of a segment.
type Position struct {
	Epoch  keys.Epoch // of the record that begins there
	offset uint32
}

// Position is where the segment's next record will be claimed. Once the segment is sealed it is the end.
func (s *Segment) Position() Position {
	word := s.end()
	return Position{s.first + keys.Epoch(word>>offsetBits), uint32(headerPage + word&offsetMask*recordAlign)}
}

// Written reads the record at p, which the caller knows to be published, and moves p behind it: body is nil for a record that does nothing.
// It reports false when p has reached a claim of the caller's that is not published. Until it is, the flusher keeps the image.
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
