package wal

import (
	"context"
	"errors"
	"path"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// tailed reads what a reader returns up to an epoch: for each record its epoch, and for a gap its epoch below zero.
func tailed(t *testing.T, r *TailReader, through keys.Epoch) (got []int64) {
	t.Helper()
	for {
		rec, ok, err := r.Next(through)
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			return got
		}
		e := int64(rec.Epoch)
		if tag, whole := isBody(rec.Body); rec.Gap {
			e = -e
		} else if len(rec.Body) > 0 && (!whole || tag&(1<<48-1) != uint64(rec.Epoch)) {
			t.Fatalf("epoch %d has the record of %x", rec.Epoch, tag)
		}
		got = append(got, e)
	}
}

func wantTail(t *testing.T, got []int64, from, to int64, gaps ...int64) {
	t.Helper()
	next := from
	for _, e := range got {
		if len(gaps) > 0 && e == -gaps[0] {
			next, gaps = gaps[0]+1, gaps[1:]
			continue
		}
		if e != next {
			t.Fatalf("epoch %d instead of %d in %v", e, next, got)
		}
		next++
	}
	if next != to+1 || len(gaps) > 0 {
		t.Fatalf("%v, want %d to %d", got, from, to)
	}
}

func (a *appender) mustRun(t *testing.T, n int) keys.Epoch {
	t.Helper()
	last, err := a.appendRun(1, n)
	if err != nil {
		t.Fatal(err)
	}
	return last
}

// TestTailFollowsTheLog reads a log of tiny segments while it is written, from its begin, from the middle, and from marks.
func TestTailFollowsTheLog(t *testing.T) {
	a := mustStart(t, testOptions(vfs.NewMem(), SegmentBytesMin))
	r := a.log.ReadFrom(1, TailMark{})
	defer r.Close()
	for last := keys.Epoch(0); last < 100; {
		from := last + 1
		last = a.mustRun(t, 7)
		wantTail(t, tailed(t, r, last-2), int64(from), int64(last-2))
		mark := r.Mark()
		wantTail(t, tailed(t, r, last), int64(last-1), int64(last))
		for _, m := range []TailMark{mark, {}, {number: mark.number + 9, offset: 7}} {
			again := a.log.ReadFrom(last-1, m)
			wantTail(t, tailed(t, again, last), int64(last-1), int64(last))
			if bytes, known := mark.BytesTo(again.Mark()); !known && mark.number == again.Mark().number || known && bytes < 0 {
				t.Fatalf("%d bytes from %+v to %+v", bytes, mark, again.Mark())
			}
			_ = again.Close()
		}
	}
	reservation, _ := a.cur.Load().Reserve(8)
	a.cur.Load().PublishNoOp(reservation)
	if err := a.log.Flush(reservation.Epoch); err != nil {
		t.Fatal(err)
	}
	wantTail(t, tailed(t, r, reservation.Epoch), int64(reservation.Epoch), int64(reservation.Epoch))
}

// TestTailGoesOnFromMemory: More returns what Next returns, reads nothing, and leaves the bodies that came before as they are; Seek
// goes back to a mark, and reads nothing again that is in memory.
func TestTailGoesOnFromMemory(t *testing.T) {
	a := mustStart(t, testOptions(vfs.NewMem(), SegmentBytesMin))
	r := a.log.ReadFrom(1, TailMark{})
	defer r.Close()
	fromMemory, sought := 0, 0
	for last, next := a.mustRun(t, 5), keys.Epoch(1); last < 200; {
		first, ok, err := r.Next(last)
		if !ok || err != nil || first.Epoch != next {
			t.Fatalf("%+v, %v, %v, want epoch %d", first, ok, err, next)
		}
		mark, read, all := r.Mark(), r.BytesRead(), []TailRecord{first}
		last = a.mustRun(t, 5) // some of it is in the segment that the reader reads, and not in its memory
		for rec, ok := r.More(last); ok; rec, ok = r.More(last) {
			all = append(all, rec)
		}
		if r.BytesRead() != read {
			t.Fatalf("%d bytes were read", r.BytesRead()-read)
		}
		for i, rec := range all {
			if tag, whole := isBody(rec.Body); !whole || rec.Epoch != next+keys.Epoch(i) || tag&(1<<48-1) != uint64(rec.Epoch) {
				t.Fatalf("epoch %d has the record of %x", rec.Epoch, tag)
			}
		}
		fromMemory += len(all) - 1
		if next = r.Position(); r.Seek(mark.Epoch(), mark) {
			sought++
			wantTail(t, tailed(t, r, next-1), int64(mark.Epoch()), int64(next-1))
			if r.BytesRead() != read {
				t.Fatalf("%d bytes were read again", r.BytesRead()-read)
			}
		}
	}
	if fromMemory < 50 || sought < 10 {
		t.Errorf("%d records from memory, %d times back: the test tests little", fromMemory, sought)
	}
	if at := r.Position(); r.Seek(1, TailMark{number: 1, offset: headerPage, epoch: 1}) || r.Seek(at, TailMark{}) || r.Position() != at {
		t.Error("went to a place that is not in the segment at hand")
	}
}

