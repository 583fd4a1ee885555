package memtable

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"epochkv/internal/storage/batch"
	"epochkv/internal/storage/keys"
)

const (
	benchKeys       = 500_000
	benchTableBytes = 128 << 20
)

// benchBodies are single-put bodies with random 16-byte keys and 100-byte values.
func benchBodies(n, valueBytes int) [][]byte {
	rnd := rand.New(rand.NewPCG(1, 2))
	bodies := make([][]byte, n)
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
		bodies[i] = append([]byte(nil), body...)
	}
	return bodies
}

func benchKeysOf(bodies [][]byte) [][]byte {
	ks := make([][]byte, len(bodies))
	for i, body := range bodies {
		r, _ := batch.Read(body)
		op, _ := r.Next()
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

func mustPut(t *Table, in *Inserter, body []byte, e keys.Epoch) {
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

func BenchmarkInsert(b *testing.B) {
	bodies := benchBodies(benchKeys, 100)
	for _, memory := range []string{"new", "renewed"} {
		for _, g := range []int{1, 2, 8} {
			b.Run(fmt.Sprintf("memory=%s/goroutines=%d", memory, g), func(b *testing.B) {
				benchInsert(b, bodies, g, memory == "renewed")
			})
		}
	}
}

// benchInsert fills tables with all bodies, as many times as b asks for.
func benchInsert(b *testing.B, bodies [][]byte, g int, renew bool) {
	b.ReportAllocs()
	c := Config{Bytes: benchTableBytes, Prefix: []byte{byte(keys.SpaceUser)}}
	t, err := New(c)
	if err != nil {
		b.Fatal(err)
	}
	fill := func(n int) {
		parallel(g, n, func(_, from, to int) {
			var in Inserter
			for i := from; i < to; i++ {
				mustPut(t, &in, bodies[i], keys.Epoch(i+1))
			}
		})
	}
	next := func() {
		if renew {
			t, err = t.Renew(c)
		} else if err = t.Free(); err == nil {
			t, err = New(c)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	if renew {
		fill(len(bodies))
	}
	next()
	b.ResetTimer()
	for done := 0; done < b.N; done += len(bodies) {
		fill(min(len(bodies), b.N-done))
		b.StopTimer()
		next()
		b.StartTimer()
	}
	b.StopTimer()
	if err := t.Free(); err != nil {
		b.Fatal(err)
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
						} else if t.search(k, headOf(t.prefix, k)) == 0 {
							panic("lost")
						}
					}
				})
			})
		}
	}
}
