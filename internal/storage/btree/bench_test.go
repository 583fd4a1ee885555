package btree

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// arrayStore is a source without a map or a lock: pages by id in a slice. It measures the tree
// alone.
type arrayStore struct {
	size  int
	mem   []byte
	next  page.ID
	bytes atomic.Int64
}

func newArrayStore(size, pages int) *arrayStore {
	return &arrayStore{size: size, mem: frames(size * pages), next: 2}
}

// frames are bytes outside the heap in huge pages, as the frames of the cache are.
func frames(n int) []byte {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		panic(err)
	}
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	return b
}

func (a *arrayStore) Page(id page.ID, _ int) ([]byte, error) {
	at := int(id) * a.size
	return a.mem[at : at+a.size : at+a.size], nil
}

func (a *arrayStore) AllocExtent(n int) (page.ID, int, error) {
	first := a.next
	a.next += page.ID(n)
	if int(a.next)*a.size > len(a.mem) {
		return 0, 0, fmt.Errorf("out of pages")
	}
	return first, n, nil
}

func (a *arrayStore) WritePage(id page.ID, p []byte) error {
	a.bytes.Add(int64(copy(a.mem[int(id)*a.size:], p)))
	return nil
}

func (a *arrayStore) merge(b testing.TB, base Root, entries []Entry, workers, fill int) *Result {
	b.Helper()
	res, err := mergeFilling(context.Background(), &MergeInput{
		Base: base, Checkpoint: 1, PageSize: a.size, Policy: Policy{MinVisible: keys.MaxEpoch},
		Input:  func() Input { return &SliceInput{Entries: entries} },
		Source: func() Source { return a },
		Sink:   a, Workers: Always(workers),
		Cuts: Cuts{Keys: sample(entries, 64)},
	}, fill, runMin)
	if err != nil {
		b.Fatal(err)
	}
	return res
}

// sample picks n keys at equal distances.
func sample(entries []Entry, n int) (cuts [][]byte) {
	for i := 1; i < n && len(entries) >= n; i++ {
		cuts = append(cuts, entries[i*len(entries)/n].Key)
	}
	return cuts
}

// randomPuts is n versions of random 16-byte keys (and a keyspace byte) with values of the given
// size, sorted.
func randomPuts(n, valueSize int, seed uint64, epoch keys.Epoch) []Entry {
	rng := rand.New(rand.NewPCG(seed, 0))
	value := make([]byte, valueSize)
	for i := range value {
		value[i] = byte(rng.Uint32())
	}
	out := make([]Entry, n)
	buf := make([]byte, 17*n)
	for i := range out {
		k := buf[17*i : 17*i+17 : 17*i+17]
		k[0] = byte(keys.SpaceUser)
		binary.BigEndian.PutUint64(k[1:], rng.Uint64())
		binary.BigEndian.PutUint64(k[9:], rng.Uint64())
		out[i] = Entry{Key: k, Value: value, Trailer: keys.MakeTrailer(epoch, keys.KindSet)}
	}
	slices.SortFunc(out, func(a, b Entry) int { return keys.Compare(a.Key, a.Trailer, b.Key, b.Trailer) })
	return out
}

// cpuPer reports the processor time of each operation, which other work on the machine disturbs
// less than the clock.
func cpuPer(b *testing.B) func() {
	used := func() int64 {
		var u unix.Rusage
		_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
		return u.Utime.Nano() + u.Stime.Nano()
	}
	start := used()
	return func() { b.ReportMetric(float64(used()-start)/float64(b.N), "cpu-ns/op") }
}

type benchTree struct {
	store   *arrayStore
	root    Root
	entries []Entry
	probes  [][]byte // all keys, in random order
}

var benchMillion = sync.OnceValue(func() *benchTree {
	const n = 1 << 20
	t := &benchTree{store: newArrayStore(page.SizeDefault, 60000), entries: randomPuts(n, 100, 1, 1)}
	res, err := Merge(context.Background(), &MergeInput{
		PageSize: page.SizeDefault, Policy: Policy{MinVisible: keys.MaxEpoch},
		Input:  func() Input { return &SliceInput{Entries: t.entries} },
		Source: func() Source { return t.store }, Sink: t.store,
	})
	if err != nil {
		panic(err)
	}
	t.root = res.Root
	// Each probe is stored after the one before, so that fetching the key is not what is measured.
	buf := make([]byte, 0, 17*n)
	for _, i := range rand.New(rand.NewPCG(2, 0)).Perm(n) {
		buf = append(buf, t.entries[i].Key...)
	}
	t.probes = slices.Collect(slices.Chunk(buf, 17))
	return t
})

