package backup

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// sink is a target that reads what it is given and keeps nothing.
type sink struct{ written int64 }

func (s *sink) String() string { return "sink:" }

func (s *sink) Create(_ context.Context, _ string, content objectstore.Content) error {
	r, err := content.Open()
	if err != nil {
		return err
	}
	n, err := io.Copy(struct{ io.Writer }{io.Discard}, r)
	s.written += n
	return err
}

func (*sink) Read(context.Context, string, int64, int64) (io.ReadCloser, error) {
	return nil, objectstore.ErrNotFound
}
func (*sink) List(context.Context, string, func(objectstore.Object) error) error { return nil }
func (*sink) Delete(context.Context, string) error                               { return nil }

// processorTime is what this process has taken.
func processorTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // never fails
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkCreate makes full backups of 128 MiB whose values are random for a part, and reports processor time for a MiB of pages, which other
// work on the machine changes little.
func BenchmarkCreate(b *testing.B) {
	for _, random := range []int{0, 50, 100} {
		b.Run(fmt.Sprintf("random=%d%%", random), func(b *testing.B) {
			s := storeWith(b, 128_000, random)
			var m *Manifest
			to := new(sink)
			began, pages := processorTime(), uint64(0)
			for b.Loop() {
				var err error
				m, err = Create(b.Context(), s, to, Options{})
				check(b, err)
				pages += m.LivePages
			}
			mib := float64(pages) * float64(m.State.PageSize) / (1 << 20)
			b.SetBytes(int64(m.LivePages) * int64(m.State.PageSize))
			b.ReportMetric(float64(processorTime()-began)/1e6/mib, "cpu-ms/MiB")
			b.ReportMetric(float64(m.Bytes())/float64(m.LivePages)/float64(m.State.PageSize), "stored/read")
		})
	}
}

var incrementalValues = flag.Int("incremental.values", 128_000, "values of 1,000 bytes in the store of BenchmarkCreateIncremental")

// BenchmarkCreateIncremental makes a backup after 1 % of the values were overwritten, in ranges of 100 neighbouring keys or one by one.
func BenchmarkCreateIncremental(b *testing.B) {
	values := *incrementalValues
	for _, neighbours := range []int{100, 1} {
		s := storeWith(b, values, 50)
		target, err := objectstore.Open(b.TempDir(), objectstore.Options{})
		check(b, err)
		base, err := Create(b.Context(), s, target, Options{})
		check(b, err)
		overwrite(b, s, values, neighbours)
		for _, all := range []bool{true, false} {
			b.Run(fmt.Sprintf("neighbours=%d/all=%v", neighbours, all), func(b *testing.B) {
				benchmarkIncremental(b, s, target, Options{Base: base.ID, ReadAll: all})
			})
		}
	}
}

func benchmarkIncremental(b *testing.B, s *mvcc.Store, target objectstore.Store, o Options) {
	b.Helper()
	var last Progress
	var m *Manifest
	o.Progress = func(p Progress) { last = p }
	began := processorTime()
	for b.Loop() {
		var err error
		m, err = Create(b.Context(), s, target, o)
		check(b, err)
	}
	b.ReportMetric(float64(processorTime()-began)/1e6/float64(b.N), "cpu-ms/op")
	b.ReportMetric(float64(last.Pages), "pages-read")
	b.ReportMetric(float64(m.Pages), "pages-in-backup")
	b.ReportMetric(float64(m.LivePages), "pages-live")
}

// overwrite overwrites 1 % of the values, and makes a checkpoint.
func overwrite(b *testing.B, s *mvcc.Store, values, neighbours int) {
	b.Helper()
	x, err := s.Session()
	check(b, err)
	defer x.Close()
	value := bytes.Repeat([]byte("overwritten "), 83)
	for i := 0; i < values; i += 100 * neighbours {
		for n := range neighbours {
			var w mvcc.Write
			w.Durability = mvcc.DurabilityAsync
			w.Batch.Set(keys.SpaceUser, fmt.Appendf(nil, "key %012d", i+n), value)
			_, err := x.Commit(b.Context(), &w)
			check(b, err)
		}
	}
	check(b, s.Checkpoint(b.Context()))
}

// storeWith is a store with so many values of 1,000 bytes, some percent of each random.
func storeWith(b *testing.B, values, random int) *mvcc.Store {
	b.Helper()
	s, err := mvcc.Open(mvcc.Options{Storage: storage.Options{Dir: b.TempDir(), MemoryBytes: 256 << 20}})
	check(b, err)
	b.Cleanup(func() { check(b, s.Close()) })
	load, err := s.BeginBulkLoad()
	check(b, err)
	rng, value := rand.NewChaCha8([32]byte{}), make([]byte, 1000)
	for i := range values {
		copy(value, "a value that is repeated ")
		_, _ = rng.Read(value[:10*random])
		check(b, load.Add(fmt.Appendf(nil, "key %012d", i), value))
	}
	_, err = load.Commit(b.Context())
	check(b, err)
	check(b, load.Close())
	return s
}

// BenchmarkRestoreBase restores full backups of 128 MiB whose values are random for a part, and reports processor time for a MiB of pages.
func BenchmarkRestoreBase(b *testing.B) {
	for _, random := range []int{0, 50, 100} {
		b.Run(fmt.Sprintf("random=%d%%", random), func(b *testing.B) {
			s := storeWith(b, 128_000, random)
			target, err := objectstore.Open(b.TempDir(), objectstore.Options{})
			check(b, err)
			m, err := Create(b.Context(), s, target, Options{})
			check(b, err)
			began := processorTime()
			for b.Loop() {
				check(b, RestoreBase(b.Context(), target, m, vfs.NewOS(), b.TempDir(), RestoreOptions{}))
			}
			bytes := int64(m.LivePages) * int64(m.State.PageSize)
			b.SetBytes(bytes)
			b.ReportMetric(float64(processorTime()-began)/1e6/(float64(bytes*int64(b.N))/(1<<20)), "cpu-ms/MiB")
		})
	}
}
