package archive

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
)

// mergedFile is the content of a file with the records of files that follow each other. The frames of the parts are copied as they are: their
// numbers are differences to the record before, which is the same. Each part is verified while it is copied, and nothing is kept in memory but
// the frames of one record.
type mergedFile struct {
	ctx   context.Context
	place *place
	parts []file
	infos []Info // of the parts
	info  Info   // of the file, but for its SHA-256
}

func newMergedFile(ctx context.Context, p *place, parts []file, infos []Info) *mergedFile {
	m := &mergedFile{ctx: ctx, place: p, parts: parts, infos: infos, info: unite(infos)}
	m.info.Bytes, m.info.SHA256 = headerSize+frameHeaderSize+trailerSize, [32]byte{}
	for i := range infos {
		m.info.Bytes += infos[i].Bytes - (headerSize + frameHeaderSize + trailerSize)
	}
	return m
}

// Size is the number of bytes.
func (m *mergedFile) Size() int64 { return m.info.Bytes }

// Open returns a reader from the beginning.
func (m *mergedFile) Open() (io.ReadCloser, error) {
	r := &mergedReader{of: m, hash: sha256.New(), at: -1}
	r.take(m.info.Header.append(nil))
	return r, nil
}

// mergedReader reads a mergedFile.
type mergedReader struct {
	of   *mergedFile
	hash hash.Hash // of what was made
	made []byte    // frames of a record
	rest []byte    // what was made and not read
	at   int       // part that is copied; -1 before the first one, and the number of parts after the end
	src  io.ReadCloser
	part *Reader
}

func (r *mergedReader) take(p []byte) {
	r.hash.Write(p) // never fails
	r.rest = p
}

// Read reads the next bytes.
func (r *mergedReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		if err := r.next(); err != nil {
			return 0, err
		}
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// next makes more bytes, or returns io.EOF.
func (r *mergedReader) next() error {
	if r.part == nil {
		return r.open()
	}
	for r.made = r.made[:0]; len(r.made) == 0; {
		_, err := r.part.Next()
		if errors.Is(err, io.EOF) {
			return r.ended()
		}
		if err != nil {
			return err
		}
	}
	r.take(r.made)
	return nil
}

// open opens the next part, or ends the file.
func (r *mergedReader) open() (err error) {
	if r.at++; r.at >= len(r.of.parts) {
		return r.end()
	}
	f := &r.of.parts[r.at]
	if r.src, err = r.of.place.store.Read(r.of.ctx, f.name, 0, -1); err != nil {
		return orDamage(f.name, 0, err)
	}
	if r.part, err = NewReader(f.name, r.src); err == nil {
		r.part.copied = func(frame []byte) { r.made = append(r.made, frame...) }
	}
	return err
}

// ended closes a part that was read to its end.
func (r *mergedReader) ended() error {
	if r.part.Info() != r.of.infos[r.at] {
		return &DamageError{r.of.parts[r.at].name, 0, "the file has changed while it was read"}
	}
	r.part = nil
	return r.Close()
}

// end makes the end of the file.
func (r *mergedReader) end() error {
	if r.at > len(r.of.parts) {
		return io.EOF
	}
	tail := r.of.info.append(make([]byte, frameHeaderSize, frameHeaderSize+trailerSize))
	r.hash.Write(tail)
	r.rest = append(tail[:frameHeaderSize:frameHeaderSize], sealTrailer(tail[frameHeaderSize:], [sha256.Size]byte(r.hash.Sum(nil)))...)
	return nil
}

// Close closes the part that is being read.
func (r *mergedReader) Close() error {
	if r.src == nil {
		return nil
	}
	err := r.src.Close()
	r.src = nil
	if err != nil {
		err = fmt.Errorf("archive: %w", err)
	}
	return err
}
