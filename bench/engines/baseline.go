package engines

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// bareBytesMax is the size of the preallocated file of the bare loop; the position wraps, as a log's recycled segments do.
const bareBytesMax = 64 << 20

// bareLog is the floor under any durable put: write a record to a file whose blocks are there already, and sync it. It keeps no index.
type bareLog struct {
	mu     sync.Mutex
	file   int
	at     int64
	record []byte
	syncs  int
}

// BareLog opens the pwrite + fdatasync loop. It stores nothing that can be read back by key.
func BareLog(o Options) (Engine, error) {
	name := filepath.Join(o.Dir, "bare.log")
	file, err := unix.Open(name, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	zeros := make([]byte, 1<<20)
	for at := int64(0); at < bareBytesMax; at += int64(len(zeros)) {
		if _, err := unix.Pwrite(file, zeros, at); err != nil {
			return nil, errors.Join(err, unix.Close(file))
		}
	}
	if err := unix.Fsync(file); err != nil {
		return nil, errors.Join(err, unix.Close(file))
	}
	return &bareLog{file: file}, nil
}

func (e *bareLog) Session() (Session, error)    { return bareSession{e}, nil }
func (e *bareLog) Counters() map[string]float64 { return map[string]float64{"syncs": float64(e.syncs)} }
func (e *bareLog) Close() error                 { return unix.Close(e.file) }

// A bare log has no write buffer, so there is nothing to do.
func (e *bareLog) Settle() error { return nil }

type bareSession struct{ *bareLog }

func (bareSession) Close() error { return nil }

// errNoIndex answers reads.
var errNoIndex = errors.New("engines: the bare log has no index")

func (e bareSession) Put(key, value []byte) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.record = binary.LittleEndian.AppendUint64(e.record[:0], uint64(len(key)+len(value)))
	e.record = append(append(e.record, key...), value...)
	e.record = binary.LittleEndian.AppendUint32(e.record, crc32.Checksum(e.record, castagnoli))
	if e.at+int64(len(e.record)) > bareBytesMax {
		e.at = 0
	}
	if _, err := unix.Pwrite(e.file, e.record, e.at); err != nil {
		return err
	}
	e.at += int64(len(e.record))
	e.syncs++
	return unix.Fdatasync(e.file)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (bareSession) PutAll(_, _ [][]byte) error              { return errNoIndex }
func (bareSession) Get(dst, _ []byte) ([]byte, bool, error) { return dst, false, errNoIndex }
func (bareSession) Scan(_, _ []byte, _ int) (int, error)    { return 0, errNoIndex }
