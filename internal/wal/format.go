package wal

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"path"
	"strconv"
	"strings"
	"unsafe"

	"github.com/epochkv/epochkv/internal/keys"
)

// A segment file, little endian. The header has a page of its own, which is written once: later writes
// rewrite whole pages of records, and must not put the header at risk.
//
//	0                4096
//	+--------+-------+--------+--------+-----+------------------------------+
//	| header | zero  | record | record | ... | zero, or old contents of a   |
//	|        |       |        |        |     | recycled file                |
//	+--------+-------+--------+--------+-----+------------------------------+
//
// header
//
//	0       8         12      16         24       32      40         60    64
//	+-------+---------+-------+----------+--------+-------+----------+-----+
//	| magic | version | flags | identity | number | first | history  | crc |
//	+-------+---------+-------+----------+--------+-------+----------+-----+
//
// magic, version and crc keep their offsets in every version. The crc covers the 60 bytes before it. history is zero in
// version 1. In version 2 it is
//
//	40     48              56        60
//	+------+---------------+---------+
//	| term | previous term | lineage |
//	+------+---------------+---------+
//
// the term of the first record, the term of the epoch before it, and the first four bytes of the store's lineage.
//
// record, padded with zeros to a multiple of 8
//
//	0     4        8         15      16        24
//	+-----+--------+---------+-------+---------+------+-----+
//	| crc | length | epoch   | flags | durable | body | pad |
//	+-----+--------+---------+-------+---------+------+-----+
//
// length counts header and body. epoch has 7 bytes. durable is the durable epoch when the record was
// published: it proves that every record up to that epoch was synced. crc covers epoch to pad and is
// seeded with the segment's identity and the length. A first word of zero means that there is no record.
const (
	headerPage       = pageSize
	headerSize       = 64
	headerSumOffset  = 60
	recordHeaderSize = 24
	recordAlign      = 8

	termOffset    = 40
	lineageOffset = 56
	lineageBytes  = headerSumOffset - lineageOffset

	// Versions of a segment. Version 2 has terms and a lineage, more kinds of records, and supersedes tails.
	version1 = 1
	version2 = 2

	epochOffset   = 8
	durableOffset = 16
	flagsShift    = 56
)

const (
	// SegmentBytesMax bounds a segment so that offsets have 32 bits and a tail word cannot overflow (see
	// Segment).
	SegmentBytesMax = 256 << 20
	// BodyBytesMax is the largest body that a record can hold, also in the first segment of a run.
	BodyBytesMax = SegmentBytesMax - headerPage - recordHeaderSize - skipSpace - closeRecordSpace

	// EpochWindow bounds how far epochs run ahead of durable: every epoch that is given out is less than
	// durable + EpochWindow, and each start after an unclean end skips as many. It is more than the number
	// of records in the largest segment, so that a rotation waits for the device only if the device lags by
	// several segments of tiny records. 2^32 unclean ends would use up the 2^56 epochs.
	EpochWindow = 1 << 24

	// skipSpace is the space of a skip record.
	skipSpace = recordHeaderSize + 8
	// closeRecordSpace is the space that each segment keeps for the close record after its last epoch. It is
	// the length of a close record that names the next segment.
	closeRecordSpace = recordHeaderSize + 8
	// SegmentBytesMin is the smallest segment: its header page and one page of records.
	SegmentBytesMin = 2 * pageSize
)

const pageSize = 4096

const magic = "EPKV-WAL"

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

const (
	dirName    = "wal"
	fileSuffix = ".log"
)

// Dir is the log's directory in a data directory.
func Dir(dataDir string) string { return path.Join(dataDir, dirName) }

// FileName is the name of a segment's file inside the log's directory.
func FileName(number uint64) string { return fmt.Sprintf("%016x%s", number, fileSuffix) }

// parseFileName is the inverse of FileName. Files with other names do not belong to the log.
func parseFileName(name string) (number uint64, ok bool) {
	digits, found := strings.CutSuffix(name, fileSuffix)
	if !found || len(digits) != 16 {
		return 0, false
	}
	number, err := strconv.ParseUint(digits, 16, 64)
	return number, err == nil && FileName(number) == name
}

