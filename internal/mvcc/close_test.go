package mvcc

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// stuckOperations is each kind of operation of a device that closing a store may have to wait for.
var stuckOperations = map[string]struct {
	op    vfs.Op
	name  string
	nth   int  // the first one that does not return
	reads bool // the store is opened anew before, so that merges read pages
}{
	"log sync":               {op: vfs.OpSyncData, name: "*.log"},
	"log write":              {op: vfs.OpWrite, name: "*.log"},
	"creation of a segment":  {op: vfs.OpCreate, name: "*.log"},
	"data-file read":         {op: vfs.OpRead, name: "data.ekv", reads: true},
	"data-file write":        {op: vfs.OpWrite, name: "data.ekv"},
	"data-file sync":         {op: vfs.OpSync | vfs.OpSyncData, name: "data.ekv", nth: 1},
	"sync of the superblock": {op: vfs.OpSync | vfs.OpSyncData, name: "data.ekv", nth: 2},
	"close of a file":        {op: vfs.OpClose, name: "*"},
}

// TestShutdownEndsWithAStuckDevice: one operation does not return, neither before nor while the
// store is closed. What needs no device is answered until then, Shutdown returns in time and says
// what may be lost, and what it names durable survives. When the operation returns, closing ends.
func TestShutdownEndsWithAStuckDevice(t *testing.T) {
	for name, c := range stuckOperations {
		t.Run(name, func(t *testing.T) {
			mem := vfs.NewMem()
			fs := vfs.NewFaulty(mem)
			s := mustOpen(t, tiny(fs))
			for i := range 50 {
				mustPut(t, s, fmt.Sprint("k", i), "value")
			}
			if c.reads {
				mustClose(t, s)
				s = mustOpen(t, tiny(fs))
			}
			until := make(chan struct{})
			release := sync.OnceFunc(func() { close(until) })
			t.Cleanup(release)
			rule := fs.Inject(vfs.Rule{Op: c.op, Name: c.name, Nth: c.nth, Sticky: true, Fault: vfs.Slow, Until: until})
			last := mustPutAsync(t, s, "k1", "newer")
			if c.op == vfs.OpCreate { // preallocated segments are used up until one has to be made
				for rule.Fired() == 0 {
					last = mustPutAsync(t, s, "large", string(make([]byte, 4<<10)))
					time.Sleep(time.Millisecond)
				}
			}
			if got := get(t, s, "k1", 0); got != "newer" {
				t.Errorf("a read at the same time finds %q", got)
			}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- s.Shutdown(ctx) }()
			eventually(t, "the fault is met", func() bool { return rule.Fired() > 0 })
			cancel() // the time is up
			var stuck *StuckError
			select {
			case err := <-ended:
				if !errors.As(err, &stuck) {
					t.Fatal(err)
				}
			case <-time.After(time.Minute):
				t.Fatal("Shutdown waits for the device")
			}
			if stuck.Visible != last || stuck.Durable > last {
				t.Errorf("%v; the last commit is %d", stuck, last)
			}
			left := mem.Crash(1, vfs.SurviveNone)
			release()
			eventually(t, "closing ends", s.Closed)
			again := mustOpen(t, tiny(left))
			if e := again.Recovery().Epoch; e < stuck.Durable {
				t.Errorf("the restart recovered epoch %d; %d was reported as durable", e, stuck.Durable)
			}
			for i := range 50 {
				if got := get(t, again, fmt.Sprint("k", i), 0); got != "value" && (i != 1 || got != "newer") {
					t.Errorf("k%d is %q", i, got)
				}
			}
		})
	}
}

// TestShutdownWaitsForASlowDevice: an operation returns before the time is up. Nothing is lost, and
// the end is in order.
func TestShutdownWaitsForASlowDevice(t *testing.T) {
	for name, c := range stuckOperations {
		t.Run(name, func(t *testing.T) {
			mem := vfs.NewMem()
			fs := vfs.NewFaulty(mem)
			s := mustOpen(t, tiny(fs))
			mustPut(t, s, "k", "value")
			until := make(chan struct{})
			rule := fs.Inject(vfs.Rule{Op: c.op, Name: c.name, Nth: c.nth, Sticky: true, Fault: vfs.Slow, Until: until})
			last := mustPutAsync(t, s, "k", "newer")
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			time.AfterFunc(20*time.Millisecond, func() { close(until) })
			if err := s.Shutdown(ctx); err != nil {
				t.Fatal(err)
			}
			if rule.Fired() == 0 && c.op != vfs.OpCreate && c.op != vfs.OpRead {
				t.Error("the fault was not met")
			}
			again := mustOpen(t, tiny(mem.Crash(1, vfs.SurviveNone)))
			if e := again.Recovery().Epoch; e < last || get(t, again, "k", 0) != "newer" {
				t.Errorf("the restart recovered epoch %d, want %d", e, last)
			}
		})
	}
}

