package wal

import (
	"context"
	"errors"
	"path"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// loadedAndCrashed is a log of some records after which a bulk load took effect, and the machine crashed before the next commit. It
// returns the file of the last segment, the last record and the epoch of the load.
func loadedAndCrashed(t *testing.T) (fs *vfs.Mem, tail string, last, load keys.Epoch) {
	t.Helper()
	whole := vfs.NewMem()
	a := mustStart(t, testOptions(whole, SegmentBytesMin))
	last = a.mustRun(t, 20)
	a.cur.Load().Seal()
	if err := a.log.WaitDurable(t.Context(), last); err != nil {
		t.Fatal(err)
	}
	return whole.Crash(1, vfs.SurviveNone), a.cur.Load().path, last, last + 100
}

// startAfter recovers a log after an epoch that the data file has, and opens it.
func startAfter(fs vfs.FS, after keys.Epoch) (*appender, error) {
	rec, err := Recover(fs, testDir, after, Proof{}, func(Commit) error { return nil })
	if err != nil {
		return nil, err
	}
	return startLog(testOptions2(fs), rec)
}

// TestAStartAfterABulkLoadClosesTheTailForCertain: only the close record tells later readers that nothing is missing between the last
// record before a bulk load and the next segment. A start that cannot make it durable fails, and the next one makes it durable,
// whatever the failed one has left. A full disk is no reason not to start.
func TestAStartAfterABulkLoadClosesTheTailForCertain(t *testing.T) {
	for name, rule := range map[string]vfs.Rule{
		"write":     {Op: vfs.OpWrite},
		"torn":      {Op: vfs.OpWrite, Fault: vfs.Torn},
		"sync":      {Op: vfs.OpSyncData},
		"discarded": {Op: vfs.OpSyncData, Fault: vfs.DiscardDirty},
		"full disk": {Op: vfs.OpWrite, Err: syscall.ENOSPC},
	} {
		t.Run(name, func(t *testing.T) {
			fs, tail, last, load := loadedAndCrashed(t)
			faulty := vfs.NewFaulty(fs)
			rec, err := Recover(faulty, testDir, load, Proof{}, func(Commit) error { return nil })
			if err != nil {
				t.Fatal(err)
			}
			rule.Name, rule.Nth = path.Base(tail), 1
			injected := faulty.Inject(rule)
			a, err := startLog(testOptions2(faulty), rec)
			if full := rule.Err != nil; full != (err == nil) || err != nil && !errors.Is(err, ErrFailed) || injected.Fired() != 1 {
				t.Fatalf("the start: %v; the fault came %d times", err, injected.Fired())
			}
			if err == nil {
				mustClose(t, a.log)
				return
			}
			fs = fs.Crash(1, vfs.SurviveProcess)
			b, err := startAfter(fs, load)
			if err != nil {
				t.Fatal(err)
			}
			end, err := b.put(bodyOf(1, 100))
			if err != nil {
				t.Fatal(err)
			}
			fs = fs.Crash(1, vfs.SurviveNone)
			_ = b.log.Close()
			wantGap(t, fs, last, load, end)
		})
	}
}

// wantGap reads a log from its beginning, over a bulk load, up to a record.
func wantGap(t *testing.T, fs vfs.FS, last, load, end keys.Epoch) {
	t.Helper()
	a, err := startAfter(fs, load)
	if err != nil {
		t.Fatal(err)
	}
	defer a.log.Close()
	r := a.log.ReadFrom(1, TailMark{})
	defer r.Close()
	at := keys.Epoch(0)
	for gaps := 0; at < end; {
		rec, ok, err := r.Next(end)
		if err != nil || !ok {
			t.Fatalf("after epoch %d: %v, %v", at, ok, err)
		}
		if !rec.Gap && rec.Epoch != at+1 {
			t.Fatalf("epoch %d after %d", rec.Epoch, at)
		}
		if rec.Gap && gaps == 0 && (at != last || rec.Epoch != load || rec.Skipped) {
			t.Fatalf("the gap after epoch %d leads to %d", at, rec.Epoch)
		}
		if rec.Gap {
			gaps++
		}
		at = rec.Epoch
	}
}

// TestAnEmptySegmentAfterABulkLoadIsNotLost: the segment that begins after a bulk load is empty, because the first record needs one of
// its own. The close record before the load names the empty one: a crash must not lose it, or readers think that records are missing.
func TestAnEmptySegmentAfterABulkLoadIsNotLost(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, SegmentBytesMin))
	last := a.mustRun(t, 20)
	a.cur.Load().Seal()
	if err := a.log.WaitDurable(t.Context(), last); err != nil {
		t.Fatal(err)
	}
	load := last + 100
	a.log.Skip(load + 1)
	s, err := a.log.NewSegment(context.Background(), load+1, 0)
	if err != nil {
		t.Fatal(err)
	}
	a.cur.Store(s)
	end, err := a.put(bodyOf(1, 3*pageSize))
	if err != nil {
		t.Fatal(err)
	}
	if number, _, _ := a.cur.Load().Extent(); number == s.number { // a segment that was prepared and is too small leaves out its number
		t.Fatalf("the record is in segment %d, which must stay empty: this tests nothing", number)
	}
	wantGap(t, fs.Crash(1, vfs.SurviveNone), last, load, end)
}

// TestARemovedCloseRecordDoesNotComeBack: a start removes the close record that names a segment without a header, and its sync fails.
// The next start does not see the record any more, and the segment's file becomes another one. A power cut must not bring the record
// back: it would name a file that is missing.
func TestARemovedCloseRecordDoesNotComeBack(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions2(fs)) // its only segment stays empty, so that a close record begins a page
	tail := a.cur.Load().path
	crashAfter := func(fs *vfs.Mem, op vfs.Op, name string) {
		fs.SetHook(func(now vfs.Op, at string) {
			if now == op && at == name {
				fs.CrashAt(fs.Mutations() + 2) // after this operation
			}
		})
	}

	fs = fs.Crash(1, vfs.SurviveNone)
	crashAfter(fs, vfs.OpSyncData, tail) // the close record is durable, and the next header is not
	if b, err := startAfter(fs, 0); err == nil {
		t.Fatal("no crash", b.log.Close())
	}

	fs = fs.Crash(1, vfs.SurviveNone)
	faulty := vfs.NewFaulty(fs)
	rule := faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: path.Base(tail), Nth: 1, Fault: vfs.DiscardDirty})
	if _, err := startAfter(faulty, 0); err == nil || rule.Fired() != 1 {
		t.Fatalf("a start whose sync fails: %v; %d failed", err, rule.Fired())
	}

	fs = fs.Crash(1, vfs.SurviveProcess)
	rec, err := Recover(fs, testDir, 0, Proof{}, func(Commit) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	crashAfter(fs, vfs.OpSyncDir, path.Dir(tail)) // the file of the segment has its new name
	if b, err := startLog(testOptions2(fs), rec); err == nil {
		t.Fatal("no crash", b.log.Close())
	}

	fs = fs.Crash(1, vfs.SurviveNone)
	if names, err := fs.List(path.Dir(tail)); err != nil || len(names) != 2 || names[1] == FileName(2) {
		t.Fatalf("the files are %v, %v: this tests nothing", names, err)
	}
	c, err := startAfter(fs, 0)
	if err != nil {
		t.Fatal(err)
	}
	mustClose(t, c.log)
}
