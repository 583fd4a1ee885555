package wal

import (
	"hash/crc32"
	"runtime"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// cacheLinePair is 128: processors fetch adjacent lines in pairs, so a store to the other line of the pair
// still costs a miss.
const cacheLinePair = 128

// The tail word packs the number of reservations and the end of the last one, in units of recordAlign, so
// that one atomic add gives a commit its epoch and its offset. Neither part can overflow: a segment of
// SegmentBytesMax holds at most 2^28/24 < 2^24 records; and past the end each goroutine adds at most once,
// because it sees refused afterwards, so that 2^15 goroutines with the largest body stay below 2^40 units.
const (
	offsetBits = 40
	offsetMask = 1<<offsetBits - 1
	oneRecord  = 1 << offsetBits
)

// Outcome is the result of Reserve or Seal.
type Outcome uint8

const (
	// Reserved means that the caller must fill and publish the reservation, without delay: later epochs wait
	// for it.
	Reserved Outcome = iota
	// Crossed means that this reservation, and no other, crossed the segment's end and sealed it. The caller
	// must make the next segment, whose first epoch is that of the reservation, and should reserve there
	// before other goroutines can.
	Crossed
	// Full means that the segment is sealed: wait for the next segment, and reserve there.
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

// Segment is a file of the log and its buffer. Any number of goroutines may call Reserve, Body, Publish and
// PublishNoOp.
type Segment struct {
	// Constant.
	header             // as in the file; its first epoch is that of a skip record if there is one
	first   keys.Epoch // of the first reservation
	begin   uint32     // offset of the first reservation: after the header page, and after a skip record if there is one
	limit   uint64     // end of the record area in units, counted from the header page
	seed    uint32
	buffer  []byte
	durable *paddedEpoch
	path    string
	file    vfs.File
	pooled  bool // file and buffer have the standard size and are used again

	_    [cacheLinePair]byte
	tail atomic.Uint64
	_    [cacheLinePair - 8]byte

	// Written once, when the segment is sealed; on cache lines without other writers.
	refused atomic.Bool             // a reservation was past the end: later ones need no add
	sealed  atomic.Uint64           // tail word at the sealed end, plus one; zero while open
	next    atomic.Pointer[Segment] // the next segment, set before any goroutine can reserve in it

	synced  atomic.Uint32 // end of what is on stable storage; written before durable, by the holder of the flush role
	readers atomic.Int32  // holders of the buffer (Log.RetainBuffer), and bufferReleased; see written.go
	used    int           // bytes of the buffer in use; written before bufferReleased is set
}

// paddedEpoch is an epoch that only increases, alone on its cache lines.
type paddedEpoch struct {
	_     [cacheLinePair]byte
	epoch atomic.Uint64
	_     [cacheLinePair - 8]byte
}

// First is the epoch of the segment's first record.
func (s *Segment) First() keys.Epoch { return s.first }

// Reserve takes the next epoch, and space for a body of bodyLen bytes, with one atomic add.
func (s *Segment) Reserve(bodyLen int) (Reservation, Outcome) {
	if uint(bodyLen) > BodyBytesMax {
		return Reservation{}, TooLarge
	}
	length := uint32(bodyLen) + recordHeaderSize
	return s.reserveUnits(length, uint64(recordSpace(length)/recordAlign))
}

// Fits reports whether Reserve would have room for a body now.
func (s *Segment) Fits(bodyLen int) bool {
	units := uint64(recordSpace(uint32(bodyLen)+recordHeaderSize) / recordAlign)
	return uint(bodyLen) <= BodyBytesMax && !s.refused.Load() && s.tail.Load()&offsetMask+units <= s.limit
}

// Seal ends the segment before it is full. The outcome is Crossed, with the epoch at which the next segment
// starts, or Full if the segment is already sealed.
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

// pastLimit decides about a reservation that ends past the limit. The tail only grows, so exactly one
// reservation starts at or before the limit and ends past it.
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

// end is the tail word at the end of the last reserved record. A tail past the limit counts reservations that
// were refused; the goroutine that crossed the limit is about to store the end.
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

// Extent returns what has been reserved in the segment: the file's number, the newest epoch, which is zero
// without a record, and the bytes up to the end of the last record.
func (s *Segment) Extent() (number uint64, last keys.Epoch, bytes int64) {
	word := s.end()
	count, end := word>>offsetBits, word&offsetMask
	if count > 0 {
		last = s.first + keys.Epoch(count-1)
	}
	return s.number, last, int64(headerPage + end*recordAlign)
}

// Body is the space for the body of a reservation, to be filled before Publish and not touched afterwards.
func (s *Segment) Body(c Reservation) []byte {
	end := c.offset + c.length
	return s.buffer[c.offset+recordHeaderSize : end : end]
}

// Publish completes the record of a reservation whose body is complete. It is called once.
func (s *Segment) Publish(c Reservation) { s.publish(c, 0) }

// sumBytes is how much of a body is copied before its checksum is computed, from the cache.
const sumBytes = 16 << 10

// Recorder fills the record of a reservation piece by piece, and computes its checksum meanwhile: the bytes of a
// large body leave the processor's caches before all of it is copied.
type Recorder struct {
	record []byte // with its header
	filled int
	summed int // bytes from epochOffset to here are in sum
	sum    uint32
	length uint32
}

// Record begins the record of a reservation, whose body Append then fills. It is used instead of Body and Publish.
func (s *Segment) Record(c Reservation) Recorder {
	if invariants.Enabled {
		s.assertUnpublished(c)
	}
	rec := s.buffer[c.offset : c.offset+recordSpace(c.length)]
	putRecordHeader(rec, c.Epoch, 0, keys.Epoch(s.durable.epoch.Load()))
	return Recorder{record: rec, filled: recordHeaderSize, summed: epochOffset, sum: sumSeed(s.seed, c.length), length: c.length}
}

// Append copies the next piece of the body.
func (r *Recorder) Append(piece []byte) {
	if end := r.filled + len(piece); end < min(r.summed+sumBytes, len(r.record)) {
		copy(r.record[r.filled:], piece)
		r.filled = end
		return
	}
	r.appendAndSum(piece)
}

func (r *Recorder) appendAndSum(piece []byte) {
	for len(piece) > 0 {
		n := copy(r.record[r.filled:min(r.summed+sumBytes, len(r.record))], piece)
		if n == 0 {
			panic("wal: a body is longer than its reservation")
		}
		piece = piece[n:]
		if r.filled += n; r.filled == r.summed+sumBytes {
			r.sumFilled(r.filled)
		}
	}
}

func (r *Recorder) sumFilled(end int) {
	r.sum = crc32.Update(r.sum, castagnoli, r.record[r.summed:end])
	r.summed = end
}

// Publish completes the record, whose body is complete. It is called once.
func (r *Recorder) Publish() {
	if r.filled != int(r.length) {
		panic("wal: a body has not the length of its reservation")
	}
	r.sumFilled(len(r.record))
	publishRecord(r.record, r.sum, r.length)
}

// PublishNoOp completes a reservation as a no-op record: replay passes its epoch with an empty body.
func (s *Segment) PublishNoOp(c Reservation) {
	clear(s.Body(c))
	s.publish(c, flagNoOp)
}

func (s *Segment) publish(c Reservation, flags uint8) {
	if invariants.Enabled {
		s.assertUnpublished(c)
	}
	rec := s.buffer[c.offset : c.offset+recordSpace(c.length)]
	sealRecord(rec, s.seed, c.length, c.Epoch, flags, keys.Epoch(s.durable.epoch.Load()))
}

// info describes the segment's file.
func (s *Segment) info() SegmentInfo {
	return SegmentInfo{
		File: s.path, First: s.header.first, Bytes: int64(len(s.buffer)),
		version: s.version, number: s.number, identity: s.identity, history: s.history,
	}
}