func BenchmarkGet(b *testing.B) {
	t := benchMillion()
	for _, threads := range []int{1, 2} {
		b.Run(fmt.Sprintf("keys=1M/threads=%d", threads), func(b *testing.B) {
			b.ReportAllocs()
			defer cpuPer(b)()
			var wg sync.WaitGroup
			for g := range threads {
				wg.Go(func() {
					for i := range b.N {
						key := t.probes[(i+g<<19)&(1<<20-1)]
						if v, ok, err := Get(t.store, t.root, key, 5); !ok || err != nil || len(v.Value) != 100 {
							panic("missing key")
						}
					}
				})
			}
			wg.Wait()
			b.ReportMetric(float64(threads)*float64(b.N)/b.Elapsed().Seconds()/1e6, "M/s")
		})
	}
	b.Run("keys=1M/hit=no", func(b *testing.B) {
		defer cpuPer(b)()
		key := slices.Clone(t.entries[0].Key)
		for i := range b.N {
			copy(key, t.probes[i&(1<<20-1)])
			key[16] ^= 1
			if _, ok, _ := Get(t.store, t.root, key, 5); ok {
				panic("found")
			}
		}
	})
}

func BenchmarkSeek(b *testing.B) {
	t := benchMillion()
	var c Cursor
	c.Reset(t.store, t.root, 5, nil, nil)
	b.ReportAllocs()
	defer cpuPer(b)()
	for i := range b.N {
		if !c.SeekGE(t.probes[i&(1<<20-1)]) {
			panic("missing key")
		}
	}
}

func BenchmarkScan(b *testing.B) {
	t := benchMillion()
	for _, threads := range []int{1, 2} {
		b.Run(fmt.Sprintf("length=100/threads=%d", threads), func(b *testing.B) {
			b.ReportAllocs()
			defer cpuPer(b)()
			var wg sync.WaitGroup
			for g := range threads {
				wg.Go(func() {
					var c Cursor
					buf := make([]byte, 0, 256)
					for i := range b.N {
						c.Reset(t.store, t.root, 5, nil, nil)
						ok := c.SeekGE(t.probes[(i+g<<19)&(1<<20-1)])
						for i := 0; ok && i < 100; i++ {
							buf = append(append(buf[:0], c.Key()...), c.Version().Value...)
							ok = c.Next()
						}
					}
				})
			}
			wg.Wait()
			b.ReportMetric(float64(threads)*float64(b.N)/b.Elapsed().Seconds()/1e3, "kscans/s")
		})
	}
	for _, forward := range []bool{true, false} {
		b.Run(fmt.Sprintf("length=all/forward=%v", forward), func(b *testing.B) {
			defer cpuPer(b)()
			var c Cursor
			n, sum := 0, 0
			for range b.N {
				c.Reset(t.store, t.root, 5, nil, nil)
				if forward {
					for ok := c.First(); ok; ok = c.Next() {
						n++
						sum += len(c.Key()) + int(c.Version().Value[0])
					}
				} else {
					for ok := c.Last(); ok; ok = c.Prev() {
						n++
						sum += len(c.Key()) + int(c.Version().Value[0])
					}
				}
			}
			b.ReportMetric(float64(n)/b.Elapsed().Seconds()/1e6, "Mentries/s")
		})
	}
}

// BenchmarkMerge merges random new keys into a million, in memory: what a checkpoint costs without
// I/O.
func BenchmarkMerge(b *testing.B) {
	t := benchMillion()
	for _, n := range []int{1, 200, 10_000, 300_000} {
		batch := randomPuts(n, 100, 9, 2)
		for _, workers := range []int{1, 2} {
			b.Run(fmt.Sprintf("keys=%d/workers=%d", n, workers), func(b *testing.B) {
				defer cpuPer(b)()
				mark := t.store.next
				for range b.N {
					t.store.next = mark
					t.store.merge(b, t.root, batch, workers, fillPercent)
				}
				t.store.next = mark
				b.ReportMetric(float64(b.N)*float64(n)/b.Elapsed().Seconds()/1e6, "Mkeys/s")
			})
		}
	}
}

// BenchmarkBulk builds a tree of sorted input from nothing.
func BenchmarkBulk(b *testing.B) {
	entries := benchMillion().entries
	s := newArrayStore(page.SizeDefault, 20000)
	for _, workers := range []int{1, 2} {
		b.Run(fmt.Sprintf("keys=1M/workers=%d", workers), func(b *testing.B) {
			defer cpuPer(b)()
			for range b.N {
				s.next = 2
				s.merge(b, Root{}, entries, workers, 100)
			}
			b.ReportMetric(float64(b.N)*float64(len(entries))/b.Elapsed().Seconds()/1e6, "Mkeys/s")
		})
	}
}
