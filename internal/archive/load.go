package archive

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"strconv"
	"strings"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// A bulk load is not in the log. Its record in the archive describes it, and its entries are in *run objects* beside the archive files:
//
//	record body
//	0      8      16      24      56       88     96
//	+------+------+-------+-------+--------+------+- -
//	| time | keys | bytes | sum   | sha256 | size | the next object
//	+------+------+-------+-------+--------+------+- -
//
//	run object
//	0       8         12       16        32      40         44    48
//	+-------+---------+--------+---------+-------+----------+-----+-------+-------+- -+-------------+
//	| magic | version | number | lineage | epoch | reserved | crc | frame | frame |   | end of them |
//	+-------+---------+--------+---------+-------+----------+-----+-------+-------+- -+-------------+
//
// The uncompressed frames of an object are batch bodies, each after its length (uvarint). The entries of all bodies of all objects together
// are in ascending order of their keys. sum is the SHA-256 over all entries: length of the key (uvarint), key, length of the value (uvarint),
// value. It does not depend on how the entries are divided.
const (
	loadFixed  = 56 // of a record body, before the objects
	loadObject = 40

	runMagic      = "EPKVLOAD"
	runVersion    = 1
	runHeaderSize = 48

	runNumberOffset  = 12
	runLineageOffset = 16
	runEpochOffset   = 32
	runZeroOffset    = 40
	runSumOffset     = 44

	runPrefix = "load-"
	runSuffix = ".run"

	// runBodyBytes is about the size of a batch body.
	runBodyBytes = 256 << 10
)

// Load describes a bulk load.
type Load struct {
	Time    uint64 // of its commit, microseconds since 1970
	Keys    uint64
	Bytes   uint64 // of keys and values
	Sum     [sha256.Size]byte
	Objects []RunObject
}

// RunObject is a part of the entries.
type RunObject struct {
	SHA256 [sha256.Size]byte // of its bytes
	Bytes  int64
}

// errLoad means that the description of a bulk load is not one.
var errLoad = errors.New("the description of a bulk load has another form")

func (l *Load) append(dst []byte) []byte {
	le := binary.LittleEndian
	dst = le.AppendUint64(le.AppendUint64(le.AppendUint64(dst, l.Time), l.Keys), l.Bytes)
	dst = append(dst, l.Sum[:]...)
	for i := range l.Objects {
		dst = le.AppendUint64(append(dst, l.Objects[i].SHA256[:]...), uint64(l.Objects[i].Bytes))
	}
	return dst
}

func decodeLoad(src []byte) (l Load, err error) {
	if len(src) < loadFixed+loadObject || (len(src)-loadFixed)%loadObject != 0 {
		return l, errLoad
	}
	le := binary.LittleEndian
	l.Time, l.Keys, l.Bytes, l.Sum = le.Uint64(src), le.Uint64(src[8:]), le.Uint64(src[16:]), [sha256.Size]byte(src[24:])
	for rest := src[loadFixed:]; len(rest) > 0; rest = rest[loadObject:] {
		l.Objects = append(l.Objects, RunObject{[sha256.Size]byte(rest), int64(le.Uint64(rest[sha256.Size:]))})
	}
	return l, nil
}

// runName is the name of a run object, without its directory.
func runName(epoch keys.Epoch, sum [sha256.Size]byte) string {
	return fmt.Sprintf("%s%016x-%x%s", runPrefix, epoch, sum, runSuffix)
}

// parseRunName is the inverse of runName.
func parseRunName(name string) (epoch keys.Epoch, ok bool) {
	rest, found := strings.CutPrefix(name, runPrefix)
	at, rest, divided := strings.Cut(rest, "-")
	digits, suffixed := strings.CutSuffix(rest, runSuffix)
	e, err := strconv.ParseUint(at, 16, 64)
	sum, errSum := hex.DecodeString(digits)
	if !found || !divided || !suffixed || errors.Join(err, errSum) != nil || len(sum) != sha256.Size {
		return 0, false
	}
	return keys.Epoch(e), runName(keys.Epoch(e), [sha256.Size]byte(sum)) == name
}

func appendRunHeader(dst []byte, l keys.Lineage, epoch keys.Epoch, number int) []byte {
	at, le := len(dst), binary.LittleEndian
	dst = le.AppendUint32(le.AppendUint32(append(dst, runMagic...), runVersion), uint32(number))
	dst = le.AppendUint64(append(dst, l[:]...), uint64(epoch))
	dst = le.AppendUint32(dst, 0)
	return le.AppendUint32(dst, crc32.Checksum(dst[at:], castagnoli))
}

// runs are the run objects of an archive and their sizes.
func (p *place) runs(ctx context.Context) (map[string]int64, error) {
	all := map[string]int64{}
	err := p.store.List(ctx, p.name(logDir, runPrefix), func(o objectstore.Object) error {
		all[o.Name] = o.Size
		return nil
	})
	return all, err
}
