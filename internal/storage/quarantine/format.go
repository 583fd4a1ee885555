package quarantine

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
)

// A file holds the same copy twice. Each copy is followed by zeros up to half of the file and up to its end; half of the file is a multiple of 4096
// bytes.
//
//	0        8         12         16        24       28
//	+--------+---------+----------+---------+--------+----------+----------+---
//	| magic  | version | versions | bytes   | crc    | record   | record   | ...
//	+--------+---------+----------+---------+--------+----------+----------+---
//
//	record
//	0         8         12          16           20
//	+---------+---------+-----------+------------+-----+-------+--------+
//	| trailer | key len | value len | reason len | key | value | reason |
//	+---------+---------+-----------+------------+-----+-------+--------+
//
// bytes is the length of all records; crc is CRC-32C of the copy without the crc.
const (
	magic      = "EPKV-QUA"
	version    = 1
	copyAlign  = 4096
	headerSize = 28
	recordSize = 20

	offVersion  = 8
	offVersions = 12
	offBytes    = 16
	offCRC      = 24

	recordKey    = 8
	recordValue  = 12
	recordReason = 16

	// halfBytesMax is the space for the largest contents; a file need not be larger.
	halfBytesMax = (BytesMax + VersionsMax*recordSize + headerSize + copyAlign - 1) / copyAlign * copyAlign
	fileBytesMax = 2 * halfBytesMax
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// encode returns one copy, without the zeros after it.
func encode(versions []Version) []byte {
	b := make([]byte, headerSize)
	for i := range versions {
		b = appendRecord(b, &versions[i])
	}
	copy(b, magic)
	binary.LittleEndian.PutUint32(b[offVersion:], version)
	binary.LittleEndian.PutUint32(b[offVersions:], uint32(len(versions)))
	binary.LittleEndian.PutUint64(b[offBytes:], uint64(len(b)-headerSize))
	binary.LittleEndian.PutUint32(b[offCRC:], checksum(b))
	return b
}

// alignCopy rounds the size of a copy up to that of a half.
func alignCopy(bytes int64) int64 { return (bytes + copyAlign - 1) / copyAlign * copyAlign }

func appendRecord(b []byte, v *Version) []byte {
	b = binary.LittleEndian.AppendUint64(b, uint64(v.Trailer))
	for _, n := range []int{len(v.Key), len(v.Value), len(v.Reason)} {
		b = binary.LittleEndian.AppendUint32(b, uint32(n))
	}
	return append(append(append(b, v.Key...), v.Value...), v.Reason...)
}

func checksum(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:offCRC], castagnoli), castagnoli, b[headerSize:])
}

// decode returns the contents of the first intact copy, and what is wrong with the other.
func decode(content []byte) (versions []Version, fault, err error) {
	half := len(content) / 2
	first, firstErr := decodeCopy(content[:half])
	second, secondErr := decodeCopy(content[half:])
	switch {
	case errors.Is(firstErr, ErrVersion) || errors.Is(secondErr, ErrVersion):
		return nil, nil, ErrVersion
	case firstErr == nil && secondErr == nil && !bytes.Equal(content[:half], content[half:]):
		return nil, nil, fmt.Errorf("%w: its two copies differ", ErrDamaged)
	case firstErr == nil:
		return first, secondErr, nil
	case secondErr == nil:
		return second, firstErr, nil
	}
	if len(bytes.TrimLeft(content, "\x00")) == 0 {
		return nil, nil, ErrUnwritten
	}
	return nil, nil, errors.Join(firstErr, secondErr)
}

func decodeCopy(b []byte) ([]Version, error) {
	if len(b) < headerSize || string(b[:len(magic)]) != magic {
		return nil, fmt.Errorf("%w: no magic", ErrDamaged)
	}
	length := binary.LittleEndian.Uint64(b[offBytes:])
	if length > uint64(len(b)-headerSize) {
		return nil, fmt.Errorf("%w: records of %d bytes in %d", ErrDamaged, length, len(b))
	}
	b, padding := b[:headerSize+int(length)], b[headerSize+int(length):]
	if got, want := checksum(b), binary.LittleEndian.Uint32(b[offCRC:]); got != want {
		return nil, fmt.Errorf("%w: checksum %08x, computed %08x", ErrDamaged, want, got)
	}
	if v := binary.LittleEndian.Uint32(b[offVersion:]); v != version {
		return nil, fmt.Errorf("%w: version %d", ErrVersion, v)
	}
	if len(bytes.TrimLeft(padding, "\x00")) != 0 {
		return nil, fmt.Errorf("%w: bytes after the records", ErrDamaged)
	}
	return decodeRecords(b[headerSize:], int(binary.LittleEndian.Uint32(b[offVersions:])))
}

// cutFirstCopy returns the copy at the beginning of a file without what follows its records.
func cutFirstCopy(content []byte) []byte {
	if len(content) < headerSize {
		return nil
	}
	length := binary.LittleEndian.Uint64(content[offBytes:])
	return content[:headerSize+int(min(length, uint64(len(content)-headerSize)))]
}

func decodeRecords(b []byte, count int) (versions []Version, err error) {
	for len(b) > 0 {
		v, rest, ok := decodeRecord(b)
		if !ok {
			return nil, fmt.Errorf("%w: record %d is malformed", ErrDamaged, len(versions))
		}
		if n := len(versions); n > 0 && !versions[n-1].before(&v) {
			return nil, fmt.Errorf("%w: record %d is out of order", ErrDamaged, n)
		}
		versions, b = append(versions, v), rest
	}
	if len(versions) != count {
		return nil, fmt.Errorf("%w: %d records, the header says %d", ErrDamaged, len(versions), count)
	}
	return versions, nil
}

func decodeRecord(b []byte) (v Version, rest []byte, ok bool) {
	if len(b) < recordSize {
		return v, nil, false
	}
	key, value, reason := binary.LittleEndian.Uint32(b[recordKey:]), binary.LittleEndian.Uint32(b[recordValue:]), binary.LittleEndian.Uint32(b[recordReason:])
	v.Trailer = keys.Trailer(binary.LittleEndian.Uint64(b))
	b = b[recordSize:]
	kind := v.Trailer.Kind()
	if key == 0 || uint64(key)+uint64(value)+uint64(reason) > uint64(len(b)) || !kind.HasValue() && (kind != keys.KindDelete || value > 0) {
		return v, nil, false
	}
	v.Key, b = b[:key:key], b[key:]
	if v.Value, b = b[:value:value], b[value:]; metadata.Check(kind, v.Value) != nil {
		return v, nil, false
	}
	v.Reason = string(b[:reason])
	return v, b[reason:], true
}

// before reports whether v comes before o: by key, and of one key the newer one first.
func (v *Version) before(o *Version) bool {
	c := bytes.Compare(v.Key, o.Key)
	return c < 0 || c == 0 && v.Trailer.Epoch() > o.Trailer.Epoch()
}