// TestTailDoesNotGoOnInAHistoryThatHasGone: what is in memory may not be part of the history any more.
func TestTailDoesNotGoOnInAHistoryThatHasGone(t *testing.T) {
	a, err := startLog(lineageOptions(vfs.NewMem()), Recovery{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.log.Close()
	a.mustRun(t, 40)
	r := a.log.ReadFrom(28, TailMark{})
	defer r.Close()
	wantTail(t, tailed(t, r, 28), 28, 28)
	if err := a.supersede(30, 1); err != nil {
		t.Fatal(err)
	}
	if last, err := a.appendRun(2, 15); err != nil || last != 44 {
		t.Fatal(last, err)
	}
	if rec, ok := r.More(44); ok {
		t.Fatalf("%+v comes from memory", rec)
	}
}

// TestTailTellsGapsApart: a restart after an unclean end skips epochs with a record, a bulk load does so without one.
func TestTailTellsGapsApart(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, SegmentBytesMin))
	last := a.mustRun(t, 20)
	sealed, _ := a.cur.Load().Seal()
	a.log.Skip(sealed.Epoch + 100) // a bulk load at the epoch before, and no commit since
	r := a.log.ReadFrom(1, TailMark{})
	defer r.Close()
	wantTail(t, tailed(t, r, last+50), 1, int64(last))
	wantTail(t, tailed(t, r, last+100), int64(last+1), int64(last+100), int64(last+100))
	s, err := a.log.NewSegment(context.Background(), sealed.Epoch+100, 0)
	if err != nil {
		t.Fatal(err)
	}
	a.cur.Store(s)
	end := a.mustRun(t, 30)
	wantTail(t, tailed(t, r, end), int64(last+101), int64(end))

	sealed, _ = a.cur.Load().Seal()
	a.log.Skip(sealed.Epoch + 100) // another one, before a crash
	crashed := fs.Crash(1, vfs.SurviveNone)
	rec, err := Recover(crashed, testDir, end+100, Proof{}, func(Commit) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	b, err := startLog(testOptions(crashed, SegmentBytesMin), rec)
	if err != nil {
		t.Fatal(err)
	}
	defer b.log.Close()
	next := b.mustRun(t, 10)
	again := b.log.ReadFrom(1, TailMark{})
	defer again.Close()
	wantTail(t, tailed(t, again, next), 1, int64(next), int64(last+100), int64(end+100), int64(rec.Next()-1))
}

// TestALostCloseRecordBeforeAGapFailsTheLog: only the close record tells a restart that nothing is missing in the gap that a bulk load
// leaves. If it cannot be made durable, nothing after it may be acknowledged, because the restart could not trust it.
func TestALostCloseRecordBeforeAGapFailsTheLog(t *testing.T) {
	for name, op := range map[string]vfs.Op{"write": vfs.OpWrite, "sync": vfs.OpSyncData} {
		t.Run(name, func(t *testing.T) {
			fs := vfs.NewMem()
			faulty := vfs.NewFaulty(fs)
			a := mustStart(t, testOptions(faulty, SegmentBytesMin))
			last := a.mustRun(t, 20)
			if err := a.log.WaitDurable(t.Context(), last); err != nil {
				t.Fatal(err)
			}
			before := a.cur.Load()
			sealed, _ := before.Seal()
			a.log.Skip(sealed.Epoch + 100)
			rule := faulty.Inject(vfs.Rule{Op: op, Name: path.Base(before.path), Nth: 1})
			s, err := a.log.NewSegment(t.Context(), sealed.Epoch+100, 0)
			if err != nil {
				t.Fatal(err)
			}
			a.cur.Store(s)
			if e, err := a.put(bodyOf(1, 100)); !errors.Is(err, ErrFailed) {
				t.Errorf("epoch %d after a gap without a close record: %v", e, err)
			}
			if rule.Fired() != 1 {
				t.Errorf("the fault came %d times", rule.Fired())
			}
		})
	}
}

// TestTailReadsSkippedEpochsBeforeTheFirstCommit: after an unclean end the epochs that are skipped count as durable at once. A reader
// passes them although nothing was written since.
func TestTailReadsSkippedEpochsBeforeTheFirstCommit(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, SegmentBytesMin))
	last := a.mustRun(t, 20)
	if err := a.log.Flush(last); err != nil {
		t.Fatal(err)
	}
	crashed := fs.Crash(1, vfs.SurviveNone)
	rec, _ := mustReplay(t, crashed, 0)
	b, err := startLog(testOptions(crashed, SegmentBytesMin), rec)
	if err != nil {
		t.Fatal(err)
	}
	defer mustClose(t, b.log)
	for _, from := range []keys.Epoch{1, last, last + 1, last + 2, rec.Next() - 1} {
		r := b.log.ReadFrom(from, TailMark{})
		got := tailed(t, r, b.log.Durable())
		if end := -int64(rec.Next() - 1); len(got) == 0 || got[len(got)-1] != end || len(got) != int(max(last+1, from)-from)+1 {
			t.Errorf("from epoch %d: %v, want the end %d", from, got, end)
		}
		_ = r.Close()
	}
}

