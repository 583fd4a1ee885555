package mvcc

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"runtime/pprof"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
)

var stuckStep = flag.Int("stuck.step", 70, "TestStuckDataFileStopsNothingElse holds one of so many operations")

// stuckBound is how long a call may take that needs no operation of the data file, on a busy machine.
const stuckBound = 20 * time.Second

// stuckOptions are those of a store whose memory a test can fill.
func stuckOptions(fs vfs.FS) Options {
	o := tiny(fs)
	o.Storage.MemoryBytes, o.Storage.StallMax = 4<<20, 50*time.Millisecond
	o.Storage.DiskReserve = storage.DiskReserveDerived
	return o
}

// inTime fails the test unless f returns in time.
func inTime(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(stuckBound):
		_ = pprof.Lookup("goroutine").WriteTo(os.Stderr, 1) // for what it waits
		t.Fatalf("%s waits for the data file", what)
	}
}

// paused reports whether a bulk load stops commits.
func (m *moves) paused() bool { return m.s.latches.table[stripes-1].state.Load()&latchHeld != 0 }

// goOn uses the store while an operation of the data file does not return.
func (m *moves) goOn(at map[string]string, x *Session) {
	t := m.t
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	inTime(t, "a read", func() { m.check(x, at) })
	inTime(t, "the status", func() { m.s.Stats() })
	inTime(t, "a checkpoint with a deadline", func() {
		if err := m.s.Checkpoint(ctx); err == nil {
			t.Error("a checkpoint succeeds")
		}
	})
	inTime(t, "a verification with a deadline", func() {
		if _, err := m.s.Verify(ctx, inspect.VerifyOptions{}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a verification: %v", err)
		}
	})
	for _, d := range []Durability{DurabilityAsync, DurabilitySync} {
		inTime(t, "a put", func() {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			if m.paused() {
				ctx, cancel = context.WithTimeout(ctx, 20*time.Millisecond)
				defer cancel()
			}
			y := mustSession(t, m.s)
			defer y.Close()
			w := Write{Durability: d}
			w.Set([]byte("unrelated"), []byte(fmt.Sprint(d)))
			epoch, err := y.Commit(ctx, &w)
			if err == nil {
				err = m.s.Wait(ctx, epoch, d)
			}
			if err != nil && !(m.paused() && errors.Is(err, context.DeadlineExceeded)) {
				t.Errorf("a put: %v", err)
			}
		})
	}
	if m.paused() {
		return
	}
	m.s.StopThrottling() // which would only delay the writer until the memory is full
	inTime(t, "a writer in full memory", func() {
		y := mustSession(t, m.s)
		defer y.Close()
		for i := 0; ; i++ {
			_, err := put(y, fmt.Sprint("fill", i%10), strings.Repeat("v", 4000), DurabilityAsync)
			if err == nil || errors.Is(err, storage.ErrNoSegment) { // see putWithSegment
				continue
			}
			if !errors.Is(err, ErrMemoryFull) && !errors.Is(err, storage.ErrReserveUnchecked) {
				t.Errorf("a writer in full memory: %v", err)
			}
			return
		}
	})
}

// putWithSegment puts a value. On a busy machine the goroutine that prepares log segments may get no processor for the short
// StallMax of these tests; then the put is refused, and is repeated.
func putWithSegment(s *Store, key, value string) error {
	x, err := s.Session()
	if err != nil {
		return err
	}
	defer x.Close()
	for {
		if _, err = put(x, key, value, DurabilityAsync); !errors.Is(err, storage.ErrNoSegment) {
			return err
		}
	}
}

// stuckWork is what is at work when the data file stops answering.
var stuckWork = map[string]func(m *moves, ctx context.Context, entries map[string]string) error{
	"page moves": func(m *moves, ctx context.Context, _ map[string]string) error {
		for range 6 {
			if err := m.s.Checkpoint(ctx); err != nil {
				return err
			}
			if err := putWithSegment(m.s, "unrelated", "more"); err != nil {
				return err
			}
		}
		return nil
	},
	"bulk load": func(m *moves, ctx context.Context, entries map[string]string) (err error) {
		l, err := m.s.BeginBulkLoad()
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, l.Close()) }()
		for k, v := range entries {
			if err := l.Add([]byte(k), []byte(v)); err != nil {
				return err
			}
		}
		_, err = l.Commit(ctx)
		return err
	},
}

