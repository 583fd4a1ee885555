package wal

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// errnoLog is a log with faults and the newest acknowledged epoch.
type errnoLog struct {
	*appender
	mem          *vfs.Mem
	faulty       *vfs.Faulty
	acknowledged keys.Epoch
}

func mustStartErrnoLog(t *testing.T) *errnoLog {
	t.Helper()
	mem := vfs.NewMem()
	faulty := vfs.NewFaulty(mem)
	e := &errnoLog{appender: mustStart(t, testOptions(faulty, 64<<10)), mem: mem, faulty: faulty}
	e.patient = true
	waitForPreallocated(t, e.log)
	e.mustPut(t, 100)
	return e
}

func (e *errnoLog) mustPut(t *testing.T, size int) {
	t.Helper()
	epoch, err := e.put(bodyOf(uint64(e.acknowledged)+1, size))
	if err != nil {
		t.Fatal(err)
	}
	e.acknowledged = epoch
}

// mustRotate writes until n more segments have begun.
func (e *errnoLog) mustRotate(t *testing.T, n uint64) {
	t.Helper()
	for until := e.log.Stats().Rotations + n; e.log.Stats().Rotations < until; {
		e.mustPut(t, 20<<10)
	}
}

// mustKeep checks that acknowledged records survive a crash, a start after it, and another crash.
func (e *errnoLog) mustKeep(t *testing.T, after keys.Epoch) {
	t.Helper()
	left := e.mem.Crash(1, vfs.SurviveNone)
	rec, got := mustReplay(t, left, after)
	if rec.Last < e.acknowledged {
		t.Fatalf("the log ends at %d; %d was acknowledged", rec.Last, e.acknowledged)
	}
	for i, body := range got.bodies {
		if tag, ok := isBody(body); !ok || tag != uint64(got.first)+uint64(i) {
			t.Fatalf("epoch %d came back with another body", got.first+keys.Epoch(i))
		}
	}
	again, err := startLog(testOptions2(left), rec)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := again.put(bodyOf(1, 100)); err != nil {
		t.Fatal(err)
	}
	mustClose(t, again.log)
}

// TestErrorAboutRecordsIsFinal: any failure of a write or sync of a file with records ends the log for every waiter, and
// the records that were acknowledged before are kept.
func TestErrorAboutRecordsIsFinal(t *testing.T) {
	for _, op := range []vfs.Op{vfs.OpWrite, vfs.OpSyncData} {
		for _, fault := range []vfs.Fault{vfs.Fail, vfs.Short, vfs.Torn, vfs.DiscardDirty} {
			if fault == vfs.DiscardDirty != (op == vfs.OpSyncData) && fault != vfs.Fail {
				continue
			}
			for _, errno := range vfs.Errnos() {
				t.Run(fmt.Sprintf("%v/%d/%v", op, fault, errno), func(t *testing.T) {
					e := mustStartErrnoLog(t)
					rule := e.faulty.Inject(vfs.Rule{Op: op, Name: FileName(1), Nth: 1, Fault: fault, Bytes: 100, Err: errno})
					var wg sync.WaitGroup
					for range 4 {
						wg.Go(func() {
							if _, err := e.put(bodyOf(2, 100)); !errors.Is(err, ErrFailed) || !errors.Is(err, errno) {
								t.Errorf("a writer got %v", err)
							}
						})
					}
					wg.Wait()
					if rule.Fired() != 1 || !errors.Is(e.log.Err(), ErrFailed) {
						t.Fatalf("fired %d times; the error of the log is %v", rule.Fired(), e.log.Err())
					}
					if err := e.log.Close(); !errors.Is(err, ErrFailed) {
						t.Fatalf("close: %v", err)
					}
					left := e.mem.Crash(1, vfs.SurviveNone)
					if rec, _ := mustReplay(t, left, 0); rec.Last < e.acknowledged {
						t.Fatalf("the log ends at %d; %d was acknowledged", rec.Last, e.acknowledged)
					}
				})
			}
		}
	}
}