func TestTailReadsTheHistoryThatIsLeft(t *testing.T) {
	a, err := startLog(lineageOptions(vfs.NewMem()), Recovery{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.log.Close()
	a.mustRun(t, 40)
	r := a.log.ReadFrom(1, TailMark{})
	defer r.Close()
	wantTail(t, tailed(t, r, 29), 1, 29)
	if err := a.supersede(30, 1); err != nil {
		t.Fatal(err)
	}
	if last, err := a.appendRun(2, 15); err != nil || last != 44 {
		t.Fatal(last, err)
	}
	for rec, ok, err := r.Next(44); ok || err != nil; rec, ok, err = r.Next(44) {
		tag, _ := isBody(rec.Body)
		if err != nil || tag != tagOf(2, rec.Epoch) {
			t.Fatalf("epoch %d has the record %x, %v", rec.Epoch, tag, err)
		}
	}
	if r.Position() != 45 {
		t.Fatalf("at %d", r.Position())
	}
}

// TestTailTellsDamageFromTruncation: a file that was recycled under a reader has records of another identity.
func TestTailTellsDamageFromTruncation(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, SegmentBytesMin))
	a.mustRun(t, 100)
	r := a.log.ReadFrom(1, TailMark{})
	defer r.Close()
	wantTail(t, tailed(t, r, 3), 1, 3)
	damaged := a.log.ReadFrom(50, TailMark{})
	defer damaged.Close()
	wantTail(t, tailed(t, damaged, 50), 50, 50)
	damaged.buf = nil
	flip(t, fs, damaged.segment.File, damaged.pos+recordHeaderSize+5)
	_, _, err := damaged.Next(100)
	if c, ok := errors.AsType[*CorruptionError](err); !ok || c.Epoch != 51 {
		t.Fatalf("%v", err)
	}
	if next, ok := a.log.SegmentAfter(51); !ok || next <= 51 || next > 51+30 {
		t.Fatalf("the next segment begins at %d (%v)", next, ok)
	}
	if err := a.log.TruncateBefore(90); err != nil {
		t.Fatal(err)
	}
	a.mustRun(t, 100) // the old files are written anew
	r.buf = nil
	_, _, err = r.Next(100)
	if gone, ok := errors.AsType[*TruncatedError](err); !ok || gone.Epoch != 4 || gone.Oldest != a.log.OldestEpoch() || gone.Oldest > 90 {
		t.Fatalf("%v, and the log begins at %d", err, a.log.OldestEpoch())
	}
}

