package backup

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"slices"

	"github.com/epochkv/epochkv/internal/storage/page"
)

// digest is SHA-256 over the id (8 bytes) and the stored checksum (4 bytes) of pages in ascending order. Two states with the same
// digest have the same pages.
type digest struct {
	h   hash.Hash
	buf [12]byte
}

func newDigest() *digest { return &digest{h: sha256.New()} }

// add adds a page. That of a page that cannot be read has no checksum.
func (d *digest) add(e tableEntry) {
	binary.LittleEndian.PutUint64(d.buf[:], uint64(e.id))
	binary.LittleEndian.PutUint32(d.buf[8:], e.sum)
	d.h.Write(d.buf[:]) // never fails
}

func (d *digest) sum() string { return hex.EncodeToString(d.h.Sum(nil)) }

// pageReader reads and checks pages.
type pageReader interface {
	PageSize() int
	PageCount() page.ID
	ReadRun(first page.ID, buf []byte, damaged func(id page.ID, damage error) error) error
}

// digestOf computes the digest of a file. Only the pages that a backup lacks may be damaged.
func digestOf(ctx context.Context, r pageReader, next func(page.ID) page.ID, has func(page.ID) bool, missing []uint64) (string, error) {
	d, buf, size := newDigest(), alignedRun(r.PageSize()), r.PageSize()
	for id := next(0); id < r.PageCount(); {
		if err := ctx.Err(); err != nil {
			return "", err
		}
		n := page.ID(1)
		for n < page.ID(len(buf)/size) && id+n < r.PageCount() && has(id+n) {
			n++
		}
		run, lost := buf[:int(n)*size], map[page.ID]bool{}
		err := r.ReadRun(id, run, func(id page.ID, damage error) error {
			if _, known := slices.BinarySearch(missing, uint64(id)); !known {
				return fmt.Errorf("%w: %w", ErrDamaged, damage)
			}
			lost[id] = true
			return nil
		})
		if err != nil {
			return "", err
		}
		for i := range n {
			e := tableEntry{id: id + i}
			if !lost[e.id] {
				e.sum = sumOf(run[int(i)*size:])
			}
			d.add(e)
		}
		id = next(id + n)
	}
	return d.sum(), nil
}
