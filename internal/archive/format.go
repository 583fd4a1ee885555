package archive

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"strconv"
	"strings"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// An archive file, little endian.
//
//	0        80                                  192 before the end
//	+--------+-------+-------+-----+-------------+---------+
//	| header | frame | frame | ... | end of them | trailer |
//	+--------+-------+-------+-----+-------------+---------+
//
// header
//
//	0       8         12      16        32      40          60      61      62         76    80
//	+-------+---------+-------+---------+-------+-----------+-------+-------+----------+-----+
//	| magic | version | flags | lineage | first | link      | level | begin | reserved | crc |
//	+-------+---------+-------+---------+-------+-----------+-------+-------+----------+-----+
//
// link: epoch (8), term (8), crc (4) of a record
//
// frame; the end of the frames is one of zeros
//
//	0        4     8     12
//	+--------+-----+-----+------+
//	| length | raw | crc | zstd |
//	+--------+-----+-----+------+
//
// trailer
//
//	0       8        88      96     116     120      128      136   144    152      184  188   192
//	+-------+--------+-------+------+-------+--------+--------+-----+------+--------+----+-----+
//	| magic | header | count | last | loads | oldest | newest | raw | size | sha256 | 0  | crc |
//	+-------+--------+-------+------+-------+--------+--------+-----+------+--------+----+-----+
//
// The trailer repeats the header, so that a plan reads one end of each file. The uncompressed frames together are the records:
//
//	+-------+-------------+------------+---------------+------+
//	| flags | epoch delta | term delta | length (uvar) | body |      deltas are uvarints, to the record before
//	+-------+-------------+------------+---------------+------+
const (
	headerMagic  = "EPKVELOG"
	trailerMagic = "EPKVEEND"
	version      = 1
	versionLoads = 2 // of files with bulk loads

	headerSize      = 80
	lineageOffset   = 16
	firstOffset     = 32
	linkOffset      = 40
	levelOffset     = 60
	beginOffset     = 61
	reservedOffset  = 62
	headerSumOffset = 76

	trailerSize      = 192
	trailerHeader    = 8
	countOffset      = trailerHeader + headerSize
	lastOffset       = countOffset + 8
	loadsOffset      = lastOffset + linkSize
	oldestOffset     = 120
	newestOffset     = 128
	rawOffset        = 136
	sizeOffset       = 144
	hashOffset       = 152
	hashEnd          = hashOffset + 32
	trailerSumOffset = 188

	linkSize        = 20
	frameHeaderSize = 12
	// frameRawMax is the most that a frame has uncompressed. A longer record is in several frames.
	frameRawMax = 1 << 20
	// frameBytesMax bounds a compressed frame: incompressible bytes grow by a few for each block of 128 KiB.
	frameBytesMax = frameRawMax + frameRawMax/256 + 64
	// recordHeaderMax is the most that a record takes beside its body.
	recordHeaderMax = 1 + 3*binary.MaxVarintLen64
)

// Errors that callers test with errors.Is.
var (
	// ErrDamaged matches every *DamageError.
	ErrDamaged = errors.New("archive: a file is damaged")
	// ErrNewerFormat means that a file was written by a newer program.
	ErrNewerFormat = errors.New("archive: a file has a newer format")
)

// DamageError says where an archive file is damaged, and how.
type DamageError struct {
	File   string
	Offset int64
	Reason string
}

func (e *DamageError) Error() string {
	return fmt.Sprintf("archive: %s is damaged at offset %d: %s", e.File, e.Offset, e.Reason)
}

// Is makes the error match ErrDamaged.
func (e *DamageError) Is(target error) bool { return target == ErrDamaged }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Link names a record: another record of the same epoch has, but for one case in four billion, another link.
type Link struct {
	Epoch keys.Epoch
	Term  keys.Term
	CRC   uint32
}

func (l Link) String() string {
	return fmt.Sprintf("epoch %d of term %d (%08x)", l.Epoch, l.Term, l.CRC)
}

func (l Link) append(dst []byte) []byte {
	dst = binary.LittleEndian.AppendUint64(dst, uint64(l.Epoch))
	dst = binary.LittleEndian.AppendUint64(dst, uint64(l.Term))
	return binary.LittleEndian.AppendUint32(dst, l.CRC)
}

