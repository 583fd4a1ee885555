package memtable

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/dgraph-io/badger/v4/skl"
	"github.com/dgraph-io/badger/v4/y"

	"epochkv/internal/storage/batch"
	"epochkv/internal/storage/keys"
	"epochkv/internal/storage/memtable"
)

const (
	entries    = 500_000
	valueBytes = 100
	tableBytes = 128 << 20
)

// input is what both arms insert: the same random keys, in the form that each takes without further work.
type input struct {
	bodies [][]byte // single-put bodies, as the log holds them
	keys   [][]byte // internal keys: keyspace byte and 16 random bytes
	badger [][]byte // the same keys with Badger's timestamp suffix
}

func makeInput() (in input) {
	rnd := rand.New(rand.NewPCG(1, 2))
	var b batch.Builder
	value := make([]byte, valueBytes)
	for i := range entries {
		var user [16]byte
		binary.BigEndian.PutUint64(user[:], rnd.Uint64())
		binary.BigEndian.PutUint64(user[8:], rnd.Uint64())
		b.Reset()
		b.Set(keys.SpaceUser, user[:], value)
		body, err := b.Finish()
		if err != nil {
			panic(err)
		}
		key := keys.Append(nil, keys.SpaceUser, user[:])
		in.bodies = append(in.bodies, append([]byte(nil), body...))
		in.keys = append(in.keys, key)
		in.badger = append(in.badger, y.KeyWithTs(key, uint64(i+1)))
	}
	return in
}

// parallel cuts [0, n) into parts for g goroutines and waits for them.
func parallel(g, n int, f func(from, to int)) {
	var wg sync.WaitGroup
	for p := range g {
		wg.Go(func() { f(p*n/g, (p+1)*n/g) })
	}
	wg.Wait()
}

// arm is one table under test.
type arm interface {
	insert(in *input, from, to int)
	get(in *input, i int) bool
	free()
}

type epochkv struct{ t *memtable.Table }

func newEpochkv() arm {
	t, err := memtable.New(memtable.Config{Bytes: tableBytes, Prefix: []byte{byte(keys.SpaceUser)}})
	if err != nil {
		panic(err)
	}
	return epochkv{t}
}

func (a epochkv) insert(in *input, from, to int) {
	var w memtable.Inserter
	for i := from; i < to; i++ {
		body := in.bodies[i]
		if err := a.t.Secure(&w, memtable.MaxSize(body)); err != nil {
			panic(err)
		}
		if err := a.t.Apply(&w, body, keys.Epoch(i+1), false); err != nil {
			panic(err)
		}
	}
}

func (a epochkv) get(in *input, i int) bool {
	v, ok := a.t.Get(in.keys[i], keys.MaxEpoch)
	return ok && len(v.Value) == valueBytes
}

func (a epochkv) free() {
	if err := a.t.Free(); err != nil {
		panic(err)
	}
}

type badger struct{ s *skl.Skiplist }

func newBadger() arm { return badger{skl.NewSkiplist(256 << 20)} }

func (a badger) insert(in *input, from, to int) {
	value := make([]byte, valueBytes)
	for i := from; i < to; i++ {
		a.s.Put(in.badger[i], y.ValueStruct{Value: value})
	}
}

func (a badger) get(in *input, i int) bool { return len(a.s.Get(in.badger[i]).Value) == valueBytes }
func (a badger) free()                     { a.s.DecrRef() }

var arms = []struct {
	name string
	open func() arm
}{{"epochkv", newEpochkv}, {"badger", newBadger}}

// BenchmarkInsert fills a table with all entries per iteration; ns/entry is the figure.
func BenchmarkInsert(b *testing.B) {
	in := makeInput()
	for _, g := range []int{1, 2, 8} {
		for _, arm := range arms {
			b.Run(fmt.Sprintf("goroutines=%d/table=%s", g, arm.name), func(b *testing.B) {
				b.ReportAllocs()
				for range b.N {
					b.StopTimer()
					a := arm.open()
					b.StartTimer()
					parallel(g, entries, func(from, to int) { a.insert(&in, from, to) })
					b.StopTimer()
					a.free()
					b.StartTimer()
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/entries, "ns/entry")
			})
		}
	}
}

// BenchmarkGet looks every entry up in another random order per iteration.
func BenchmarkGet(b *testing.B) {
	in := makeInput()
	order := rand.New(rand.NewPCG(3, 4)).Perm(entries)
	for _, g := range []int{1, 2, 8} {
		for _, arm := range arms {
			b.Run(fmt.Sprintf("goroutines=%d/table=%s", g, arm.name), func(b *testing.B) {
				a := arm.open()
				defer a.free()
				a.insert(&in, 0, entries)
				b.ReportAllocs()
				b.ResetTimer()
				for range b.N {
					parallel(g, entries, func(from, to int) {
						for _, i := range order[from:to] {
							if !a.get(&in, i) {
								panic("lost an entry")
							}
						}
					})
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/entries, "ns/entry")
			})
		}
	}
}
