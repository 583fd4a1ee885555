package wal

import (
	"runtime"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// cacheLinePair is 128: adjacent lines are fetched in pairs, so a neighbour's store on the pair still costs a miss.
const cacheLinePair = 128

// The tail word packs the number of claims and the end of the last one, in units of recordAlign, so that one atomic
// add orders a commit and finds its place. Neither part can overflow: a segment of SegmentBytesMax holds at most
// 2^28/24 < 2^24 records; and past the end each goroutine adds at most once, since it sees refused afterwards, so
// that 2^15 goroutines with the largest body stay below 2^40 units.
const (
	offsetBits = 40
	offsetMask = 1<<offsetBits - 1
	oneRecord  = 1 << offsetBits
)

// Outcome is what became of a reservation.
type Outcome uint8

const (
	// Reserved means that the claim is the caller's to fill and publish, without delay: later epochs wait for it.
	Reserved Outcome = iota
	// Crossed means that this claim, and no other, crossed the segment's end and sealed it: the caller must make the next
	// segment, whose first epoch is the claim's, and should reserve there before others may.
	Crossed
	// Full means that the segment is sealed: wait until its successor is there, and reserve in that.
	Full
	// TooLarge means that no record can hold so large a body. Nothing was reserved.
	TooLarge
)

// Reservation is an epoch and a range of bytes in a segment.
type Reservation struct {
	Epoch  keys.Epoch
	offset uint32
	length uint32 // record header and body
}

// Segment is a file of the log and its image. Reserve, Body, Publish and Fill are for any number of goroutines.
type Segment struct {
	// Constant.
	first   keys.Epoch // of the first claim
	begin   uint32     // offset of the first claim: behind the header page, and a skip record if there is one
	limit   uint64     // end of the record area in units, counted from the header page
	seed    uint32
	buffer  []byte
	durable *paddedEpoch
	path    string
	number  uint64
	file    vfs.File
	pooled  bool // file and image have the standard size and are used again

	_    [cacheLinePair]byte
	tail atomic.Uint64
	_    [cacheLinePair - 8]byte

	// Written once, when the segment is sealed; on lines that nobody else writes.
	refused atomic.Bool             // a claim fell past the end: spares others the add
	sealed  atomic.Uint64           // tail word at the sealed end, plus one; zero while open
	next    atomic.Pointer[Segment] // successor, set before anybody can reserve in it
}

// horizon is an epoch that moves up, alone on its cache lines.
type paddedEpoch struct {
	_     [cacheLinePair]byte
	epoch atomic.Uint64
	_     [cacheLinePair - 8]byte
}

// First is the epoch of the segment's first record.
func (s *Segment) First() keys.Epoch { return s.first }

// Reserve claims the next epoch, and room for a body of bodyLen bytes, with one atomic add.
func (s *Segment) Reserve(bodyLen int) (Reservation, Outcome) {
	if uint(bodyLen) > BodyBytesMax {
		return Reservation{}, TooLarge
	}
	length := uint32(bodyLen) + recordHeaderSize
	return s.reserveUnits(length, uint64(recordSpace(length)/recordAlign))
}

// Seal ends the segment before it is full. The outcome is Crossed, with the epoch at which the next segment starts, or Full
// if somebody else has sealed it already.
func (s *Segment) Seal() (Reservation, Outcome) {
	return s.reserveUnits(0, s.limit+1)
}

func (s *Segment) reserveUnits(length uint32, units uint64) (Reservation, Outcome) {
	if s.refused.Load() {
		return Reservation{}, Full
	}
	tail := s.tail.Add(oneRecord|units) - (oneRecord | units)
	start := tail & offsetMask
	if start+units > s.limit {
		return s.pastLimit(tail)
	}
	return Reservation{
		Epoch:  s.first + keys.Epoch(tail>>offsetBits),
		offset: uint32(headerPage + start*recordAlign),
		length: length,
	}, Reserved
}

// beyond decides about a claim that ends past the limit. The tail grows only, so exactly one claim starts at or before
// the limit and ends past it.
func (s *Segment) pastLimit(tail uint64) (Reservation, Outcome) {
	s.refused.Store(true)
	if tail&offsetMask > s.limit {
		return Reservation{}, Full
	}
	s.sealed.Store(tail + 1)
	return Reservation{Epoch: s.first + keys.Epoch(tail>>offsetBits)}, Crossed
}

// sealedAt is the offset and the epoch at which the segment was sealed.
func (s *Segment) sealedAt() (offset uint32, next keys.Epoch, sealed bool) {
	word := s.sealed.Load()
	if word == 0 {
		return 0, 0, false
	}
	word--
	return uint32(headerPage + word&offsetMask*recordAlign), s.first + keys.Epoch(word>>offsetBits), true
}

// end is the tail word at the end of the last record that was claimed. A tail past the limit counts claims that got nothing; the one that
// crossed is about to write down where it did.
func (s *Segment) end() uint64 {
	word := s.tail.Load()
	if word&offsetMask <= s.limit {
		return word
	}
	for {
		if sealed := s.sealed.Load(); sealed != 0 {
			return sealed - 1
		}
		runtime.Gosched()
	}
}

// Extent tells what has been claimed in the segment: the file's number, the newest epoch, zero without any, and the bytes up to the end of
// the last record.
func (s *Segment) Extent() (number uint64, last keys.Epoch, bytes int64) {
	word := s.end()
	count, end := word>>offsetBits, word&offsetMask
	if count > 0 {
		last = s.first + keys.Epoch(count-1)
	}
	return s.number, last, int64(headerPage + end*recordAlign)
}

// Body is the claim's place for its body, to be filled before Publish and not touched after.
func (s *Segment) Body(c Reservation) []byte {
	end := c.offset + c.length
	return s.buffer[c.offset+recordHeaderSize : end : end]
}

// Publish completes the record of a claim whose body is in place.
func (s *Segment) Publish(c Reservation) { s.publish(c, 0) }

// PublishNoOp completes a reservation as a record that does nothing: replay passes its epoch with an empty body.
func (s *Segment) PublishNoOp(c Reservation) {
	clear(s.Body(c))
	s.publish(c, flagNoOp)
}

func (s *Segment) publish(c Reservation, flags uint8) {
	rec := s.buffer[c.offset : c.offset+recordSpace(c.length)]
	sealRecord(rec, s.seed, c.length, c.Epoch, flags, keys.Epoch(s.durable.epoch.Load()))
}
