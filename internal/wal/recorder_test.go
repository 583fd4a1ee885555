package wal

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

// TestRecordInPiecesIsTheRecordOfItsBytes fills records whose bodies end around the pieces of the checksum, from pieces
// of any length, and compares them with records that are copied and sealed whole.
func TestRecordInPiecesIsTheRecordOfItsBytes(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	durable := &paddedEpoch{}
	durable.epoch.Store(6)
	for _, size := range []int{0, 1, 8, 100, sumBytes - 40, sumBytes - 16, sumBytes - 15, sumBytes, sumBytes + 1, 5*sumBytes + 3} {
		body := make([]byte, size)
		for i := range body {
			body[i] = byte(rng.Uint32())
		}
		length := uint32(recordHeaderSize + size)
		c := Reservation{Epoch: 7, offset: 0, length: length}
		want := make([]byte, recordSpace(length))
		copy(want[recordHeaderSize:], body)
		sealRecord(want, 99, length, 7, 0, 6)

		s := &Segment{buffer: make([]byte, recordSpace(length)), seed: 99, durable: durable, limit: 1 << 20}
		r := s.Record(c)
		for rest := body; len(rest) > 0; {
			n := min(1+rng.IntN(sumBytes), len(rest))
			r.Append(rest[:n])
			rest = rest[n:]
		}
		if firstWord(s.buffer) != nil && *firstWord(s.buffer) != 0 {
			t.Errorf("%d bytes: the record is published before it is complete", size)
		}
		r.Publish()
		if !bytes.Equal(s.buffer, want) {
			t.Errorf("%d bytes: the record differs", size)
		}
	}
}

// TestRecordOfAnotherLengthIsNotPublished: its checksum would be right, and no start could read its body.
func TestRecordOfAnotherLengthIsNotPublished(t *testing.T) {
	const size = 100
	length := uint32(recordHeaderSize + size)
	for _, filled := range []int{size - 1, size + 1} {
		s := &Segment{buffer: make([]byte, recordSpace(length)), durable: &paddedEpoch{}, limit: 1 << 20}
		r := s.Record(Reservation{Epoch: 1, length: length})
		r.Append(make([]byte, filled))
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("a body of %d bytes was published in a record for %d", filled, size)
				}
			}()
			r.Publish()
		}()
		if *firstWord(s.buffer) != 0 {
			t.Errorf("the record of %d bytes is published", filled)
		}
	}
}
