package backup

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/klauspost/compress/zstd"

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
//	0       4        8       12
//	+-------+--------+-------+- - - - - - +
//	| bytes | stored | crc   | zstd frame |
//	+-------+--------+-------+- - - - - - +
//
// Bytes is the length before compression, at most 1 MiB, and stored after it. crc is CRC-32C of the zstd frame. The frames of a
// part of kind 1 hold whole pages, in ascending order of their ids, which are in their headers. Those of kind 2 hold a file. All
// numbers are little endian. The name of a part is the SHA-256 of all its bytes.
const (
	partMagic      = "EPKV-PRT"
	partVersion    = 1
	partHeaderSize = 24
	frameHeader    = 12
	frameBytes     = 1 << 20

	offPartVersion  = 8
	offPartKind     = 12
	offPartPageSize = 16
	offPartZero     = 20

	offFrameStored = 4
	offFrameCRC    = 8
)

type partKind uint32

const (
	partPages partKind = 1
	partFile  partKind = 2
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ErrDamaged means that an object of a backup is not what was written. The error names the object.
var ErrDamaged = errors.New("backup: damaged")

// ErrNewerFormat means that a newer version of this program wrote an object.
var ErrNewerFormat = errors.New("backup: written by a newer version")

// appendPartHeader begins a part.
func appendPartHeader(dst []byte, kind partKind, pageSize int) []byte {
	dst = append(dst, partMagic...)
	dst = binary.LittleEndian.AppendUint32(dst, partVersion)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(kind))
	dst = binary.LittleEndian.AppendUint32(dst, uint32(pageSize))
	return binary.LittleEndian.AppendUint32(dst, 0)
}

// appendFrame adds a frame.
func appendFrame(dst []byte, encoder *zstd.Encoder, content []byte) []byte {
	at := len(dst)
	dst = append(dst, make([]byte, frameHeader)...)
	dst = encoder.EncodeAll(content, dst)
	stored := dst[at+frameHeader:]
	binary.LittleEndian.PutUint32(dst[at:], uint32(len(content)))
	binary.LittleEndian.PutUint32(dst[at+offFrameStored:], uint32(len(stored)))
	binary.LittleEndian.PutUint32(dst[at+offFrameCRC:], crc32.Checksum(stored, castagnoli))
	return dst
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
	if v := binary.LittleEndian.Uint32(part[offPartVersion:]); v != partVersion {
		return fmt.Errorf("%w: part %s has version %d, this program knows %d", ErrNewerFormat, name, v, partVersion)
	}
	if k, size := binary.LittleEndian.Uint32(part[offPartKind:]), binary.LittleEndian.Uint32(part[offPartPageSize:]); partKind(k) != kind || int(size) != pageSize {
		return damaged(fmt.Sprintf("kind %d and page size %d, the manifest says %d and %d", k, size, kind, pageSize))
	}
	if binary.LittleEndian.Uint32(part[offPartZero:]) != 0 {
		return damaged("reserved bytes are set")
	}
	decoder, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(2*frameBytes))
	if err != nil {
		return err
	}
	defer decoder.Close()
	content := make([]byte, 0, frameBytes)
	for rest := part[partHeaderSize:]; len(rest) > 0; {
		var what string
		if content, rest, what = decodeFrame(decoder, content[:0], rest); what != "" {
			return damaged(what)
		}
		if err := each(content); err != nil {
			return err
		}
	}
	return nil
}

// decodeFrame decodes the first frame. It returns what is wrong with it, or "".
func decodeFrame(decoder *zstd.Decoder, dst, p []byte) (content, rest []byte, wrong string) {
	if len(p) < frameHeader {
		return nil, nil, "it ends in a frame"
	}
	length, stored := binary.LittleEndian.Uint32(p), binary.LittleEndian.Uint32(p[offFrameStored:])
	crc := binary.LittleEndian.Uint32(p[offFrameCRC:])
	if p = p[frameHeader:]; length > frameBytes || uint64(stored) > uint64(len(p)) {
		return nil, nil, "a frame has an impossible length"
	}
	if crc32.Checksum(p[:stored], castagnoli) != crc {
		return nil, nil, "the checksum of a frame is wrong"
	}
	content, err := decoder.DecodeAll(p[:stored], dst)
	if err != nil || len(content) != int(length) {
		return nil, nil, fmt.Sprintf("a frame cannot be decompressed to its %d bytes: %v", length, err)
	}
	return content, p[stored:], ""
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