func readLink(src []byte) Link {
	le := binary.LittleEndian
	return Link{keys.Epoch(le.Uint64(src)), keys.Term(le.Uint64(src[8:])), le.Uint32(src[16:])}
}

// Begin is why a file has no link.
type Begin uint8

// Reasons for a file without a link.
const (
	Linked      Begin = iota // the file has one
	BeginsFirst              // it is the first file of the archive
	BeginsGap                // records before it were given up
	BeginsLoad               // a bulk load is before it that was not archived
	beginCount
)

var beginNames = [beginCount]string{"linked", "first file", "records before it are missing", "a bulk load is before it, which was not archived"}

// String says it in words.
func (b Begin) String() string { return beginNames[b] }

// Header is how a file begins.
type Header struct {
	Lineage keys.Lineage
	First   keys.Epoch // epoch of the first record; of one for skipped epochs, the first of them
	Link    Link       // the record before; zero unless Begin is Linked
	Begin   Begin
	Level   keys.FeatureLevel // of the store
	Loads   bool              // some records are bulk loads
}

func (h *Header) version() uint32 {
	if h.Loads {
		return versionLoads
	}
	return version
}

// append appends the header of a file.
func (h *Header) append(dst []byte) []byte {
	at, le := len(dst), binary.LittleEndian
	dst = le.AppendUint32(append(dst, headerMagic...), h.version())
	dst = append(le.AppendUint32(dst, 0), h.Lineage[:]...)
	dst = h.Link.append(le.AppendUint64(dst, uint64(h.First)))
	dst = append(dst, byte(h.Level), byte(h.Begin))
	dst = append(dst, make([]byte, headerSumOffset-reservedOffset)...)
	return le.AppendUint32(dst, crc32.Checksum(dst[at:], castagnoli))
}

// decodeHeader decodes the header at the start of src, which is at an offset of a file.
func decodeHeader(file string, offset int64, src []byte) (h Header, err error) {
	le := binary.LittleEndian
	damaged := func(reason string) error { return &DamageError{file, offset, reason} }
	switch {
	case len(src) < headerSize:
		return h, damaged("the header is cut short")
	case string(src[:len(headerMagic)]) != headerMagic:
		return h, damaged("not an archive file: wrong magic")
	case crc32.Checksum(src[:headerSumOffset], castagnoli) != le.Uint32(src[headerSumOffset:]):
		return h, damaged("the header's checksum does not match")
	case le.Uint32(src[8:]) != version && le.Uint32(src[8:]) != versionLoads:
		return h, fmt.Errorf("%w: %s has version %d, this program knows %d", ErrNewerFormat, file, le.Uint32(src[8:]), versionLoads)
	case le.Uint32(src[12:]) != 0 || !allZero(src[reservedOffset:headerSumOffset]) || src[beginOffset] >= byte(beginCount):
		return h, fmt.Errorf("%w: %s has flags that this program does not know", ErrNewerFormat, file)
	}
	h = Header{
		Lineage: keys.Lineage(src[lineageOffset:firstOffset]), First: keys.Epoch(le.Uint64(src[firstOffset:])),
		Link: readLink(src[linkOffset:]), Level: keys.FeatureLevel(src[levelOffset]), Begin: Begin(src[beginOffset]),
		Loads: le.Uint32(src[8:]) == versionLoads,
	}
	if h.First == 0 || h.First > keys.MaxEpoch || h.Begin == Linked && h.Link.Epoch+1 != h.First || h.Begin != Linked && h.Link != (Link{}) {
		return h, damaged("the link does not fit the first epoch")
	}
	return h, nil
}

func allZero(src []byte) bool { return len(bytes.Trim(src, "\x00")) == 0 }

// Info is what the trailer of a file says.
type Info struct {
	Header
	Count          uint64    // of records
	Last           Link      // the last record
	Loads          uint32    // how many of the records are bulk loads
	Oldest, Newest time.Time // commit times of its commits; zero without any
	RawBytes       int64     // of the records, uncompressed
	Bytes          int64     // of the file
	SHA256         [32]byte  // of the file, up to the hash
}

