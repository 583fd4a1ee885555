package wal

import (
	"errors"
	"hash/crc32"

	"github.com/epochkv/epochkv/internal/vfs"
)

// rangeSums computes the checksums of ranges of a file, in a time that does not grow with their length. The old contents of a recycled file are
// values that clients chose, and all of them may look like records whose lengths reach the end of the file: to read each of them would take
// hours.
//
// A checksum is linear: that of a range follows from those of the bytes before both of its ends.
type rangeSums struct {
	file vfs.File
	size int64 // of the file

	// The part of the file for which sums are known: from a page on, up to what the device cannot read.
	from, to int64
	sums     []uint32 // of its bytes before each page, by the number of the page from the first one on

	ends [2]filePage // where the last range began, and where it ended
}

// filePage is a page of a file in memory.
type filePage struct {
	at  int64
	buf []byte // what was read of it; empty before the first read
}

// sum is the checksum of the bytes from begin to end, if seed is the checksum before them. It reports false if the device cannot read them.
// Each begin is at or after the one before.
func (s *rangeSums) sum(seed uint32, begin, end int64) (sum uint32, ok bool, err error) {
	if begin >= s.to {
		if err := s.goOn(begin &^ (pageSize - 1)); err != nil {
			return 0, false, err
		}
	}
	if end > s.to || begin >= s.to {
		return 0, false, nil
	}
	before, err := s.before(&s.ends[0], begin)
	if err != nil {
		return 0, false, unlessUnreadable(err)
	}
	through, err := s.before(&s.ends[1], end)
	return ^(appendZeros(^seed^before, end-begin) ^ through), err == nil, unlessUnreadable(err)
}

func unlessUnreadable(err error) error {
	if errors.Is(err, vfs.ErrDevice) {
		return nil
	}
	return err
}

// goOn makes the part of the file from a page on the one for which sums are known.
func (s *rangeSums) goOn(from int64) error {
	s.from, s.to, s.sums = from, from, s.sums[:0]
	w, sum := window{file: s.file, size: s.size}, uint32(0)
	for s.to < s.size {
		page, err := w.at(s.to, int(min(pageSize, s.size-s.to)))
		if unreadable := new(unreadableError); errors.As(err, &unreadable) {
			break
		}
		if err != nil {
			return err
		}
		if len(page) == 0 { // the file has become shorter
			break
		}
		s.sums = append(s.sums, sum)
		sum = rawSum(sum, page)
		s.to += int64(len(page))
	}
	s.sums = append(s.sums, sum)
	return nil
}

// before is the sum of the bytes of the part before an offset.
func (s *rangeSums) before(p *filePage, offset int64) (uint32, error) {
	i := (offset - s.from) / pageSize
	at := s.from + i*pageSize
	rest := int(offset - at)
	if rest > 0 && (p.at != at || len(p.buf) < rest) {
		if p.buf == nil {
			p.buf = make([]byte, 0, pageSize)
		}
		n, err := s.file.ReadAt(p.buf[:min(pageSize, s.to-at)], at)
		if p.at, p.buf = at, p.buf[:n]; n < rest {
			return 0, err
		}
	}
	return rawSum(s.sums[i], p.buf[:rest]), nil
}

// rawSum continues a checksum without the inversions at its beginning and its end, so that it is linear.
func rawSum(sum uint32, p []byte) uint32 { return ^crc32.Update(^sum, castagnoli, p) }

// zeroBytes has, for each n, the factor by which 1<<n zero bytes change a raw sum.
var zeroBytes = func() (factors [33]uint32) {
	factors[0] = 1 << (31 - 8)
	for i := range factors[1:] {
		factors[i+1] = multiply(factors[i], factors[i])
	}
	return factors
}()

// appendZeros is the raw sum of some bytes with n zero bytes after them.
func appendZeros(sum uint32, n int64) uint32 {
	for i := 0; n > 0; i, n = i+1, n>>1 {
		if n&1 != 0 {
			sum = multiply(sum, zeroBytes[i])
		}
	}
	return sum
}

// multiply multiplies two polynomials modulo that of the checksum. The highest bit is the coefficient of x to the 0, as in a checksum.
func multiply(a, b uint32) (product uint32) {
	for ; a != 0; a <<= 1 {
		if a&(1<<31) != 0 {
			product ^= b
		}
		b = b>>1 ^ crc32.Castagnoli&-(b&1)
	}
	return product
}
