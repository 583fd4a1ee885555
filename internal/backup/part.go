package backup

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/epochkv/epochkv/internal/storage/page"
)

// A part is a header and frames:
//
//	0        8         12     16          20     24
//	+--------+---------+------+-----------+------+---------+---------+- -
//	| magic  | version | kind | page size | zero | frame   | frame   |
//	+--------+---------+------+-----------+------+---------+---------+- -
//
//	frame
//	0       4        8       12      16
//	+-------+--------+-------+-------+- - - - +
//	| bytes | stored | crc   | codec | stored |
//	+-------+--------+-------+-------+- - - - +
//
// Bytes is the length before compression, at most 1 MiB, and stored after it. Codec is 0 for bytes that are not compressed, 1 for a zstd
// frame, 2 for an S2 block. crc is CRC-32C of codec and of what is stored. The frames of a part of kind 1 hold whole pages, in ascending order
// of their ids, which are in their headers. Those of kind 2 hold a file, those of kind 3 a page table; see tableWriter. All numbers are
// little endian. The name of a part is the SHA-256 of all its bytes. Frames of version 1 have no codec: theirs is zstd, and their crc is
// that of what is stored alone.
const (
	partMagic      = "EPKV-PRT"
	partVersion    = 2
	partVersionOld = 1
	partHeaderSize = 24
	frameHeader    = 16
	frameHeaderOld = 12
	frameBytes     = 1 << 20

	offPartVersion  = 8
	offPartKind     = 12
	offPartPageSize = 16
	offPartZero     = 20

	offFrameStored = 4
	offFrameCRC    = 8
	offFrameCodec  = 12
)

type partKind uint32

const (
	partPages partKind = 1
	partFile  partKind = 2
	partTable partKind = 3
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ErrDamaged means that an object of a backup is not what was written. The error names the object.
var ErrDamaged = errors.New("backup: damaged")

// ErrNewerFormat means that a newer version of this program wrote an object.
var ErrNewerFormat = errors.New("backup: written by a newer version")

// partHeader begins a part.
func partHeader(kind partKind, pageSize int) []byte {
	header := append(make([]byte, 0, partHeaderSize), partMagic...)
	header = binary.LittleEndian.AppendUint32(header, partVersion)
	header = binary.LittleEndian.AppendUint32(header, uint32(kind))
	header = binary.LittleEndian.AppendUint32(header, uint32(pageSize))
	return binary.LittleEndian.AppendUint32(header, 0)
}

// readPart calls each for the content of every frame of a part with this name. The content is valid during the call.
func readPart(name string, part []byte, kind partKind, pageSize int, each func(content []byte) error) error {
	if sum := sha256.Sum256(part); hex.EncodeToString(sum[:]) != name {
		return fmt.Errorf("%w: part %s: its bytes have the SHA-256 %x", ErrDamaged, name, sum)
	}
	damaged := func(what string) error { return fmt.Errorf("%w: part %s: %s", ErrDamaged, name, what) }
	if len(part) < partHeaderSize || string(part[:len(partMagic)]) != partMagic {
		return damaged("it is no part of a backup")
	}
	version := binary.LittleEndian.Uint32(part[offPartVersion:])
	if v := version; v != partVersion && v != partVersionOld {
		return fmt.Errorf("%w: part %s has version %d, this program knows %d", ErrNewerFormat, name, v, partVersion)
	}
	if k, size := binary.LittleEndian.Uint32(part[offPartKind:]), binary.LittleEndian.Uint32(part[offPartPageSize:]); partKind(k) != kind || int(size) != pageSize {
		return damaged(fmt.Sprintf("kind %d and page size %d, the manifest says %d and %d", k, size, kind, pageSize))
	}
	if binary.LittleEndian.Uint32(part[offPartZero:]) != 0 {
		return damaged("reserved bytes are set")
	}
	d, err := newDecompressor()
	if err != nil {
		return err
	}
	defer d.close()
	buf := make([]byte, 0, frameBytes)
	for rest := part[partHeaderSize:]; len(rest) > 0; {
		f, after, err := nextFrame(rest, version)
		if err == nil {
			rest = after
			f.content, err = f.decompress(d, buf)
		}
		if errors.Is(err, ErrNewerFormat) {
			return fmt.Errorf("part %s: %w", name, err)
		}
		if err != nil {
			return damaged(err.Error())
		}
		if err := each(f.content); err != nil {
			return err
		}
	}
	return nil
}

// frame is one frame of a part.
type frame struct {
	length  int
	codec   codec
	stored  []byte
	content []byte
}

var errLength = errors.New("a frame cannot be decompressed to its length")

// nextFrame takes the first frame, and checks it.
func nextFrame(p []byte, version uint32) (f frame, rest []byte, err error) {
	head := frameHeader
	if version == partVersionOld {
		head = frameHeaderOld
	}
	if len(p) < head {
		return f, nil, errors.New("it ends in a frame")
	}
	length, stored := binary.LittleEndian.Uint32(p), binary.LittleEndian.Uint32(p[offFrameStored:])
	crc := binary.LittleEndian.Uint32(p[offFrameCRC:])
	if length > frameBytes || uint64(stored) > uint64(len(p)-head) {
		return f, nil, errors.New("a frame has an impossible length")
	}
	f = frame{length: int(length), codec: codecZstd, stored: p[head : head+int(stored)]}
	var sum uint32
	if version == partVersionOld {
		sum = crc32.Checksum(f.stored, castagnoli)
	} else {
		f.codec, sum = codec(binary.LittleEndian.Uint32(p[offFrameCodec:])), frameSum(p, f.stored)
	}
	if sum != crc {
		return f, nil, errors.New("the checksum of a frame is wrong")
	}
	if f.codec > codecS2 {
		return f, nil, fmt.Errorf("%w: a frame is compressed by %d, this program knows up to %d", ErrNewerFormat, f.codec, codecS2)
	}
	return f, p[head+int(stored):], nil
}

// decompress returns the content of a frame.
func (f *frame) decompress(d *decompressor, buf []byte) ([]byte, error) {
	content, err := d.content(buf[:0], f.stored, f.codec, f.length)
	if err != nil || len(content) != f.length {
		return nil, fmt.Errorf("a frame cannot be decompressed to its %d bytes: %w", f.length, cmp.Or(err, errLength))
	}
	return content, nil
}

// checkPages checks the pages of a frame, and calls each for every run of neighbouring ones. last is the id of the page before
// them, and the result that of the last one.
func checkPages(content []byte, pageSize int, last page.ID, each func(first page.ID, pages []byte) error) (page.ID, error) {
	if len(content)%pageSize != 0 {
		return last, fmt.Errorf("%d bytes are no pages of %d", len(content), pageSize)
	}
	run := 0
	for at := 0; at < len(content); at += pageSize {
		p := content[at : at+pageSize]
		id := page.ReadHeader(p).ID
		if err := page.Check(p, id); err != nil {
			return last, fmt.Errorf("page %d: %w", id, err)
		}
		if id <= last {
			return last, fmt.Errorf("page %d comes after page %d", id, last)
		}
		if at > run && id != last+1 {
			if err := each(page.ReadHeader(content[run:]).ID, content[run:at]); err != nil {
				return last, err
			}
			run = at
		}
		last = id
	}
	if run == len(content) {
		return last, nil
	}
	return last, each(page.ReadHeader(content[run:]).ID, content[run:])
}