// TestTailMissesNoSegment: between two complete segments one whose header is damaged must not look like a bulk load.
func TestTailMissesNoSegment(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, SegmentBytesMin))
	last := a.mustRun(t, 100)
	if err := a.log.Close(); err != nil {
		t.Fatal(err)
	}
	rec, err := Replay(fs, testDir, last, Proof{}, func(keys.Epoch, []byte) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	flip(t, fs, rec.Segments[2].File, 3)
	if rec, err = Replay(fs, testDir, last, Proof{}, func(keys.Epoch, []byte) error { return nil }); err != nil {
		t.Fatal(err)
	}
	b, err := startLog(testOptions(fs, SegmentBytesMin), rec)
	if err != nil {
		t.Fatal(err)
	}
	defer b.log.Close()
	r := b.log.ReadFrom(1, TailMark{})
	defer r.Close()
	for {
		rec, ok, err := r.Next(last)
		if errors.Is(err, ErrCorrupt) {
			break
		}
		if !ok || rec.Gap {
			t.Fatalf("%+v, %v, %v", rec, ok, err)
		}
	}
}

func flip(t *testing.T, fs vfs.FS, name string, at int64) {
	t.Helper()
	f, err := fs.Open(name, vfs.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var b [1]byte
	if _, err := f.ReadAt(b[:], at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 0x40
	if _, err := f.WriteAt(b[:], at); err != nil {
		t.Fatal(err)
	}
}

// TestObserversRequestNoSync: a goroutine that follows the log is woken by the syncs of others, and causes none.
func TestObserversRequestNoSync(t *testing.T) {
	a := mustStart(t, testOptions(vfs.NewMem(), SegmentBytesMin))
	e := a.mustAppend(t, bodyOf(1, 8))
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	if err := a.log.ObserveDurable(ctx, e); !errors.Is(err, context.DeadlineExceeded) || a.log.Durable() >= e {
		t.Fatalf("%v, durable %d", err, a.log.Durable())
	}
	observed := make(chan error, 2)
	go func() { observed <- a.log.ObserveDurable(context.Background(), e) }()
	go func() { observed <- a.log.ObserveDurable(context.Background(), e+1000) }()
	for queued := 0; queued < 2; {
		a.log.waits.mu.Lock()
		queued = len(a.log.waits.observers)
		a.log.waits.mu.Unlock()
	}
	if err := a.log.Flush(e); err != nil || <-observed != nil {
		t.Fatal(err)
	}
	if err := a.log.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-observed; !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
}

// TestHolderWithAnAgeKeepsTheNewestSegments: as many as its time and its bytes allow, and none when the disk is full.
func TestHolderWithAnAgeKeepsTheNewestSegments(t *testing.T) {
	for name, c := range map[string]struct {
		o    HolderOptions
		kept int // of the segments that the tree does not need
	}{
		"all":      {HolderOptions{Age: time.Hour, BytesMax: 1 << 30}, 4},
		"in bytes": {HolderOptions{Age: time.Hour, BytesMax: 2*SegmentBytesMin + 1}, 2},
		"in time":  {HolderOptions{Age: time.Nanosecond, BytesMax: 1 << 30}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			a := heldLog(t)
			without := len(a.log.completed.segments)
			c.o.Name, c.o.Yields = "feed", true
			h := a.log.Hold(c.o)
			if err := a.log.TruncateBefore(a.log.completed.segments[3].end + 1); err != nil {
				t.Fatal(err)
			}
			if kept := len(a.log.completed.segments); kept != without-4+c.kept || h.ended != nil {
				t.Fatalf("%d of %d segments, want %d of 4 more; %v", kept, without, c.kept, h.ended)
			}
			_, dropped, err := a.log.DropLargestHolder()
			if kept := len(a.log.completed.segments); err != nil || dropped != (c.kept > 0) || kept != without-4 || h.ended != nil {
				t.Fatalf("%d of %d segments, %v, %v, %v", kept, without, dropped, err, h.ended)
			}
		})
	}
}

// TestHolderWithAnAgeKeepsWhatIsNotCompleteYet: a checkpoint may have the commits of a segment before it is complete.
func TestHolderWithAnAgeKeepsWhatIsNotCompleteYet(t *testing.T) {
	a := mustStart(t, testOptions(vfs.NewMem(), SegmentBytesMin))
	a.log.Hold(HolderOptions{Name: "feed", Age: time.Hour})
	last := a.mustRun(t, 2)
	if err := a.log.TruncateBefore(last + 1); err != nil {
		t.Fatal(err)
	}
	last = a.mustRun(t, 40)
	if err := a.log.TruncateBefore(last); err != nil || a.log.OldestEpoch() != 1 {
		t.Fatalf("the log begins at epoch %d, %v", a.log.OldestEpoch(), err)
	}
}