// TestErrorWithoutRecordsIsTriedAgain: a failure that concerns a file without needed records never ends the log. Writers
// wait, and continue when the cause is gone.
func TestErrorWithoutRecordsIsTriedAgain(t *testing.T) {
	for name, strike := range map[string]struct {
		ops    []vfs.Op
		faults []vfs.Fault
		on     string
	}{
		"new file": {
			[]vfs.Op{vfs.OpCreate, vfs.OpSize, vfs.OpPreallocate, vfs.OpWrite, vfs.OpSync},
			[]vfs.Fault{vfs.Fail, vfs.Short},
			FileName(3), // after the open segment and the preallocated one
		},
		"recycled file": {
			[]vfs.Op{vfs.OpOpen, vfs.OpSize, vfs.OpWrite, vfs.OpSyncData, vfs.OpRename},
			[]vfs.Fault{vfs.Fail, vfs.Short},
			reservePrefix + "*",
		},
		"directory":   {[]vfs.Op{vfs.OpSyncDir}, []vfs.Fault{vfs.Fail}, dirName},
		"file to go":  {[]vfs.Op{vfs.OpRemove}, []vfs.Fault{vfs.Fail}, "*.log"},
		"synced file": {[]vfs.Op{vfs.OpClose}, []vfs.Fault{vfs.Fail}, "*.log"},
	} {
		for _, op := range strike.ops {
			for _, fault := range strike.faults {
				if fault == vfs.Short && op != vfs.OpWrite {
					continue
				}
				for _, errno := range vfs.Errnos() {
					t.Run(fmt.Sprintf("%s/%v/%d/%v", name, op, fault, errno), func(t *testing.T) {
						tryAgain(t, op, fault, errno, name, strike.on)
					})
				}
			}
		}
	}
}

func tryAgain(t *testing.T, op vfs.Op, fault vfs.Fault, errno syscall.Errno, name string, on string) {
	e := mustStartErrnoLog(t)
	truncated := keys.Epoch(0)
	if name != "new file" {
		e.mustRotate(t, recyclableMax+6) // more than are kept
		waitForPreallocated(t, e.log)
		truncated = e.acknowledged - 4
	}
	rule := e.faulty.Inject(vfs.Rule{Op: op, Name: on, Nth: 1, Fault: fault, Bytes: 100, Err: errno})
	if err := e.log.TruncateBefore(truncated + 1); err != nil {
		t.Fatal(err)
	}
	e.mustRotate(t, 1)
	for begun := time.Now(); rule.Fired() == 0; time.Sleep(time.Millisecond) {
		if name != "new file" { // which the rotation has made the background begin
			e.mustRotate(t, 1)
		}
		if time.Since(begun) > 30*time.Second {
			t.Fatal("the fault was never met")
		}
	}
	e.mustRotate(t, 3)
	if err := e.log.Err(); err != nil {
		t.Fatal(err)
	}
	if s := e.log.Stats(); s.PrepareFailures != 1 || s.BufferBytes > BuffersMin*64<<10 {
		t.Errorf("%d failures are counted, want 1; buffers of %d bytes", s.PrepareFailures, s.BufferBytes)
	}
	for begun := time.Now(); e.log.Stats().Preparing != nil; time.Sleep(time.Millisecond) {
		if time.Since(begun) > 30*time.Second {
			t.Fatalf("still failing: %v", e.log.Stats().Preparing)
		}
	}
	if op == vfs.OpRemove {
		mustClose(t, e.log)
		names, err := e.mem.List(Dir(testDir))
		if err != nil {
			t.Fatal(err)
		}
		known := slices.Clone(e.log.preallocator.recyclable)
		rec, _ := mustReplay(t, e.mem, truncated)
		for i, s := range rec.Segments {
			if i+1 == len(rec.Segments) || rec.Segments[i+1].First > truncated+1 {
				known = append(known, s.File)
			}
		}
		for _, name := range names {
			if !slices.Contains(known, path.Join(Dir(testDir), name)) {
				t.Errorf("%s is not in the lists of old files: %q", name, known)
			}
		}
	}
	e.mustKeep(t, truncated)
}

