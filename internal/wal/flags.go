package wal

import (
	"encoding/binary"
	"fmt"
	"math/bits"

	"github.com/epochkv/epochkv/internal/keys"
)

// Flags of a record, of which it has one at most. Readers refuse unknown flags: there is room for compression and
// encryption. Nothing writes term, config and load records yet.
const (
	flagNoOp   = 1 << 0 // the epoch changes nothing; the body is filler
	flagClose  = 1 << 1 // holds no epoch: the end of a log that was closed, or of a segment, with the number of the next one
	flagTerm   = 1 << 2 // holds no epoch: the records after it have another term
	flagConfig = 1 << 3 // a batch, and a change of the cluster's members
	flagLoad   = 1 << 4 // a bulk load whose sorted run is in a file of its own
	flagSkip   = 1 << 5 // holds no epoch: the next record has the epoch in the body

	flagsVersion1 = flagNoOp | flagClose | flagSkip
	flagsVersion2 = flagsVersion1 | flagTerm | flagConfig | flagLoad
)

const (
	termBodyBytes    = 16      // new term, previous term
	configCountBytes = 4       // length of the batch, before it
	loadBodyBytes    = 32 + 16 // hash, keys, bytes
)

// checkFlags refuses a record whose flags a segment of this version cannot have.
func checkFlags(s *SegmentInfo, at int64, flags uint8) error {
	known := uint8(flagsVersion1)
	if s.version >= version2 {
		known = flagsVersion2
	}
	if flags&^known != 0 || bits.OnesCount8(flags) > 1 {
		return &VersionError{File: s.File, Offset: at, What: fmt.Sprintf("unknown record flags %#x", flags)}
	}
	return nil
}

// malformed is the error about an intact record whose body does not have the form that its flag demands.
func malformed(s *SegmentInfo, at int64, what string, body []byte) error {
	return &VersionError{File: s.File, Offset: at, What: fmt.Sprintf("a %s record of %d bytes", what, len(body))}
}

// holdsEpoch reports whether a record with these flags has an epoch of its own.
func holdsEpoch(flags uint8) bool { return flags&(flagClose|flagTerm|flagSkip) == 0 }

// batchOf is the batch body in the record at an offset, which holds an epoch: empty for a no-op record.
func batchOf(s *SegmentInfo, at int64, r *record) ([]byte, error) {
	switch r.flags {
	case flagNoOp:
		return nil, nil
	case flagConfig:
		batch, ok := configBatch(r.body)
		if !ok {
			return nil, malformed(s, at, "config", r.body)
		}
		return batch, nil
	case flagLoad:
		if len(r.body) != loadBodyBytes {
			return nil, malformed(s, at, "load", r.body)
		}
		return nil, &VersionError{File: s.File, Offset: at, What: fmt.Sprintf("a bulk load that is in the file load-%x.run", r.body[:32])}
	}
	return r.body, nil
}

// configBatch is the batch in the body of a config record.
func configBatch(body []byte) (batch []byte, ok bool) {
	if len(body) < configCountBytes {
		return nil, false
	}
	n := binary.LittleEndian.Uint32(body)
	if body = body[configCountBytes:]; uint64(n) > uint64(len(body)) {
		return nil, false
	}
	return body[:n:n], true
}

// termsOf are the terms in the body of a term record.
func termsOf(body []byte) (next, previous keys.Term, ok bool) {
	if len(body) != termBodyBytes {
		return 0, 0, false
	}
	return keys.Term(binary.LittleEndian.Uint64(body)), keys.Term(binary.LittleEndian.Uint64(body[8:])), true
}

// successorOf is the number of the segment that a close record names, or zero.
func successorOf(s *SegmentInfo, at int64, r *record) (uint64, error) {
	switch len(r.body) {
	case 0:
		return 0, nil
	case closeRecordSpace - recordHeaderSize:
		return binary.LittleEndian.Uint64(r.body), nil
	}
	return 0, malformed(s, at, "close", r.body)
}

// skipTo is the epoch at which a log continues after a skip record.
func skipTo(s *SegmentInfo, at int64, r *record) (keys.Epoch, error) {
	if len(r.body) != skipSpace-recordHeaderSize {
		return 0, malformed(s, at, "skip", r.body)
	}
	next := keys.Epoch(binary.LittleEndian.Uint64(r.body))
	if next <= r.epoch || next > keys.MaxEpoch {
		return 0, corruption(s.File, at, r.epoch, fmt.Sprintf("a skip record leads to epoch %d", next))
	}
	return next, nil
}

// Record is a record as it is in a file, for tools that read a log.
type Record struct {
	Offset  int64
	Epoch   keys.Epoch
	Durable keys.Epoch // durable epoch when it was written
	Flags   uint8
	Body    []byte // valid during the call only
}

// HoldsEpoch reports whether the record has an epoch of its own. Close, term and skip records have the epoch of the
// record that comes next.
func (r Record) HoldsEpoch() bool { return holdsEpoch(r.Flags) }

// SkipsTo is the epoch of the next record if this one is a skip record; otherwise zero.
func (r Record) SkipsTo() keys.Epoch {
	if r.Flags&flagSkip == 0 || len(r.Body) != skipSpace-recordHeaderSize {
		return 0
	}
	return keys.Epoch(binary.LittleEndian.Uint64(r.Body))
}

// Batch is the batch body of a record that holds an epoch; nil for a no-op record, and for one without a batch.
func (r Record) Batch() []byte {
	switch r.Flags {
	case 0:
		return r.Body
	case flagConfig:
		batch, _ := configBatch(r.Body)
		return batch
	}
	return nil
}