// after is the point after the file, if before is the one before it.
func (i *Info) after(before Point) Point {
	return Point{i.Last.Epoch, i.Last.Term, newer(before.Time, i.Newest)}
}

// append appends the trailer up to the hash.
func (i *Info) append(dst []byte) []byte {
	le := binary.LittleEndian
	dst = i.Header.append(append(dst, trailerMagic...))
	dst = i.Last.append(le.AppendUint64(dst, i.Count))
	dst = le.AppendUint32(dst, i.Loads)
	dst = le.AppendUint64(dst, microseconds(i.Oldest))
	dst = le.AppendUint64(dst, microseconds(i.Newest))
	return le.AppendUint64(le.AppendUint64(dst, uint64(i.RawBytes)), uint64(i.Bytes))
}

// sealTrailer appends the hash to a trailer, and the end.
func sealTrailer(trailer []byte, hash [32]byte) []byte {
	trailer = append(append(trailer, hash[:]...), 0, 0, 0, 0)
	return binary.LittleEndian.AppendUint32(trailer, crc32.Checksum(trailer, castagnoli))
}

// decodeTrailer decodes the last bytes of a file of a size.
func decodeTrailer(file string, size int64, src []byte) (i Info, err error) {
	le, at := binary.LittleEndian, size-trailerSize
	damaged := func(reason string) error { return &DamageError{file, max(at, 0), reason} }
	switch {
	case len(src) != trailerSize || at < headerSize+frameHeaderSize:
		return i, damaged("the file is cut short")
	case string(src[:len(trailerMagic)]) != trailerMagic:
		return i, damaged("there is no trailer: the file is cut short, or longer than it was")
	case crc32.Checksum(src[:trailerSumOffset], castagnoli) != le.Uint32(src[trailerSumOffset:]):
		return i, damaged("the trailer's checksum does not match")
	}
	if i.Header, err = decodeHeader(file, at+trailerHeader, src[trailerHeader:]); err != nil {
		return i, err
	}
	i.Count, i.Last, i.Loads = le.Uint64(src[countOffset:]), readLink(src[lastOffset:]), le.Uint32(src[loadsOffset:])
	if i.Loads != 0 && !i.Header.Loads || !allZero(src[hashEnd:trailerSumOffset]) {
		return i, fmt.Errorf("%w: %s has flags that this program does not know", ErrNewerFormat, file)
	}
	i.Oldest, i.Newest = fromMicroseconds(le.Uint64(src[oldestOffset:])), fromMicroseconds(le.Uint64(src[newestOffset:]))
	i.RawBytes, i.Bytes = int64(le.Uint64(src[rawOffset:])), int64(le.Uint64(src[sizeOffset:]))
	i.SHA256 = [32]byte(src[hashOffset:])
	if i.Bytes != size || i.Count == 0 || i.Last.Epoch < i.First || i.Header.Loads && i.Loads == 0 {
		return i, damaged("the trailer is not that of this file")
	}
	return i, nil
}

func microseconds(t time.Time) uint64 {
	if t.IsZero() {
		return 0
	}
	return uint64(t.UnixMicro())
}

func fromMicroseconds(at uint64) time.Time {
	if at == 0 {
		return time.Time{}
	}
	return time.UnixMicro(int64(at))
}

const fileSuffix = ".elog"

// FileName is the name of a file, without its directory.
func FileName(first, last keys.Epoch) string {
	return fmt.Sprintf("%016x-%016x%s", first, last, fileSuffix)
}

// ParseFileName is the inverse of FileName.
func ParseFileName(name string) (first, last keys.Epoch, ok bool) {
	digits, found := strings.CutSuffix(name, fileSuffix)
	from, to, divided := strings.Cut(digits, "-")
	a, errA := strconv.ParseUint(from, 16, 64)
	b, errB := strconv.ParseUint(to, 16, 64)
	first, last = keys.Epoch(a), keys.Epoch(b)
	ok = found && divided && errors.Join(errA, errB) == nil && first <= last && last <= keys.MaxEpoch && FileName(first, last) == name
	return first, last, ok
}
