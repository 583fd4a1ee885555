package scenarios

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"

	"epochkv/bench/engines"
)

// shape is the size of keys and values.
type shape struct{ keyBytes, valueBytes int }

// data are the pairs of one run, a function of seed and shape alone.
type data struct {
	shape
	keys   []byte // all keys, end to end
	filler []byte // what follows the key's number in a value
}

func newData(seed uint64, count int, s shape) *data {
	random := rand.New(rand.NewChaCha8(chachaSeed(seed)))
	d := &data{shape: s, keys: make([]byte, count*s.keyBytes), filler: make([]byte, s.valueBytes)}
	fill(random, d.keys)
	fill(random, d.filler)
	return d
}

func chachaSeed(seed uint64) (s [32]byte) {
	binary.LittleEndian.PutUint64(s[:], seed)
	return s
}

func fill(random *rand.Rand, p []byte) {
	for len(p) >= 8 {
		binary.LittleEndian.PutUint64(p, random.Uint64())
		p = p[8:]
	}
	for i := range p {
		p[i] = byte(random.Uint32())
	}
}

func (d *data) count() int { return len(d.keys) / d.keyBytes }

func (d *data) key(i int) []byte { return d.keys[i*d.keyBytes : (i+1)*d.keyBytes : (i+1)*d.keyBytes] }

// value writes the value of key i into dst, which has valueBytes bytes.
func (d *data) value(dst []byte, i int) []byte {
	copy(dst, d.filler)
	binary.LittleEndian.PutUint64(dst, uint64(i))
	return dst
}

// sampled is how many keys are read back after a run. A lost write is found with certainty if a thousandth is lost.
const sampled = 20_000

// readBack compares a spread of the pairs with what the engine holds, and counts the right ones.
func (d *data) readBack(e engines.Engine) (right, want int, err error) {
	s, err := e.Session()
	if err != nil {
		return 0, 0, err
	}
	buffer, expected := make([]byte, 0, d.valueBytes), make([]byte, d.valueBytes)
	step := max(d.count()/sampled, 1)
	for i := 0; i < d.count(); i += step {
		got, found, err := s.Get(buffer[:0], d.key(i))
		if err != nil {
			return right, want, err
		}
		want++
		if found && bytes.Equal(got, d.value(expected, i)) {
			right++
		}
	}
	return right, want, s.Close()
}

// load writes all pairs in batches by one session, in the order of their keys, which every engine takes best.
func (d *data) load(e engines.Engine) error {
	const batch = 1000
	s, err := e.Session()
	if err != nil {
		return err
	}
	order := make([]int, d.count())
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return bytes.Compare(d.key(a), d.key(b)) })
	keys, values := make([][]byte, 0, batch), make([][]byte, 0, batch)
	for n, i := range order {
		keys, values = append(keys, d.key(i)), append(values, d.value(make([]byte, d.valueBytes), i))
		if len(keys) == batch || n == len(order)-1 {
			if err := s.PutAll(keys, values); err != nil {
				return err
			}
			keys, values = keys[:0], values[:0]
		}
	}
	return s.Close()
}

// parallel runs work in a session each of n goroutines and returns the first error.
func parallel(e engines.Engine, n int, work func(worker int, s engines.Session) error) error {
	errs := make([]error, n)
	var wait sync.WaitGroup
	for i := range n {
		s, err := e.Session()
		if err != nil {
			return err
		}
		wait.Go(func() {
			errs[i] = work(i, s)
			if err := s.Close(); errs[i] == nil {
				errs[i] = err
			}
		})
	}
	wait.Wait()
	for i, err := range errs {
		if err != nil {
			return fmt.Errorf("worker %d: %w", i, err)
		}
	}
	return nil
}
