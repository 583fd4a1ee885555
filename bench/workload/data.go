// Package workload makes the data that scenarios work on, and checks it afterwards: pairs that are a function of a seed, so that
// every arm of a round gets the same ones, and draws of keys with and without skew.
package workload

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/epochkv/epochkv/bench/engines"
)

// Shape is the size of keys and values.
type Shape struct{ KeyBytes, ValueBytes int }

// Data are the pairs of one run, a function of seed and shape alone.
type Data struct {
	Shape
	keys   []byte // all keys, end to end
	filler []byte // what follows the key's number in a value
	sorted bool   // keys come in order
}

// NewData makes count pairs.
func NewData(seed uint64, count int, s Shape) *Data {
	if tableKeys {
		s.KeyBytes = TableKeyBytes
	}
	random := rand.New(rand.NewChaCha8(chachaSeed(seed)))
	d := &Data{Shape: s, keys: make([]byte, count*s.KeyBytes), filler: make([]byte, s.ValueBytes)}
	fill(random, d.keys)
	fill(random, d.filler)
	if tableKeys {
		for i := range count {
			TableKey(d.Key(i)[:0], Permute(seed, uint64(i), uint64(count)))
		}
	}
	return d
}

// NewSorted makes count pairs whose keys are as random as those of NewData and come in order, so that loading many needs no sorting.
func NewSorted(seed uint64, count int, s Shape) *Data {
	d := NewData(seed, count, s)
	if count < 2 {
		return d
	}
	d.sorted = true
	if tableKeys {
		for i := range count {
			TableKey(d.Key(i)[:0], uint64(i))
		}
		return d
	}
	step := math.MaxUint64/uint64(count) + 1
	for i := range count {
		k := d.Key(i)
		binary.BigEndian.PutUint64(k, uint64(i)*step+binary.BigEndian.Uint64(k)%step)
	}
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

// Count is the number of pairs.
func (d *Data) Count() int { return len(d.keys) / d.KeyBytes }

// Key is the key of pair i.
func (d *Data) Key(i int) []byte { return d.keys[i*d.KeyBytes : (i+1)*d.KeyBytes : (i+1)*d.KeyBytes] }

// Value writes the value of key i into dst, which has ValueBytes bytes.
func (d *Data) Value(dst []byte, i int) []byte {
	copy(dst, d.filler)
	binary.LittleEndian.PutUint64(dst, uint64(i))
	return dst
}

// sampled is how many keys are read back after a run. A lost write is found with certainty if a thousandth is lost.
const sampled = 20_000

// ReadBack compares a spread of the pairs with what the engine holds, and counts the right ones.
func (d *Data) ReadBack(e engines.Engine) (right, want int, err error) {
	s, err := e.Session()
	if err != nil {
		return 0, 0, err
	}
	buffer, expected := make([]byte, 0, d.ValueBytes), make([]byte, d.ValueBytes)
	step := max(d.Count()/sampled, 1)
	for i := 0; i < d.Count(); i += step {
		got, found, err := s.Get(buffer[:0], d.Key(i))
		if err != nil {
			return right, want, err
		}
		want++
		if found && bytes.Equal(got, d.Value(expected, i)) {
			right++
		}
	}
	return right, want, s.Close()
}

// Order lists the numbers of all pairs in the order of their keys.
func (d *Data) Order() []int {
	order := make([]int, d.Count())
	for i := range order {
		order[i] = i
	}
	if !d.sorted {
		slices.SortFunc(order, func(a, b int) int { return bytes.Compare(d.Key(a), d.Key(b)) })
	}
	return order
}

// Load writes all pairs in batches by one session, in the order of their keys, which every engine takes best.
func (d *Data) Load(e engines.Engine) error {
	const batch = 1000
	s, err := e.Session()
	if err != nil {
		return err
	}
	order := d.Order()
	keys, values := make([][]byte, 0, batch), make([][]byte, batch)
	for i := range values {
		values[i] = make([]byte, d.ValueBytes)
	}
	for n, i := range order {
		d.Value(values[len(keys)], i)
		keys = append(keys, d.Key(i))
		if len(keys) == batch || n == len(order)-1 {
			if err := s.PutAll(keys, values[:len(keys)]); err != nil {
				return err
			}
			keys = keys[:0]
		}
	}
	return s.Close()
}

// Parallel runs work in a session each of n goroutines and returns the first error.
func Parallel(e engines.Engine, n int, work func(worker int, s engines.Session) error) error {
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
