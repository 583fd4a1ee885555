package backup

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"sync"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"
)

// codec is how the content of a frame is stored.
type codec uint32

const (
	codecNone codec = 0
	codecZstd codec = 1
	codecS2   codec = 2
)

// Of a frame a sample is compressed both ways. S2 takes a quarter of the time of zstd, and makes as much of records with random parts. zstd
// is taken if it saves a sixteenth of the content or more, as it does with text: a backup is read from a device once and stored for months.
// The choice depends on the content alone, so that the same pages give the same bytes.
const (
	sampleBytes = 32 << 10
	zstdSaves   = 16 // a sixteenth
	noneSaves   = 32 // content of which less than a thirty-second is saved is not compressed
)

// compressor compresses frames. Its methods may be called by several goroutines.
type compressor struct {
	zstd    *zstd.Encoder
	scratch sync.Pool // of *[]byte, for one frame each
}

func newCompressor(workers int) *compressor {
	// One goroutine for each frame, so that the same pages give the same bytes on every machine.
	encoder, _ := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(workers), zstd.WithEncoderCRC(false)) // no option is wrong
	return &compressor{zstd: encoder, scratch: sync.Pool{New: func() any {
		buf := make([]byte, 0, frameHeader+s2.MaxEncodedLen(frameBytes))
		return &buf
	}}}
}

// frame is a content as a frame.
func (c *compressor) frame(content []byte) []byte {
	pooled := c.scratch.Get().(*[]byte)
	defer c.scratch.Put(pooled)
	kind, out := c.compress((*pooled)[:frameHeader], content)
	le, stored := binary.LittleEndian, out[frameHeader:]
	le.PutUint32(out, uint32(len(content)))
	le.PutUint32(out[offFrameStored:], uint32(len(stored)))
	le.PutUint32(out[offFrameCodec:], uint32(kind))
	le.PutUint32(out[offFrameCRC:], frameSum(out, stored))
	return bytes.Clone(out) // which clears no memory first
}

// frameSum is the checksum of a frame of version 2.
func frameSum(header, stored []byte) uint32 {
	return crc32.Update(crc32.Checksum(header[offFrameCodec:frameHeader], castagnoli), castagnoli, stored)
}

// compress appends a content to a header, compressed if that saves something.
func (c *compressor) compress(header, content []byte) (codec, []byte) {
	kind, buf := c.choose(header, content), header
	if kind == codecZstd {
		buf = c.zstd.EncodeAll(content, buf)
	} else {
		n := len(s2.Encode(buf[len(header):cap(buf)], content)) // the buffer has room for any
		buf = buf[:len(header)+n]
	}
	if len(buf)-len(header) > len(content)-len(content)/noneSaves {
		return codecNone, append(header, content...)
	}
	return kind, buf
}

// choose compresses a sample of a content both ways, in the buffer after a header.
func (c *compressor) choose(header, content []byte) codec {
	at := (len(content) - min(len(content), sampleBytes)) / 2
	sample := content[at:min(len(content), at+sampleBytes)]
	fast := len(s2.Encode(header[len(header):cap(header)], sample))
	small := len(c.zstd.EncodeAll(sample, header)) - len(header)
	if fast-small >= max(len(sample)/zstdSaves, 1) {
		return codecZstd
	}
	return codecS2
}

// decompressor decompresses frames. It is for one goroutine.
type decompressor struct{ zstd *zstd.Decoder }

func newDecompressor() (*decompressor, error) {
	decoder, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(2*frameBytes))
	return &decompressor{decoder}, err
}

func (d *decompressor) close() { d.zstd.Close() }

// content is the content of a frame, whose length is known. It may be in dst or in stored.
func (d *decompressor) content(dst, stored []byte, kind codec, length int) (content []byte, err error) {
	switch kind {
	case codecNone:
		return stored, nil
	case codecS2:
		if n, err := s2.DecodedLen(stored); err != nil || n != length {
			return nil, errLength
		}
		return s2.Decode(dst[:cap(dst)], stored)
	default:
		return d.zstd.DecodeAll(stored, dst)
	}
}
