package feed

import (
	"bytes"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// BenchmarkCatchUp reads the log for watches that lag, up to what their consumers get, without encoding it. An operation of the
// benchmark is a commit of one key with a request id: its record is the second operation.
func BenchmarkCatchUp(b *testing.B) {
	const commits = 50_000
	s := newStore(b, 4<<20)
	value := string(bytes.Repeat([]byte("v"), 100))
	var last keys.Epoch
	for i := range commits {
		record := op{keys.KindSet, string(keys.Append(nil, keys.SpaceSystem, fmt.Appendf(nil, "q%016d", i))), "a record"}
		last = s.append(batch.Header{Time: uint64(i)}, record, set(fmt.Sprintf("%016d", i%1000), value))
	}
	s.flush(last)
	s.show(last)
	for _, c := range []struct {
		name    string
		watches int
		keys    int // that are watched, one by each watch; 0: all by each
	}{{"watches=1", 1, 0}, {"watches=20", 20, 0}, {"watches=1/keys=1", 1, 1}, {"watches=1000/keys=1000", 1000, 1000}, {"watches=10000/keys=1000", 10_000, 1000}} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			began := processorTime()
			for n := 0; n < b.N; n += commits {
				f := New(s, Options{manual: true})
				for i := range c.watches {
					o := WatchOptions{}
					if c.keys > 0 {
						o.Ranges = []Range{pointRange(fmt.Appendf(nil, "%016d", i%c.keys))}
					}
					mustWatch(b, f.NewConsumer("client"), o)
				}
				drain(b, f, c.watches)
				f.Close()
			}
			b.ReportMetric(float64(processorTime()-began)/float64(b.N), "cpu-ns/op")
		})
	}
}

// processorTime is that of this process. Time alone says little on a machine that does something else.
func processorTime() time.Duration {
	var used syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &used)
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// drain takes steps until the watches, each of a consumer of its own, have what there is.
func drain(b *testing.B, f *Feed, watches int) {
	b.Helper()
	var r reading
	defer r.close()
	for live := 0; live < watches; {
		if !f.readWith(&r) {
			b.Fatal("no watch is read for")
		}
		live = watches
		for _, w := range f.watches {
			for d, more := w.consumer.Next(Limit{}); more; d, more = w.consumer.Next(Limit{}) {
				d.Release()
			}
			if w.state != StateLive {
				live = 0
			}
		}
	}
}
