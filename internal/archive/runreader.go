package archive

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/wal"
)

// LoadError means that an object with entries of a bulk load is not what the archive says of it.
type LoadError struct {
	Epoch keys.Epoch // of the bulk load
	File  string
	Cause error
}

func (e *LoadError) Error() string {
	return fmt.Sprintf("archive: the bulk load at epoch %d: %s: %v", e.Epoch, e.File, e.Cause)
}

func (e *LoadError) Unwrap() error { return e.Cause }

// runReader passes the entries of a bulk load.
type runReader struct {
	place *place
	epoch keys.Epoch
	load  Load
	apply func(body []byte) error

	sum   hash.Hash
	keys  uint64
	bytes uint64
	last  []byte
	entry []byte
	batch batch.Reader
}

func newRunReader(p *place, epoch keys.Epoch, l Load, apply func(body []byte) error) *runReader {
	return &runReader{place: p, epoch: epoch, load: l, apply: apply, sum: sha256.New()}
}

// read calls apply with all batch bodies, and verifies each byte.
func (r *runReader) read(ctx context.Context) error {
	for i := range r.load.Objects {
		name := r.place.name(logDir, runName(r.epoch, r.load.Objects[i].SHA256))
		if err := r.object(ctx, name, i); err != nil {
			if ofFile(err) {
				err = &LoadError{r.epoch, name, err}
			}
			return err
		}
	}
	if [sha256.Size]byte(r.sum.Sum(nil)) != r.load.Sum || r.keys != r.load.Keys || r.bytes != r.load.Bytes {
		return &LoadError{r.epoch, "its objects together", fmt.Errorf("%w: they have %d keys, or other ones than the %d that were loaded", ErrDamaged, r.keys, r.load.Keys)}
	}
	return nil
}

// object reads one object.
func (r *runReader) object(ctx context.Context, name string, number int) (err error) {
	src, err := r.place.store.Read(ctx, name, 0, -1)
	if err != nil {
		return orDamage(name, 0, err)
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	return r.from(src, name, number)
}

// from reads an object from a source.
func (r *runReader) from(src io.Reader, name string, number int) error {
	o := &r.load.Objects[number]
	f := newFrameReader(name, src)
	f.tail = func() error {
		if err := f.atEnd(); err != nil {
			return err
		}
		if f.offset != o.Bytes || [sha256.Size]byte(f.hash.Sum(nil)) != o.SHA256 {
			return f.damaged("its SHA-256 is not the one in its name")
		}
		return nil
	}
	if err := r.header(&f, number); err != nil {
		return err
	}
	for {
		body, err := nextBody(&f)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := r.body(&f, body); err != nil {
			return err
		}
	}
}

func (r *runReader) header(f *frameReader, number int) error {
	head := make([]byte, runHeaderSize)
	if err := f.read(head); err != nil {
		return err
	}
	le := binary.LittleEndian
	switch {
	case string(head[:len(runMagic)]) != runMagic:
		return f.damaged("not a part of a bulk load: wrong magic")
	case crc32.Checksum(head[:runSumOffset], castagnoli) != le.Uint32(head[runSumOffset:]):
		return f.damaged("the header's checksum does not match")
	case le.Uint32(head[8:]) != runVersion:
		return fmt.Errorf("%w: %s has version %d, this program knows %d", ErrNewerFormat, f.file, le.Uint32(head[8:]), runVersion)
	case !allZero(head[runZeroOffset:runSumOffset]):
		return fmt.Errorf("%w: %s has flags that this program does not know", ErrNewerFormat, f.file)
	}
	if keys.Lineage(head[runLineageOffset:runEpochOffset]) != r.place.lineage || keys.Epoch(le.Uint64(head[runEpochOffset:])) != r.epoch || le.Uint32(head[runNumberOffset:]) != uint32(number) {
		return f.damaged("it is a part of another bulk load")
	}
	return nil
}

// nextBody is the next batch body, or io.EOF.
func nextBody(f *frameReader) ([]byte, error) {
	for f.used == len(f.raw) && !f.ended { // a number that is cut short is damage, and the end is none
		if err := f.frame(); err != nil {
			return nil, err
		}
	}
	if f.ended && f.used == len(f.raw) {
		return nil, io.EOF
	}
	n, err := f.uvarint()
	if err != nil {
		return nil, err
	}
	if n == 0 || n > wal.BodyBytesMax {
		return nil, f.damaged(fmt.Sprintf("a batch of %d bytes", n))
	}
	return f.bytes(int(n))
}

// body checks the entries of a batch body, and applies it.
func (r *runReader) body(f *frameReader, body []byte) error {
	if err := r.batch.Read(body); err != nil {
		return f.damaged(err.Error())
	}
	if r.batch.Header().Time != r.load.Time {
		return f.damaged("a batch has the time of another commit")
	}
	for r.batch.Next() {
		key, value := r.batch.Key, r.batch.Value
		if keys.SpaceOf(key) != keys.SpaceUser || r.batch.Kind != keys.KindSet || r.last != nil && bytes.Compare(key, r.last) <= 0 {
			return f.damaged("a key is out of order, or was not loaded")
		}
		r.last = append(r.last[:0], key...)
		r.entry = appendEntry(r.entry[:0], keys.User(key), len(value))
		r.sum.Write(r.entry) // never fails
		r.sum.Write(value)
		r.keys++
		r.bytes += uint64(len(keys.User(key)) + len(value))
	}
	if err := r.batch.Err(); err != nil {
		return f.damaged(err.Error())
	}
	return r.apply(body)
}