// header is a segment's header, decoded.
type header struct {
	version  uint32
	identity uint64
	number   uint64
	first    keys.Epoch
	history
}

// history is what a header of version 2 says besides; zero in version 1.
type history struct {
	term         keys.Term // of the first record
	previousTerm keys.Term // of the epoch before the first
	lineage      lineagePrefix
}

// lineagePrefix is the part of a lineage that a header has room for.
type lineagePrefix [lineageBytes]byte

func prefixOf(l keys.Lineage) lineagePrefix { return lineagePrefix(l[:lineageBytes]) }

func putHeader(dst []byte, h header) {
	le := binary.LittleEndian
	copy(dst, magic)
	le.PutUint32(dst[8:], h.version)
	le.PutUint32(dst[12:], 0)
	le.PutUint64(dst[16:], h.identity)
	le.PutUint64(dst[24:], h.number)
	le.PutUint64(dst[32:], uint64(h.first))
	le.PutUint64(dst[termOffset:], uint64(h.term))
	le.PutUint64(dst[termOffset+8:], uint64(h.previousTerm))
	copy(dst[lineageOffset:headerSumOffset], h.lineage[:])
	le.PutUint32(dst[headerSumOffset:], crc32.Checksum(dst[:headerSumOffset], castagnoli))
}

// decodeHeader decodes the header of the named file. For zeros it returns neither a header nor an
// error: started is false.
func decodeHeader(file string, src []byte) (h header, started bool, err error) {
	src = src[:headerSize]
	if allZero(src) {
		return header{}, false, nil
	}
	damaged := func(reason string) error {
		return &CorruptionError{File: file, Reason: reason, Remedy: remedy}
	}
	if string(src[:len(magic)]) != magic {
		return header{}, false, damaged("not a segment: wrong magic")
	}
	le := binary.LittleEndian
	if crc32.Checksum(src[:headerSumOffset], castagnoli) != le.Uint32(src[headerSumOffset:]) {
		return header{}, false, damaged("segment header checksum does not match")
	}
	h = header{
		version:  le.Uint32(src[8:]),
		identity: le.Uint64(src[16:]),
		number:   le.Uint64(src[24:]),
		first:    keys.Epoch(le.Uint64(src[32:])),
	}
	if h.version != version1 && h.version != version2 {
		return header{}, false, &VersionError{File: file, What: fmt.Sprintf("format version %d, this program knows %d and %d", h.version, version1, version2)}
	}
	if f := le.Uint32(src[12:]); f != 0 || h.version == version1 && !allZero(src[termOffset:headerSumOffset]) {
		return header{}, false, &VersionError{File: file, What: fmt.Sprintf("unknown segment flags %#x or reserved bytes", f)}
	}
	h.history = history{
		term:         keys.Term(le.Uint64(src[termOffset:])),
		previousTerm: keys.Term(le.Uint64(src[termOffset+8:])),
		lineage:      lineagePrefix(src[lineageOffset:headerSumOffset]),
	}
	if h.previousTerm > h.term {
		return header{}, false, damaged(fmt.Sprintf("the term falls from %d to %d", h.previousTerm, h.term))
	}
	return h, true, nil
}

// allZero compares b with itself, one byte further: the first byte is zero, and each byte is the one before it. A loop would be slow under the race
// detector, which looks at each of its reads.
func allZero(b []byte) bool { return len(b) == 0 || b[0] == 0 && bytes.Equal(b[1:], b[:len(b)-1]) }

// recordSpace is the space that a record of the given length takes.
func recordSpace(length uint32) uint32 { return (length + recordAlign - 1) &^ (recordAlign - 1) }

// seedOf folds a segment's identity into the start value of its records' checksums.
func seedOf(identity uint64) uint32 { return uint32(identity) ^ uint32(identity>>32) }

