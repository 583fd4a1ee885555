package feed

import (
	"fmt"
	"math"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/wal"
)

// BenchmarkIndex asks for the live watches of commits of some operations. BenchmarkIndexChurn begins and ends watches.
func BenchmarkIndex(b *testing.B) {
	for _, operations := range []int{1, 100} {
		for _, one := range indexLoads {
			b.Run(fmt.Sprintf("%s/operations=%d", one.name, operations), func(b *testing.B) {
				f := one.begin(b)
				rng := rngOf(1)
				var commits []*Commit
				for range 1000 {
					key := func() string { return fmt.Sprintf("k/%05d/%03d", rng.IntN(100_000), rng.IntN(1000)) }
					commits = append(commits, commitWith(b, f, batch.OriginClient, func() bool { return false }, key, operations))
				}
				b.ReportAllocs()
				b.ResetTimer()
				began := processorTime()
				for i := range b.N {
					if _, all := f.index.candidates(commits[i%len(commits)], true, math.MaxInt); !all {
						b.Fatal("not all are found")
					}
				}
				b.ReportMetric(float64(processorTime()-began)/float64(b.N), "cpu-ns/op")
			})
		}
	}
}

func BenchmarkIndexChurn(b *testing.B) {
	for _, one := range indexLoads {
		b.Run(one.name, func(b *testing.B) {
			f := one.begin(b)
			var all []*Watch
			for _, w := range f.watches {
				all = append(all, w)
			}
			b.ReportAllocs()
			b.ResetTimer()
			began := processorTime()
			for i := range b.N {
				w := all[i%len(all)]
				f.index.demote(w)
				f.index.remove(w)
				w.state = StateLagging
				f.index.add(w)
				f.index.promote(w)
				w.state = StateLive
			}
			b.ReportMetric(float64(processorTime()-began)/float64(b.N), "cpu-ns/op")
		})
	}
}

// indexLoads are watches of single keys, of prefixes, and of everything.
var indexLoads = []indexLoad{
	{"everything=1", 1, func(int) []Range { return nil }},
	{"prefixes=100", 100, func(i int) []Range { return prefix("k/%03d", i) }},
	{"prefixes=100000", 100_000, func(i int) []Range { return prefix("k/%05d/", i) }},
	{"keys=1000", 1000, func(i int) []Range { return []Range{pointRange(fmt.Appendf(nil, "k/%05d/%03d", i, i))} }},
	{"keys=100000", 100_000, func(i int) []Range { return []Range{pointRange(fmt.Appendf(nil, "k/%05d/%03d", i, i%1000))} }},
	{"mixed=1201", 1201, func(i int) []Range {
		switch {
		case i == 0:
			return nil
		case i <= 200:
			return prefix("k/%03d", i*5)
		}
		return []Range{pointRange(fmt.Appendf(nil, "k/%05d/%03d", i, i))}
	}},
	{"wide=10000", 10_000, func(i int) []Range { return []Range{{fmt.Appendf(nil, "zz/%05d", i), []byte("zzz")}} }},
}

type indexLoad struct {
	name    string
	watches int
	ranges  func(i int) []Range
}

func prefix(format string, i int) []Range {
	p := fmt.Appendf(nil, format, i)
	end := append([]byte(nil), p...)
	end[len(end)-1]++
	return []Range{{p, end}}
}

func (l *indexLoad) begin(b *testing.B) *Feed {
	b.Helper()
	f := New(nil, Options{manual: true})
	for i := range l.watches {
		wanted, err := newFilter(keys.SpaceUser, l.ranges(i), 0, 0)
		if err != nil {
			b.Fatal(err)
		}
		w := &Watch{ID: uint64(i), feed: f, filter: wanted, standing: standing{state: StateLive}}
		f.watches[w.ID] = w
		f.index.add(w)
	}
	return f
}

// BenchmarkDispatch decodes commits of one operation, offers them to live watches, and takes them.
func BenchmarkDispatch(b *testing.B) {
	for _, one := range indexLoads {
		b.Run(one.name, func(b *testing.B) {
			f := New(newStore(b, 1<<16), Options{manual: true})
			defer f.Close()
			c := f.NewConsumer("client")
			f.options.ConsumerWatchesMax = one.watches
			for i := range one.watches {
				mustWatch(b, c, WatchOptions{Ranges: one.ranges(i), Now: true})
			}
			rng := rngOf(1)
			var bodies [][]byte
			for range 1000 {
				key := func() string { return fmt.Sprintf("k/%05d/%03d", rng.IntN(100_000), rng.IntN(1000)) }
				bodies = append(bodies, commitWith(b, f, batch.OriginClient, func() bool { return false }, key, 1).body)
			}
			epoch := f.ring.dispatched
			b.ResetTimer()
			began := processorTime()
			for i := range b.N {
				epoch++
				got, err := f.decode(&wal.TailRecord{Epoch: epoch, Body: bodies[i%len(bodies)]})
				if err != nil {
					b.Fatal(err)
				}
				f.lock()
				f.dispatchLocked(got, false)
				f.unlock()
				for d, more := c.Next(Limit{}); i%100 == 0 && more; d, more = c.Next(Limit{}) {
					d.Release()
				}
			}
			b.ReportMetric(float64(processorTime()-began)/float64(b.N), "cpu-ns/op")
		})
	}
}
