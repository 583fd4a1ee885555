package server

import (
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// scanEncoding is a page of a scan, a pb.ScanResponse, as it is sent: each entry is encoded when the cursor is at it. So a page takes what its encoding takes,
// however small its entries are. An entry's message takes some 100 bytes beside its key and value: pages of tiny entries took four times what their scans
// had been admitted with.
type scanEncoding struct {
	buf   []byte
	count uint64 // of entries
}

// scanBufferLeast is the size of the first buffer of a scan: most have few entries.
const scanBufferLeast = 4 << 10

// SizeVT is the size of the encoding. The codec and the transport ask for it.
func (p *scanEncoding) SizeVT() int { return len(p.buf) }

// MarshalToSizedBufferVT copies the encoding to the end of b.
func (p *scanEncoding) MarshalToSizedBufferVT(b []byte) (int, error) {
	return copy(b[len(b)-len(p.buf):], p.buf), nil
}

// reuse begins the next page in the buffer, unless one large value has made that far larger than a page.
func (p *scanEncoding) reuse(pageBytes int) {
	if cap(p.buf) > 2*max(pageBytes, scanBufferLeast) {
		p.buf = make([]byte, 0, pageBytes)
	}
	p.buf, p.count = p.buf[:0], 0
}

// bytesWith is the size of the buffer once it has room for so many bytes more, and for the end of the page.
func (p *scanEncoding) bytesWith(bytes int) int {
	return max(cap(p.buf), len(p.buf)+bytes+scanPageOverhead)
}

// reserve makes room for so many bytes more and for the end of the page, in a buffer that grows up to the size of a page, and then only by what it lacks.
func (p *scanEncoding) reserve(bytes, pageBytes int) {
	if needed := p.bytesWith(bytes); needed > cap(p.buf) {
		p.buf = append(make([]byte, 0, max(needed, min(max(scanBufferLeast, 2*cap(p.buf)), pageBytes))), p.buf...)
	}
}

// add appends an entry, with room for its key in the page's token.
func (p *scanEncoding) add(key, value []byte, epoch keys.Epoch, f *mvcc.Metadata, pageBytes int) {
	size := sizeOfBytes(key) + sizeOfBytes(value) + sizeOfVarint(uint64(epoch)) + sizeOfVarint(f.ExpiresAt) + sizeOfVarint(f.Lease)
	p.reserve(size+1+protowire.SizeVarint(uint64(size))+len(key), pageBytes)
	b := protowire.AppendVarint(append(p.buf, tagOfBytes(1)), uint64(size))
	b = appendBytes(appendBytes(b, 1, key), 2, value)
	p.buf = appendVarint(appendVarint(appendVarint(b, 3, uint64(epoch)), 4, f.ExpiresAt), 5, f.Lease)
	p.count++
}

// end appends what is not an entry. The page is complete then.
func (p *scanEncoding) end(readEpoch keys.Epoch, token []byte) {
	p.buf = appendBytes(appendVarint(appendVarint(p.buf, 2, p.count), 3, uint64(readEpoch)), 4, token)
}

// A field has a tag of one byte, and is not sent if it is empty or zero.

func tagOfBytes(number byte) byte { return number<<3 | byte(protowire.BytesType) }

func tagOfVarint(number byte) byte { return number<<3 | byte(protowire.VarintType) }

func sizeOfBytes(b []byte) int {
	if len(b) == 0 {
		return 0
	}
	return 1 + protowire.SizeBytes(len(b))
}

func sizeOfVarint(v uint64) int {
	if v == 0 {
		return 0
	}
	return 1 + protowire.SizeVarint(v)
}

func appendBytes(to []byte, number byte, b []byte) []byte {
	if len(b) == 0 {
		return to
	}
	return protowire.AppendBytes(append(to, tagOfBytes(number)), b)
}

func appendVarint(to []byte, number byte, v uint64) []byte {
	if v == 0 {
		return to
	}
	return protowire.AppendVarint(append(to, tagOfVarint(number)), v)
}