// recordSum is the checksum of a record whose space is rec. The length enters through the seed and not as
// bytes, because it shares its word with the checksum and is stored last. The factor keeps neighbouring
// lengths far apart.
func recordSum(seed, length uint32, rec []byte) uint32 {
	return crc32.Update(sumSeed(seed, length), castagnoli, rec[epochOffset:])
}

// sumSeed is the checksum of a record before its first byte.
func sumSeed(seed, length uint32) uint32 { return seed ^ length*0x9E3779B1 }

// sealRecord writes the header of the record in rec, whose body is complete. It stores the first word
// last and atomically: for the flusher, that word means that the record is complete.
func sealRecord(rec []byte, seed, length uint32, epoch keys.Epoch, flags uint8, durable keys.Epoch) {
	putRecordHeader(rec, epoch, flags, durable)
	publishRecord(rec, recordSum(seed, length, rec), length)
}

func putRecordHeader(rec []byte, epoch keys.Epoch, flags uint8, durable keys.Epoch) {
	binary.LittleEndian.PutUint64(rec[epochOffset:], uint64(epoch)|uint64(flags)<<flagsShift)
	binary.LittleEndian.PutUint64(rec[durableOffset:], uint64(durable))
}

func publishRecord(rec []byte, sum, length uint32) {
	storeWord(firstWord(rec), littleEndian(uint64(sum)|uint64(length)<<32))
}

// putSkip writes a skip record at an epoch: it says that the next record has the epoch next. Everything
// before the skip record is durable.
func putSkip(rec []byte, seed uint32, at, next keys.Epoch) {
	binary.LittleEndian.PutUint64(rec[recordHeaderSize:], uint64(next))
	sealRecord(rec, seed, skipSpace, at, flagSkip, at-1)
}

// putCloseRecord writes the close record of a segment. It has the number of the next segment, whose file
// has a durable name. The records before it may be written together with it, so durable is the epoch
// that was synced earlier.
func putCloseRecord(rec []byte, seed uint32, at, durable keys.Epoch, successor uint64) {
	binary.LittleEndian.PutUint64(rec[recordHeaderSize:], successor)
	sealRecord(rec, seed, closeRecordSpace, at, flagClose, durable)
}

// firstWord is the word with crc and length; rec is 8-byte aligned, because segment buffers are mappings.
func firstWord(rec []byte) *uint64 { return (*uint64)(unsafe.Pointer(unsafe.SliceData(rec))) }

// littleEndian converts between a native word and its bytes on disk; on little-endian machines it does
// nothing.
func littleEndian(w uint64) uint64 {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], w)
	return binary.NativeEndian.Uint64(b[:])
}

// record is a decoded record.
type record struct {
	epoch   keys.Epoch
	durable keys.Epoch
	flags   uint8
	space   uint32
	body    []byte
}

// recordLength is the length field of a record header, and whether a record of that length fits in room
// bytes.
func recordLength(src []byte, room int64) (uint32, bool) {
	length := binary.LittleEndian.Uint32(src[4:])
	return length, length >= recordHeaderSize && int64(length) <= room && int64(recordSpace(length)) <= room
}

// decodeRecord decodes the record at the start of src. It reports false for a record that is not intact:
// a wrong checksum, a length that does not fit, or a durable epoch that is not older than the record.
func decodeRecord(src []byte, seed uint32) (r record, ok bool) {
	if len(src) < recordHeaderSize {
		return record{}, false
	}
	length, fits := recordLength(src, int64(len(src)))
	if !fits {
		return record{}, false
	}
	src = src[:recordSpace(length)]
	if recordSum(seed, length, src) != binary.LittleEndian.Uint32(src) {
		return record{}, false
	}
	word := binary.LittleEndian.Uint64(src[epochOffset:])
	r = record{
		epoch:   keys.Epoch(word & uint64(keys.MaxEpoch)),
		flags:   uint8(word >> flagsShift),
		durable: keys.Epoch(binary.LittleEndian.Uint64(src[durableOffset:])),
		space:   uint32(len(src)),
		body:    src[recordHeaderSize:length:length],
	}
	return r, r.durable < r.epoch
}
