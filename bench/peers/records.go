package peers

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"

	"github.com/epochkv/epochkv/bench/workload"
)

const (
	keyBytes   = 16
	valueBytes = 100
	// insertsMax bounds the records that a stage's workloads may add. The versions of all of them take 8 MiB for each server.
	insertsMax = 1 << 20
)

// records are what a server must hold. Record i exists once its version is not zero.
//
// A version has a generation in its upper half, the number of a run. Where several callers put a record, all of them put the run's
// first version, so that it does not matter which of them came last. Puts by a record's only writer, and swaps, count in the lower half.
//
// Invariant: versions[i] is a version that was acknowledged, and the newest unless a write is under way.
type records struct {
	seed     uint64
	numbers  []int32 // of the keys of records, and the reverse; nil unless keys are workload.TableKey's
	byNumber []int32
	versions []atomic.Uint64
	claimed  atomic.Int64 // numbers given to records, those of inserts that are under way included
	present  atomic.Int64 // every record below exists
}

func newRecords(seed uint64, loaded int) *records {
	r := &records{seed: seed, versions: make([]atomic.Uint64, loaded+insertsMax)}
	r.claimed.Store(int64(loaded))
	r.present.Store(int64(loaded))
	if workload.TableKeys() {
		r.numberKeys()
	}
	return r
}

// numberKeys gives each record a number for its key.
func (r *records) numberKeys() {
	n := len(r.versions)
	r.numbers, r.byNumber = make([]int32, n), make([]int32, n)
	for i := range n {
		number := workload.Permute(r.seed, uint64(i), uint64(n))
		r.numbers[i], r.byNumber[number] = int32(number), int32(i)
	}
}

// generation is the first version of a run.
func generation(run int) uint64 { return uint64(run) << 32 }

// key is the key of record i: keys of neighbours are no neighbours.
func (r *records) key(i int) []byte {
	if r.numbers != nil {
		return workload.TableKey(make([]byte, 0, workload.TableKeyBytes), uint64(r.numbers[i]))
	}
	x := r.seed + uint64(i)*0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	key := binary.BigEndian.AppendUint64(make([]byte, 0, keyBytes), x^x>>31)
	return binary.BigEndian.AppendUint64(key, uint64(i))
}

// number is the record that a key belongs to.
func (r *records) number(key []byte) int {
	if r.numbers == nil {
		return int(binary.BigEndian.Uint64(key[keyBytes-8:]))
	}
	_, rest, _ := bytes.Cut(key, []byte("/"))
	digits, _, _ := bytes.Cut(rest, []byte("/"))
	n, err := strconv.Atoi(string(digits))
	if err != nil || n >= len(r.byNumber) {
		return -1 // of no record: its value is wrong
	}
	return int(r.byNumber[n])
}

// value is what record i holds at a version.
func value(i int, version uint64) []byte {
	v := make([]byte, valueBytes)
	binary.BigEndian.PutUint64(v, uint64(i))
	binary.BigEndian.PutUint64(v[8:], version)
	for j := 16; j < len(v); j++ {
		v[j] = byte(i + j)
	}
	return v
}

// check looks at an answer: it must be a whole value of record i, of version least or newer.
func check(i int, got []byte, least uint64) (version uint64, err error) {
	if len(got) != valueBytes || binary.BigEndian.Uint64(got) != uint64(i) || got[valueBytes-1] != byte(i+valueBytes-1) {
		return 0, fmt.Errorf("record %d: wrong value, %d bytes: %.16x", i, len(got), got)
	}
	if version = binary.BigEndian.Uint64(got[8:]); version < least {
		return version, fmt.Errorf("record %d: version %x is stale, %x had been acknowledged", i, version, least)
	}
	return version, nil
}

// claim gives out the number of a new record.
func (r *records) claim() (int, error) {
	i := int(r.claimed.Add(1)) - 1
	if i >= len(r.versions) {
		return 0, fmt.Errorf("more than %d inserts", insertsMax)
	}
	return i, nil
}

// acknowledge records that record i has a version, and moves present over all records that exist.
func (r *records) acknowledge(i int, version uint64) {
	r.versions[i].Store(version)
	for {
		n := r.present.Load()
		if int64(i) < n || n == int64(len(r.versions)) || r.versions[n].Load() == 0 {
			return
		}
		r.present.CompareAndSwap(n, n+1)
	}
}

// order lists the first n records by their keys. It holds no pointers, for the sake of the load generator's garbage collector.
func (r *records) order(n int) []int32 {
	order := make([]int32, n)
	for i := range order {
		order[i] = int32(i)
	}
	slices.SortFunc(order, func(a, b int32) int { return bytes.Compare(r.key(int(a)), r.key(int(b))) })
	return order
}
