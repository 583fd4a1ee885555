package wal

import (
	"encoding/binary"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/invariants"
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

// Mark is that position for a reader of the log's files.
func (s *Segment) Mark() TailMark {
	p := s.Position()
	return TailMark{s.number, int64(p.offset), p.Epoch, s.header.term}
}

// BytesTo is the number of bytes between two positions of one segment.
func (p Position) BytesTo(end Position) int { return int(end.offset) - int(p.offset) }

// Begin is the position at which the record of a reservation begins.
func (r Reservation) Begin() Position { return Position{r.Epoch, r.offset} }

// bufferReleased is set in Segment.readers once the flusher does not need the buffer any more.
const bufferReleased = 1 << 30

// RetainBuffer keeps the segment's buffer readable until ReturnBuffer. It reports false if the log has given the
// buffer to another segment, or has freed it. The caller does not wait for anything meanwhile: a rotation may need the
// buffer.
func (l *Log) RetainBuffer(s *Segment) bool {
	for {
		n := s.readers.Load()
		if n&bufferReleased != 0 {
			return false
		}
		if s.readers.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// ReturnBuffer ends what RetainBuffer began.
func (l *Log) ReturnBuffer(s *Segment) {
	if invariants.Enabled {
		s.assertRetained()
	}
	if s.readers.Add(-1) == bufferReleased {
		l.reuseBuffer(s)
	}
}

// releaseBuffer gives back the buffer of a segment that is written to its end. If a reader retains the buffer, the last
// reader gives it back.
func (l *Log) releaseBuffer(s *Segment, used int) {
	s.used = used
	if s.readers.Add(bufferReleased) == bufferReleased {
		l.reuseBuffer(s)
	}
}

func (l *Log) reuseBuffer(s *Segment) {
	if s.pooled {
		l.buffers.put(s.buffer, s.used)
		l.requestSegment()
		return
	}
	l.recordFailure(l.buffers.unmap(s.buffer))
	l.preparer.waiting.Add(-int64(len(s.buffer)))
}

// Written reads the record at p, which the caller knows to be published, and moves p to its end. The body is nil for a
// no-op record. It reports false when p has reached end. The buffer is the segment's as long as the caller retains it,
// or holds a reservation in the segment that is not published.
func (s *Segment) Written(p *Position, end Position) (body []byte, epoch keys.Epoch, ok bool) {
	if p.offset >= end.offset {
		return nil, 0, false
	}
	rec := s.buffer[p.offset:end.offset]
	length := uint32(littleEndian(atomic.LoadUint64(firstWord(rec))) >> 32)
	word := binary.LittleEndian.Uint64(rec[epochOffset:])
	if uint8(word>>flagsShift)&flagNoOp == 0 {
		body = rec[recordHeaderSize:length:length]
	}
	epoch = keys.Epoch(word & uint64(keys.MaxEpoch))
	p.Epoch, p.offset = epoch+1, p.offset+recordSpace(length)
	return body, epoch, true
}