// TestWriterWaitsForASegmentWithItsContext: while no segment can be prepared a rotation ends with its context, and it
// succeeds when the cause is gone.
func TestWriterWaitsForASegmentWithItsContext(t *testing.T) {
	e := mustStartErrnoLog(t)
	e.mustRotate(t, 1)
	waitForPreallocated(t, e.log)
	release := make(chan struct{})
	e.faulty.Inject(vfs.Rule{Op: vfs.OpCreate, Fault: vfs.Slow, Until: release})
	e.mustRotate(t, 1) // takes the preallocated segment; the next preparation fails
	reservation, outcome := e.cur.Load().Seal()
	if outcome != Crossed {
		t.Fatal(outcome)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if _, err := e.log.NewSegment(ctx, reservation.Epoch, 0); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a rotation that cannot get a segment: %v", err)
	}
	close(release)
	s, err := e.log.NewSegment(context.Background(), reservation.Epoch, 0)
	if err != nil {
		t.Fatal(err)
	}
	e.cur.Store(s)
	e.mustPut(t, 100)
	e.mustKeep(t, 0)
}

// TestShortOldFileIsNotUsedAgain: a file that a crash has shortened has too few blocks, which a full device could not
// replace.
func TestShortOldFileIsNotUsedAgain(t *testing.T) {
	e := mustStartErrnoLog(t)
	e.mustRotate(t, 3)
	waitForPreallocated(t, e.log)
	rec, _ := mustReplay(t, e.mem, 0)
	short := rec.Segments[0].File
	f, err := e.mem.Open(short, vfs.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Truncate(10000), f.Close()); err != nil {
		t.Fatal(err)
	}
	last := rec.Segments[len(rec.Segments)-1].First
	if err := e.log.TruncateBefore(last); err != nil {
		t.Fatal(err)
	}
	e.mustRotate(t, 6)
	mustClose(t, e.log)
	names, err := e.mem.List(Dir(testDir))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if size, err := e.mem.Size(path.Join(Dir(testDir), name)); err != nil || size != 64<<10 {
			t.Errorf("%s has %d bytes, %v", name, size, err)
		}
	}
}

// TestDamagedHeaderOfARecycledFileDoesNotMatter: the header of an old segment is never read, so its damage would be
// reported when the file has a new name.
func TestDamagedHeaderOfARecycledFileDoesNotMatter(t *testing.T) {
	e := mustStartErrnoLog(t)
	e.mustRotate(t, 3)
	waitForPreallocated(t, e.log)
	rec, _ := mustReplay(t, e.mem, 0)
	for _, s := range rec.Segments[:2] {
		f, err := e.mem.Open(s.File, vfs.ReadWrite)
		if err != nil {
			t.Fatal(err)
		}
		_, err = f.WriteAt([]byte{0xff}, 20)
		if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	after := rec.Segments[2].First - 1
	if err := e.log.TruncateBefore(after + 1); err != nil {
		t.Fatal(err)
	}
	e.mustRotate(t, 2)
	waitForPreallocated(t, e.log)
	e.mustKeep(t, after)
}

// TestTruncationThatFailsIsRepeated: after a failed write of a header, all segments can still be truncated.
func TestTruncationThatFailsIsRepeated(t *testing.T) {
	e := mustStartErrnoLog(t)
	e.mustRotate(t, 3)
	reservation, _ := e.cur.Load().Seal()
	s, err := e.log.NewSegment(context.Background(), reservation.Epoch, 0)
	if err != nil {
		t.Fatal(err)
	}
	e.cur.Store(s)
	if err := e.log.Flush(reservation.Epoch - 1); err != nil {
		t.Fatal(err)
	}
	if _, err := e.log.flushOnce(); err != nil { // leaves the sealed segment
		t.Fatal(err)
	}
	before := e.log.Stats().Segments
	rule := e.faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Fault: vfs.DiscardDirty, Name: path.Base(s.path), Nth: 1})
	for range 2 {
		err = e.log.TruncateBefore(reservation.Epoch)
		if rule.Fired() != 1 {
			t.Fatal("the fault was not met")
		}
		if err == nil {
			break
		}
	}
	if err != nil || e.log.Err() != nil {
		t.Fatal(err, e.log.Err())
	}
	if n := e.log.Stats().Segments; n != 1 || before < 4 {
		t.Fatalf("%d segments of %d are left", n, before)
	}
	e.mustPut(t, 100)
	e.mustKeep(t, reservation.Epoch-1)
}

