package memtable

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

const (
	benchKeys       = 500_000
	benchTableBytes = 128 << 20
)

// benchBodies are single-put bodies with random 16-byte keys and 100-byte values.
func benchBodies(n, valueBytes int) []*batch.Body {
	rnd := rand.New(rand.NewPCG(1, 2))
	bodies := make([]*batch.Body, n)
	var b batch.Builder
	var key [16]byte
	for i := range bodies {
		binary.BigEndian.PutUint64(key[:], rnd.Uint64())
		binary.BigEndian.PutUint64(key[8:], rnd.Uint64())
		b.Reset()
		b.Set(keys.SpaceUser, key[:], make([]byte, valueBytes))
		body, err := b.Finish()
		if err != nil {
			panic(err)
		}
		bodies[i] = batch.Contiguous(bytes.Clone(body.Bytes()))
	}
	return bodies
}

func benchKeysOf(bodies []*batch.Body) [][]byte {
	ks := make([][]byte, len(bodies))
	for i, body := range bodies {
		var op batch.Reader
		_ = op.ReadBody(body)
		op.Next()
		ks[i] = op.Key
	}
	return ks
}

// parallel cuts [0, n) into parts for g goroutines and waits for them.
func parallel(g, n int, f func(part, from, to int)) {
	var wg sync.WaitGroup
	for p := range g {
		wg.Go(func() { f(p, p*n/g, (p+1)*n/g) })
	}
	wg.Wait()
}

func mustPut(t *Table, in *Inserter, body *batch.Body, e keys.Epoch) {
	if err := t.Secure(in, MaxSize(body)); err != nil {
		panic(err)
	}
	if err := t.Apply(in, body, e, false); err != nil {
		panic(err)
	}
}

func mustNew(tb testing.TB, c Config) *Table {
	tb.Helper()
	t, err := New(c)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := t.Free(); err != nil {
			tb.Error(err)
		}
	})
	return t
}

// BenchmarkInsert fills tables of benchKeys entries, as many times as asked for. Mapping the memory is part of it.
func BenchmarkInsert(b *testing.B) {
	for _, order := range []string{"random", "ascending"} {
		bodies := benchBodies(benchKeys, 100)
		if order == "ascending" {
			slices.SortFunc(bodies, compareBodies) // all else is the same in each
		}
		for _, g := range []int{1, 2, 8} {
			b.Run(fmt.Sprintf("order=%s/goroutines=%d", order, g), func(b *testing.B) { benchInsert(b, bodies, g) })
		}
	}
}

func benchInsert(b *testing.B, bodies []*batch.Body, g int) {
	b.ReportAllocs()
	for done := 0; done < b.N; done += len(bodies) {
		b.StopTimer()
		t, err := New(Config{Bytes: benchTableBytes, Prefix: []byte{byte(keys.SpaceUser)}})
		if err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		parallel(g, min(len(bodies), b.N-done), func(_, from, to int) {
			var in Inserter
			for i := from; i < to; i++ {
				mustPut(t, &in, bodies[i], keys.Epoch(i+1))
			}
		})
		b.StopTimer()
		if err := t.Free(); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

// BenchmarkBatch inserts sorted batches of 100 random keys; ns/entry is the figure.
func BenchmarkBatch(b *testing.B) {
	const size = 100
	ks := benchKeysOf(benchBodies(benchKeys, 0))
	bodies := make([]*batch.Body, 0, len(ks)/size)
	var builder batch.Builder
	for part := range slices.Chunk(ks, size) {
		builder.Reset()
		for _, k := range part {
			builder.Set(keys.SpaceUser, keys.User(k), make([]byte, 100))
		}
		body, err := builder.Finish()
		if err != nil {
			b.Fatal(err)
		}
		bodies = append(bodies, batch.Contiguous(bytes.Clone(body.Bytes())))
	}
	for _, g := range []int{1, 2, 8} {
		b.Run(fmt.Sprintf("goroutines=%d", g), func(b *testing.B) {
			benchInsert(b, bodies, g)
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/size, "ns/entry")
		})
	}
}

// BenchmarkScan seeks to a random key and reads the 100 entries from there at a snapshot; ns/entry is the figure.
func BenchmarkScan(b *testing.B) {
	const length = 100
	bodies := benchBodies(benchKeys, 100)
	ks := benchKeysOf(bodies)
	t := mustNew(b, Config{Bytes: benchTableBytes, Prefix: []byte{byte(keys.SpaceUser)}})
	var in Inserter
	for i, body := range bodies {
		mustPut(t, &in, body, keys.Epoch(i+1))
	}
	for _, direction := range []string{"forward", "backward"} {
		for _, g := range []int{1, 2} {
			b.Run(fmt.Sprintf("direction=%s/goroutines=%d", direction, g), func(b *testing.B) {
				b.ReportAllocs()
				parallel(g, b.N, func(_, from, to int) {
					var it Iter
					it.Init(t)
					seek, step := it.SeekGE, it.NextKey
					if direction == "backward" {
						seek, step = it.SeekKeyLT, it.PrevKey
					}
					seen := 0
					for i := from; i < to; i++ {
						n := 0
						for ok := seek(ks[i%len(ks)]); ok && n < length; ok = step() {
							if v := it.VersionAt(keys.MaxEpoch); v.Found() {
								seen += len(v.Value())
							}
							n++
						}
					}
					if seen == 0 && to > from+length {
						panic("nothing seen")
					}
				})
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/length, "ns/entry")
			})
		}
	}
}

func BenchmarkGet(b *testing.B) {
	bodies := benchBodies(benchKeys, 100)
	ks := benchKeysOf(bodies)
	t := mustNew(b, Config{Bytes: benchTableBytes, Prefix: []byte{byte(keys.SpaceUser)}})
	var in Inserter
	for i, body := range bodies {
		mustPut(t, &in, body, keys.Epoch(i+1))
	}
	rand.New(rand.NewPCG(3, 4)).Shuffle(len(ks), func(i, j int) { ks[i], ks[j] = ks[j], ks[i] })
	b.Logf("%.0f bytes per entry", float64(t.Bytes())/benchKeys)
	for _, where := range []string{"index", "blocks"} {
		for _, g := range []int{1, 2, 8} {
			b.Run(fmt.Sprintf("where=%s/goroutines=%d", where, g), func(b *testing.B) {
				b.ReportAllocs()
				parallel(g, b.N, func(_, from, to int) {
					for i := from; i < to; i++ {
						k := ks[i%len(ks)]
						if where == "index" {
							if _, ok := t.Get(k, keys.MaxEpoch); !ok {
								panic("lost")
							}
						} else if t.search(k, t.heads.of(k)) == 0 {
							panic("lost")
						}
					}
				})
			})
		}
	}
}

func compareBodies(a, b *batch.Body) int { return bytes.Compare(a.Bytes(), b.Bytes()) }
