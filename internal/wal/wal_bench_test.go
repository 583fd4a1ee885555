package wal

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// benchDir is a directory on the disk under test: TempDir may be in memory.
func benchDir(b *testing.B) string {
	b.Helper()
	dir, err := os.MkdirTemp(".", "bench-*.tmp")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func benchAppender(b *testing.B, fs vfs.FS, dir string, segmentBytes int) *appender {
	b.Helper()
	opts := Options{FS: fs, Dir: dir, SegmentBytes: segmentBytes}
	a, err := startLog(opts, Recovery{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = a.log.Close() })
	return a
}

// discard is a file system that keeps nothing, so that a benchmark measures appending and not a device.
type discard struct{ *vfs.Mem }

func (d discard) Open(name string, mode vfs.Mode) (vfs.File, error) {
	f, err := d.Mem.Open(name, mode)
	if err != nil {
		return nil, err
	}
	return discardFile{f}, nil
}

type discardFile struct{ vfs.File }

func (discardFile) WriteAt(p []byte, _ int64) (int, error) { return len(p), nil }
func (discardFile) Preallocate(int64) error                { return nil }
func (discardFile) Sync() error                            { return nil }
func (discardFile) SyncData() error                        { return nil }

// split runs work on n goroutines, b.N operations in all.
func split(b *testing.B, n int, work func(ops int)) {
	var wg sync.WaitGroup
	b.ReportAllocs()
	b.ResetTimer()
	for w := range n {
		ops := b.N / n
		if w < b.N%n {
			ops++
		}
		wg.Go(func() { work(ops) })
	}
	wg.Wait()
	b.StopTimer()
}

func BenchmarkAppend(b *testing.B) {
	for _, segment := range []int{4 << 20, 64 << 20} {
		for _, writers := range []int{1, 2, 4, 8} {
			for _, oneMutex := range []bool{false, true} {
				b.Run(fmt.Sprintf("segment=%dM/writers=%d/mutex=%v", segment>>20, writers, oneMutex), func(b *testing.B) {
					a := benchAppender(b, discard{vfs.NewMem()}, testDir, segment)
					body := bodyOf(1, 128)
					write := a.append
					if oneMutex { // the baseline
						var mu sync.Mutex
						write = func(body []byte) (keys.Epoch, error) {
							mu.Lock()
							defer mu.Unlock()
							return a.append(body)
						}
					}
					split(b, writers, func(ops int) {
						for range ops {
							if _, err := write(body); err != nil {
								b.Error(err)
								return
							}
						}
					})
				})
			}
		}
	}
}

// BenchmarkSync lets many writers write durable records of 116-byte bodies.
func BenchmarkSync(b *testing.B) {
	for _, writers := range []int{1, 4, 16, 64} {
		b.Run(fmt.Sprintf("writers=%d", writers), func(b *testing.B) {
			a := benchAppender(b, vfs.NewOS(), benchDir(b), 64<<20)
			body := bodyOf(1, 116)
			start := time.Now()
			split(b, writers, func(ops int) {
				for range ops {
					if _, err := a.put(body); err != nil {
						b.Error(err)
						return
					}
				}
			})
			s := a.log.Stats()
			b.ReportMetric(float64(s.Records)/time.Since(start).Seconds(), "records/s")
			b.ReportMetric(float64(s.Syncs)/time.Since(start).Seconds(), "syncs/s")
		})
	}
}

// bareLoop overwrites a preallocated file in pieces and syncs each.
type bareLoop struct {
	file vfs.File
	buf  []byte
	off  int64
}

func newBareLoop(b *testing.B, record int) *bareLoop {
	b.Helper()
	f, err := vfs.NewOS().Open(benchDir(b)+"/bare", vfs.Create)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = f.Close() })
	if err := vfs.PreallocateZeroed(f, 64<<20, nil); err != nil {
		b.Fatal(err)
	}
	return &bareLoop{file: f, buf: bodyOf(1, record), off: headerPage}
}

func (l *bareLoop) run(b *testing.B, n int) {
	for range n {
		if _, err := l.file.WriteAt(l.buf, l.off); err != nil {
			b.Fatal(err)
		}
		if err := l.file.SyncData(); err != nil {
			b.Fatal(err)
		}
		if l.off += int64(len(l.buf)); l.off > 60<<20 {
			l.off = headerPage
		}
	}
}

// BenchmarkLoneWriter alternates short runs of one durable writer with the bare loop, so that both have the same noise. The
// result is the ratio of their medians.
func BenchmarkLoneWriter(b *testing.B) {
	const burst = 50
	a := benchAppender(b, vfs.NewOS(), benchDir(b), 64<<20)
	bare := newBareLoop(b, 144)
	body := bodyOf(1, 116)
	var bareTimes, logTimes []time.Duration
	b.ReportAllocs()
	b.ResetTimer()
	for range max(b.N/(2*burst), 1) {
		start := time.Now()
		bare.run(b, burst)
		middle := time.Now()
		for range burst {
			if _, err := a.put(body); err != nil {
				b.Fatal(err)
			}
		}
		bareTimes = append(bareTimes, middle.Sub(start))
		logTimes = append(logTimes, time.Since(middle))
	}
	slices.Sort(bareTimes)
	slices.Sort(logTimes)
	bareMedian, logMedian := bareTimes[len(bareTimes)/2], logTimes[len(logTimes)/2]
	b.ReportMetric(burst/bareMedian.Seconds(), "bare/s")
	b.ReportMetric(burst/logMedian.Seconds(), "log/s")
	b.ReportMetric(bareMedian.Seconds()/logMedian.Seconds(), "log/bare")
}

// BenchmarkPipeline lets each of a few streams keep many records in flight.
func BenchmarkPipeline(b *testing.B) {
	const streams, inFlight = 8, 32
	a := benchAppender(b, vfs.NewOS(), benchDir(b), 64<<20)
	body := bodyOf(1, 116)
	split(b, streams, func(ops int) {
		for ops > 0 {
			n := min(ops, inFlight)
			ops -= n
			var e keys.Epoch
			for range n {
				e, _ = a.append(body)
			}
			if err := a.log.WaitDurable(context.Background(), e); err != nil {
				b.Error(err)
				return
			}
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "records/s")
}

func BenchmarkReplay(b *testing.B) {
	fs, dir := vfs.NewOS(), benchDir(b)
	const records = 1_000_000
	a := benchAppender(b, fs, dir, 64<<20)
	body := bodyOf(1, 116)
	for range records {
		if _, err := a.append(body); err != nil {
			b.Fatal(err)
		}
	}
	if err := a.log.Close(); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	b.ResetTimer()
	var bytes atomic.Int64
	for range b.N {
		if _, err := Replay(fs, dir, 0, Proof{}, func(_ keys.Epoch, body []byte) error {
			bytes.Add(int64(len(body)))
			return nil
		}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(records*float64(b.N)/b.Elapsed().Seconds(), "records/s")
}

// BenchmarkWaitDurable is the wait for an epoch that is already durable.
func BenchmarkWaitDurable(b *testing.B) {
	a := benchAppender(b, vfs.NewMem(), testDir, 64<<10)
	e, err := a.put(bodyOf(1, 100))
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if err := a.log.WaitDurable(context.Background(), e); err != nil {
			b.Fatal(err)
		}
	}
}