// TestShutdownGivesUpTheLastCheckpoint: the time for the merge is up while a write to the data file
// has not returned. When it does, the merge is given up and the log closed in order, with
// everything that was committed.
func TestShutdownGivesUpTheLastCheckpoint(t *testing.T) {
	mem := vfs.NewMem()
	fs := vfs.NewFaulty(mem)
	s := mustOpen(t, tiny(fs))
	mustPut(t, s, "k", "value")
	last := mustPutAsync(t, s, "k", "newer")
	until := make(chan struct{})
	rule := fs.Inject(vfs.Rule{Op: vfs.OpWrite, Name: "data.ekv", Fault: vfs.Slow, Until: until})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Shutdown(ctx) }()
	eventually(t, "the fault is met", func() bool { return rule.Fired() > 0 })
	cancel()
	if err := <-ended; !errors.As(err, new(*StuckError)) {
		t.Fatal(err)
	}
	close(until)
	eventually(t, "closing ends", s.Closed)
	again := mustOpen(t, tiny(mem.Crash(1, vfs.SurviveNone)))
	if r := again.Recovery(); r.Epoch < last || r.Records == 0 || get(t, again, "k", 0) != "newer" {
		t.Errorf("the restart recovered epoch %d with %d records of the log, want %d", r.Epoch, r.Records, last)
	}
}

// TestLastCheckpointHasHalfOfTheTime: the log needs the rest.
func TestLastCheckpointHasHalfOfTheTime(t *testing.T) {
	whole, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	half, done := halfOf(whole)
	defer done()
	if deadline, ok := half.Deadline(); !ok || time.Until(deadline) > 31*time.Minute || time.Until(deadline) < 20*time.Minute {
		t.Errorf("half of an hour ends in %v", time.Until(deadline))
	}
	half, done = halfOf(t.Context())
	defer done()
	if _, ok := half.Deadline(); ok {
		t.Error("half of a time without a bound has a bound")
	}
}

func mustPutAsync(t *testing.T, s *Store, key, value string) keys.Epoch {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	epoch, err := put(x, key, value, DurabilityAsync)
	if err != nil {
		t.Fatal(err)
	}
	return epoch
}

// eventually waits until something holds.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

// TestCloseWithoutTheLastCheckpoint: the device is slow to make a segment of the log, so that the last merge finds none in time. Nothing is lost, and the
// end is in order.
func TestCloseWithoutTheLastCheckpoint(t *testing.T) {
	mem := vfs.NewMem()
	fs := vfs.NewFaulty(mem)
	o := tiny(fs)
	o.Storage.StallMax = 20 * time.Millisecond
	s := mustOpen(t, o)
	mustPut(t, s, "k", "value")
	until := make(chan struct{})
	release := sync.OnceFunc(func() { close(until) })
	t.Cleanup(release)
	fs.Inject(vfs.Rule{Op: vfs.OpCreate, Name: "*.log", Sticky: true, Fault: vfs.Slow, Until: until})
	x := mustSession(t, s)
	for failed := error(nil); failed == nil; {
		if _, failed = put(x, "large", string(make([]byte, 4<<10)), DurabilityAsync); failed != nil && !errors.Is(failed, storage.ErrNoSegment) {
			t.Fatal(failed)
		}
	}
	x.Close()
	last := s.Visible()
	ended := make(chan error, 1)
	go func() { ended <- s.Close() }()
	eventually(t, "the merge has ended", func() bool { return s.lifecycle.step.Load() == &stepFiles })
	release()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	again := mustOpen(t, tiny(mem.Crash(1, vfs.SurviveNone)))
	if r := again.Recovery(); r.Epoch < last || get(t, again, "k", 0) != "value" {
		t.Errorf("the restart recovered epoch %d, want %d", r.Epoch, last)
	}
}

// TestWhichMergesFoundNoRoom: the log has everything, and the next start tries again.
func TestWhichMergesFoundNoRoom(t *testing.T) {
	for err, want := range map[error]bool{
		nil: false, vfs.ErrCrashed: false, ErrFailed: false,
		vfs.ErrNoSpace: true, storage.ErrNoSegment: true, ErrMemoryFull: true, storage.ErrMergeFirst: true,
	} {
		if err != nil {
			err = fmt.Errorf("merge: %w", err)
		}
		if foundNoRoom(err) != want {
			t.Errorf("%v: %t", err, !want)
		}
	}
}