// TestStuckDataFileStopsNothingElse lets one operation of the data file, and all after it, wait while checkpoints move pages
// and while a bulk load is built and published. Reads and the status answer; waits for the checkpoint end with their
// contexts; puts succeed, or end with their contexts in the commit pause of a bulk load; writers that fill the memory are
// refused. When the operations return, everything goes on, also if the context of the work has ended meanwhile. With
// -stuck.step 1 it holds every operation, in a minute.
func TestStuckDataFileStopsNothingElse(t *testing.T) {
	prepared := vfs.NewMem()
	first := &moves{t: t, fs: prepared, faulty: vfs.NewFaulty(prepared), want: map[string]string{}}
	if err := first.open(); err != nil {
		t.Fatal(err)
	}
	first.prepare()
	if err := first.s.Close(); err != nil {
		t.Fatal(err)
	}
	disk := prepared.Crash(0, vfs.SurviveAll)
	entries := map[string]string{}
	for i := range 200 {
		entries[moveKey(i*7)] = strings.Repeat(fmt.Sprint("loaded ", i), 10+i%3*800)
	}
	for name, work := range stuckWork {
		t.Run(name, func(t *testing.T) {
			for nth := 1; holdOperation(t, disk.Crash(uint64(nth), vfs.SurviveAll), nth, maps.Clone(first.want), entries, work); nth += *stuckStep {
			}
		})
	}
}

// holdOperation lets an operation wait, and reports whether there was one.
func holdOperation(t *testing.T, fs *vfs.Mem, nth int, want, entries map[string]string, work func(*moves, context.Context, map[string]string) error) bool {
	m := &moves{t: t, fs: fs, faulty: vfs.NewFaulty(fs), want: want}
	m.s = mustOpen(t, stuckOptions(m.faulty))
	x := mustSession(t, m.s)
	if _, err := x.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	until := make(chan struct{})
	release := sync.OnceFunc(func() { close(until) })
	t.Cleanup(release)
	rule := m.faulty.Inject(vfs.Rule{Op: vfs.OpMutating, Name: "data.ekv", Nth: nth, Sticky: true, Fault: vfs.Slow, Until: until})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- work(m, ctx, entries) }()
	var err error
	done := false
	eventually(t, "the operation is met, or there is none", func() bool {
		select {
		case err = <-ended:
			done = true
		default:
		}
		return done || rule.Fired() > 0
	})
	fired := rule.Fired() > 0
	if fired {
		m.goOn(maps.Clone(want), x)
	}
	x.CloseSnapshot()
	x.Close()
	if nth%2 == 0 {
		cancel()
	}
	release()
	if !done {
		err = <-ended
	}
	switch {
	case err == nil && len(entries) > 0 && m.s.Stats().Storage.BulkLoads.Finished > 0:
		maps.Copy(want, entries)
	case err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, ErrMemoryFull) && !errors.Is(err, storage.ErrNoSegment):
		t.Fatalf("operation %d: %v", nth, err)
	}
	y := mustSession(t, m.s)
	m.checkNow(y)
	y.Close()
	eventually(t, "memory is free again", func() bool {
		y := mustSession(t, m.s)
		defer y.Close()
		_, err := put(y, "unrelated", "after", DurabilitySync)
		return err == nil
	})
	mustClose(t, m.s)
	return fired
}

// TestStuckReserveRefusesWritersInTime: the disk reserve cannot be checked because the device does not answer. A writer
// without a deadline, which holds latches, is refused after StallMax, and the store goes on when the device answers.
func TestStuckReserveRefusesWritersInTime(t *testing.T) {
	fs := vfs.NewFaulty(vfs.NewMem())
	s := mustOpen(t, stuckOptions(fs))
	until := make(chan struct{})
	release := sync.OnceFunc(func() { close(until) })
	t.Cleanup(release)
	fs.Inject(vfs.Rule{Op: vfs.OpPreallocate, Name: "data.ekv", Fault: vfs.Slow, Until: until})
	var err error
	inTime(t, "a writer", func() {
		x := mustSession(t, s)
		defer x.Close()
		for err == nil {
			_, err = put(x, "k", strings.Repeat("v", 4000), DurabilityAsync)
		}
	})
	if !errors.Is(err, storage.ErrReserveUnchecked) {
		t.Errorf("a writer that has waited long enough: %v", err)
	}
	release()
	mustPut(t, s, "k", "w")
}
