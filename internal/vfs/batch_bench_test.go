package vfs

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

const benchPage = 8192

// benchFile is a written file of 512 MiB, large enough that few random direct reads hit the device's own cache.
func benchFile(b *testing.B, o *OS) File {
	b.Helper()
	f, err := o.Open(filepath.Join(b.TempDir(), "f"), Create)
	if err != nil {
		b.Skip(err)
	}
	b.Cleanup(func() { mustClose(b, f) })
	if err := PreallocateZeroed(f, 512<<20, nil); err != nil {
		b.Fatal(err)
	}
	return f
}

func benchRequests(count int) []Request {
	reqs := make([]Request, count)
	for i := range reqs {
		reqs[i].Buf = AlignedBuffer(benchPage)
	}
	return reqs
}

// scatter gives the requests new random offsets.
func scatter(rng *rand.Rand, reqs []Request) {
	for i := range reqs {
		reqs[i].Offset = rng.Int64N(512<<20/benchPage) * benchPage
	}
}

func cpuNanos() int64 {
	var usage unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &usage)
	return usage.Utime.Nano() + usage.Stime.Nano()
}

// reportPages reports pages per second and processor time per page.
func reportPages(b *testing.B, count int, cpu int64) {
	pages := float64(b.N * count)
	b.ReportMetric(pages/b.Elapsed().Seconds(), "pages/s")
	b.ReportMetric(float64(cpu)/pages, "cpu-ns/page")
}

type benchArm struct {
	name string
	os   *OS
	do   func(f File, op Op, reqs []Request) error
}

func benchBatch(f File, op Op, reqs []Request) error {
	if op == OpRead {
		return f.ReadBatch(reqs)
	}
	return f.WriteBatch(reqs)
}

func benchSerial(f File, op Op, reqs []Request) error {
	for i := range reqs {
		runOne(f.(*osFile), op, &reqs[i], 0)
	}
	return firstError(reqs)
}

func benchArms(b *testing.B, direct bool) []benchArm {
	pread, ring := NewOS(), mustOpenOS(b, IOUring)
	if direct {
		pread, ring = pread.Direct(), ring.Direct()
	}
	return []benchArm{{"serial", pread, benchSerial}, {"pool", pread, benchBatch}, {"ring", ring, benchBatch}}
}

// BenchmarkBatch compares the methods to read and to write scattered pages.
func BenchmarkBatch(b *testing.B) {
	for _, direct := range []bool{true, false} {
		for _, op := range []Op{OpRead, OpWrite} {
			for _, count := range []int{2, 4, 8, 64} {
				for _, arm := range benchArms(b, direct) {
					b.Run(fmt.Sprintf("direct=%v/op=%v/count=%d/way=%s", direct, op, count, arm.name), func(b *testing.B) {
						f, reqs, rng := benchFile(b, arm.os), benchRequests(count), rand.New(rand.NewPCG(1, 2))
						cpu := cpuNanos()
						b.ReportAllocs()
						for b.Loop() {
							scatter(rng, reqs)
							if err := arm.do(f, op, reqs); err != nil {
								b.Fatal(err)
							}
						}
						reportPages(b, count, cpuNanos()-cpu)
					})
				}
			}
		}
	}
}

// BenchmarkColdBufferedBatch reads scattered pages that the page cache does not have.
func BenchmarkColdBufferedBatch(b *testing.B) {
	const count = 64
	for _, arm := range benchArms(b, false) {
		b.Run("way="+arm.name, func(b *testing.B) {
			f, reqs, rng := benchFile(b, arm.os), benchRequests(count), rand.New(rand.NewPCG(1, 2))
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				scatter(rng, reqs)
				if err := unix.Fadvise(f.(*osFile).fd, 0, 0, unix.FADV_DONTNEED); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
				if err := arm.do(f, OpRead, reqs); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.N*count)/b.Elapsed().Seconds(), "pages/s")
		})
	}
}

// BenchmarkCheckpointWrites is what a checkpoint does: windows of pages, contiguous or scattered, then one sync.
func BenchmarkCheckpointWrites(b *testing.B) {
	const count, windows = 32, 4
	for _, direct := range []bool{true, false} {
		for _, contiguous := range []bool{true, false} {
			arms := append(benchArms(b, direct), benchArm{"vectors", benchArms(b, direct)[0].os, func(f File, _ Op, reqs []Request) error {
				doRuns(f.(*osFile), OpWrite, reqs)
				return firstError(reqs)
			}})
			for _, arm := range arms {
				b.Run(fmt.Sprintf("direct=%v/contiguous=%v/way=%s", direct, contiguous, arm.name), func(b *testing.B) {
					f, reqs, rng := benchFile(b, arm.os), benchRequests(count), rand.New(rand.NewPCG(1, 2))
					cpu, next := cpuNanos(), int64(0)
					b.ReportAllocs()
					for b.Loop() {
						for range windows {
							scatter(rng, reqs)
							for i := range reqs {
								if contiguous {
									reqs[i].Offset = next % (512 << 20)
									next += benchPage
								}
							}
							if err := arm.do(f, OpWrite, reqs); err != nil {
								b.Fatal(err)
							}
						}
						mustSync(b, f)
					}
					reportPages(b, count*windows, cpuNanos()-cpu)
				})
			}
		}
	}
}