// TestOldFileThatCannotBeOpenedIsNotTriedForever: a bad file is dropped and does not prevent rotations.
func TestOldFileThatCannotBeOpenedIsNotTriedForever(t *testing.T) {
	e := mustStartErrnoLog(t)
	e.mustRotate(t, 6)
	waitForPreallocated(t, e.log)
	rule := e.faulty.Inject(vfs.Rule{Op: vfs.OpOpen, Name: reservePrefix + "1"})
	truncated := e.acknowledged - 4
	if err := e.log.TruncateBefore(truncated + 1); err != nil {
		t.Fatal(err)
	}
	rotated := make(chan struct{})
	go func() {
		defer close(rotated)
		e.mustRotate(t, recyclableMax+6) // more than are kept
	}()
	within(t, rotated, "rotations with a file that cannot be opened")
	if rule.Fired() == 0 {
		t.Fatal("the fault was never met")
	}
	e.mustKeep(t, truncated)
}

// TestPreparationWaitsForTheEpochWindow: a rotation that must wait for durable waits for an attempt, with its context, and not
// in NewSegment, which the engine calls under its mutex. With a segment, it waits for no other, which the device may have no room for.
func TestPreparationWaitsForTheEpochWindow(t *testing.T) {
	faulty := vfs.NewFaulty(vfs.NewMem())
	options := testOptions(faulty, 64<<10)
	options.Buffers = 16
	a := mustStart(t, options)
	const most = 64 << 10 / recordHeaderSize
	a.log.window = most + 4000
	waitForPreallocated(t, a.log)
	until := make(chan struct{})
	release := sync.OnceFunc(func() { close(until) })
	t.Cleanup(release)
	faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: FileName(1), Fault: vfs.Slow, Until: until})
	blocked := 0
	for e := keys.Epoch(0); blocked == 0 || e < 20_000; {
		for range 1500 {
			e = a.mustAppend(t, bodyOf(uint64(e), 8))
		}
		for attempt := a.log.Prepare(0, false); attempt != nil; attempt = a.log.Prepare(0, false) {
			within(t, attempt.Done(), "an attempt to prepare")
		}
		full := faulty.Inject(vfs.Rule{Op: vfs.OpSyncDir, Err: syscall.ENOSPC})
		if err := a.log.preallocator.discard(); err != nil {
			t.Fatal(err)
		}
		reservation, outcome := a.cur.Load().Seal()
		if outcome != Crossed {
			t.Fatal(outcome)
		}
		for attempt := a.log.Prepare(0, false); attempt != nil; attempt = a.log.Prepare(0, false) {
			if blocked == 0 && reservation.Epoch+most > a.log.Durable()+a.log.window {
				blocked++
				release()
			}
			within(t, attempt.Done(), "an attempt to prepare")
			if err := attempt.Err(); err != nil {
				t.Fatal(err)
			}
		}
		full.Remove()
		if past := reservation.Epoch + most - a.log.window; reservation.Epoch+most > a.log.window && a.log.Durable() < past {
			t.Fatalf("a segment may begin at %d while %d is durable", reservation.Epoch, a.log.Durable())
		}
		s, err := a.log.NewSegment(t.Context(), reservation.Epoch, 0)
		if err != nil {
			t.Fatal(err)
		}
		a.cur.Store(s)
	}
}
