package wal

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

var testLineage = keys.Lineage{0xa1, 0xb2, 0xc3, 0xd4, 5}

func lineageOptions(fs vfs.FS) Options {
	opts := testOptions(fs, SegmentBytesMin)
	opts.Lineage = testLineage
	return opts
}

// supersede replaces the log from an epoch on.
func (a *appender) supersede(first keys.Epoch, term keys.Term) error {
	s, err := a.log.Supersede(context.Background(), first, term)
	if err == nil {
		a.cur.Store(s)
	}
	return err
}

// appendRun appends durable records, of which the bodies name the run, and returns the last epoch that is durable.
func (a *appender) appendRun(run uint64, n int) (last keys.Epoch, err error) {
	for range n {
		s := a.cur.Load()
		next := s.Position().Epoch
		e, err := a.append(bodyOf(tagOf(run, next), 300))
		if err != nil {
			return last, err
		}
		if e != next {
			return last, fmt.Errorf("epoch %d instead of %d", e, next)
		}
		if err := a.log.Flush(e); err != nil {
			return last, err
		}
		last = e
	}
	return last, nil
}

// replayRuns replays a log, and returns the run of each record: runs[i] is that of epoch i+1.
func replayRuns(t *testing.T, fs vfs.FS, proof Proof) (Recovery, []uint64) {
	t.Helper()
	var runs []uint64
	rec, err := Recover(fs, testDir, 0, proof, func(c Commit) error {
		e, body := c.Epoch, c.Body
		tag, whole := isBody(body)
		if !whole || tag&(1<<48-1) != uint64(e) || e != keys.Epoch(len(runs)+1) {
			return fmt.Errorf("epoch %d after %d records: %x", e, len(runs), tag)
		}
		runs = append(runs, tag>>48)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return rec, runs
}

func TestSupersededTailIsGone(t *testing.T) {
	for _, first := range []keys.Epoch{1, 7, 13, 14, 30, 60, 61} {
		for _, closed := range []bool{true, false} {
			t.Run(fmt.Sprintf("from=%d/closed=%v", first, closed), func(t *testing.T) { testSupersededTail(t, first, closed) })
		}
	}
}

func testSupersededTail(t *testing.T, first keys.Epoch, closed bool) {
	fs := vfs.NewMem()
	a := mustStart(t, lineageOptions(fs))
	if _, err := a.appendRun(1, 60); err != nil {
		t.Fatal(err)
	}
	a.log.RequestFlush(a.mustAppend(t, bodyOf(tagOf(1, 61), 3000))) // another one is not durable yet
	if err := a.supersede(first, 3); err != nil {
		t.Fatal(err)
	}
	if d := a.log.Durable(); d != first-1 {
		t.Fatalf("durable is %d", d)
	}
	a.log.acquireFlusher()
	if w := &a.log.waits; w.newest >= first || w.flushTarget >= first {
		t.Fatalf("epochs up to %d and %d are requested", w.newest, w.flushTarget)
	}
	a.log.releaseFlusher()
	last, err := a.appendRun(2, 40)
	if err != nil || last != first+39 {
		t.Fatal(last, err)
	}
	if closed {
		mustClose(t, a.log)
	} else {
		fs = fs.Crash(1, vfs.SurviveNone)
	}
	rec, runs := replayRuns(t, fs, Proof{Lineage: testLineage})
	if rec.Last != last || rec.Unclean == closed || rec.Term() != 3 || first > 1 && rec.terms.of(first-1) != 0 {
		t.Fatalf("%+v", rec)
	}
	for i, run := range runs {
		if want := uint64(1 + min(1, (i+1)/int(first))); run != want {
			t.Fatalf("epoch %d is of run %d", i+1, run)
		}
	}
}

// TestSupersedingIsAtomic crashes at each operation of a supersede, of another one, and of what comes before and after: the
// log has the whole old tail or none of it, and what was acknowledged.
func TestSupersedingIsAtomic(t *testing.T) {
	seed := testSeed(t)
	type promise struct {
		run, acked keys.Epoch // the newest run with its newest durable epoch
		trying     bool       // to supersede it
	}
	from := []keys.Epoch{0, 1, 9, 5} // by run: its first epoch
	work := func(fs vfs.FS) (p promise) {
		a, err := startLog(lineageOptions(fs), Recovery{})
		if err != nil {
			return promise{run: 1}
		}
		defer func() { _ = a.log.Close() }()
		for run := keys.Epoch(1); run <= 3; run++ {
			if run > 1 {
				p.trying = true
				if a.supersede(from[run], keys.Term(4-run)) != nil { // terms 2 and 1, of which only the first rises
					return p
				}
			}
			p = promise{run: run, acked: from[run] - 1}
			last, err := a.appendRun(uint64(run), 25)
			p.acked = max(p.acked, last)
			if err != nil {
				return p
			}
		}
		return p
	}
	whole := vfs.NewMem()
	if p := work(whole); p.run != 3 || p.acked != 29 {
		t.Fatalf("%+v", p)
	}
	for k := int64(1); k <= whole.Mutations(); k++ {
		fs := vfs.NewMem()
		fs.CrashAt(k)
		p := work(fs)
		for i, keep := range []vfs.Survival{vfs.SurviveSome, vfs.SurviveNone, vfs.SurviveAll} {
			crashed := fs.Crash(rand.New(rand.NewPCG(seed, uint64(k))).Uint64()+uint64(i), keep)
			rec, runs := replayRuns(t, crashed, Proof{Lineage: testLineage})
			newest := keys.Epoch(0)
			if n := len(runs); n > 0 {
				newest = keys.Epoch(runs[n-1])
			}
			header := p.run
			if p.trying && (newest > p.run || newest < p.run && rec.Last == from[p.run+1]-1 || newest == p.run && rec.Last < p.acked) {
				header = p.run + 1
			}
			if header == p.run && rec.Last < p.acked {
				t.Fatalf("operation %d, %+v: the log ends at %d", k, p, rec.Last)
			}
			for i, run := range runs { // each epoch has the newest run that began at or before it
				want := uint64(0)
				for r := keys.Epoch(1); r <= header; r++ {
					if from[r] <= keys.Epoch(i+1) {
						want = uint64(r)
					}
				}
				if run != want {
					t.Fatalf("operation %d, %+v: epoch %d is of run %d, and the log has run %d: a mixture", k, p, i+1, run, header)
				}
			}
			goOn(t, crashed, rec, uint64(i))
		}
	}
}

// goOn continues a recovered log, and replays it again.
func goOn(t *testing.T, fs *vfs.Mem, rec Recovery, run uint64) {
	t.Helper()
	opts := lineageOptions(fs)
	opts.Identity = nil
	a, err := startLog(opts, rec)
	if err != nil {
		t.Fatal(err)
	}
	e, err := a.put(bodyOf(run, 10))
	if err != nil || e != rec.Next() {
		t.Fatal(e, err)
	}
	mustClose(t, a.log)
	again, got := mustReplay(t, fs, 0)
	if again.Last != e || again.Term() != rec.Term() || len(got.bodies) != int(rec.Records)+1 {
		t.Fatalf("%d records up to %d, and then %d up to %d", rec.Records, rec.Last, len(got.bodies), again.Last)
	}
}

func TestSupersededSegmentsAreTruncated(t *testing.T) {
	for _, reopened := range []bool{false, true} {
		fs := vfs.NewMem()
		a := mustStart(t, lineageOptions(fs))
		if _, err := a.appendRun(1, 60); err != nil {
			t.Fatal(err)
		}
		if err := a.supersede(20, 1); err != nil {
			t.Fatal(err)
		}
		if _, err := a.appendRun(2, 2); err != nil {
			t.Fatal(err)
		}
		want := 1
		if reopened {
			mustClose(t, a.log)
			a = mustStart(t, lineageOptions(fs))
			want = 2
		}
		if err := a.log.TruncateBefore(20); err != nil {
			t.Fatal(err)
		}
		if n := a.log.Stats().Segments; n != want {
			t.Fatalf("%d segments; reopened %v", n, reopened)
		}
		if err := a.supersede(19, 2); err == nil {
			t.Fatal("epochs that were truncated are superseded")
		}
		mustClose(t, a.log)
	}
}

func TestSupersedeRefusesWhatAReplayCouldNotTell(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, lineageOptions(fs))
	if _, err := a.appendRun(1, 10); err != nil {
		t.Fatal(err)
	}
	if err := a.supersede(6, 2); err != nil {
		t.Fatal(err)
	}
	if _, err := a.appendRun(2, 10); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		first keys.Epoch
		term  keys.Term
	}{"same term": {9, 2}, "falling term": {9, 1}, "past the end": {17, 3}, "before the log": {0, 3}} {
		if err := a.supersede(c.first, c.term); err == nil {
			t.Fatal(name)
		}
	}
	old := mustStart(t, testOptions(vfs.NewMem(), SegmentBytesMin))
	if _, err := old.appendRun(1, 10); err != nil {
		t.Fatal(err)
	}
	if err := old.supersede(6, 2); err == nil {
		t.Fatal("a log of version 1 is superseded")
	}
}

// TestRecoveredLogIsSuperseded: terms and the places where they begin are known after a restart.
func TestRecoveredLogIsSuperseded(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, lineageOptions(fs))
	for run, first := range []keys.Epoch{1, 21, 31} {
		if run > 0 {
			if err := a.supersede(first, keys.Term(run)*2); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := a.appendRun(uint64(run), 30); err != nil {
			t.Fatal(err)
		}
	}
	mustClose(t, a.log)
	opts := lineageOptions(fs)
	opts.Identity = nil
	a = mustStart(t, opts)
	if err := a.supersede(25, 2); err == nil {
		t.Fatal("a term is superseded by itself")
	}
	if err := a.supersede(25, 5); err != nil {
		t.Fatal(err)
	}
	if _, err := a.appendRun(9, 3); err != nil {
		t.Fatal(err)
	}
	mustClose(t, a.log)
	rec, runs := replayRuns(t, fs, Proof{})
	if rec.Last != 27 || runs[19] != 0 || runs[23] != 1 || runs[24] != 9 || rec.Term() != 5 || rec.terms.of(24) != 2 {
		t.Fatalf("%+v, %v", rec, runs)
	}
}

// TestSkippedEpochsAreSuperseded: after an unclean end the log skips epochs, and the new segment begins at one of them, whether
// the run after it has written records or not.
func TestSkippedEpochsAreSuperseded(t *testing.T) {
	for _, records := range []int{0, 5} {
		fs, ignore := vfs.NewMem(), func(Commit) error { return nil }
		a := mustStart(t, lineageOptions(fs))
		if _, err := a.appendRun(1, 10); err != nil {
			t.Fatal(err)
		}
		fs = fs.Crash(1, vfs.SurviveNone)
		rec, err := Recover(fs, testDir, 0, Proof{Lineage: testLineage}, ignore)
		if err != nil {
			t.Fatal(err)
		}
		if a, err = startLog(lineageOptions(fs), rec); err != nil {
			t.Fatal(err)
		}
		if _, err := a.appendRun(2, records); err != nil {
			t.Fatal(err)
		}
		if err := a.supersede(20, 1); err != nil {
			t.Fatal(err)
		}
		if _, err := a.appendRun(3, 5); err != nil {
			t.Fatal(err)
		}
		mustClose(t, a.log)
		if rec, err = Recover(fs, testDir, 0, Proof{Lineage: testLineage}, ignore); err != nil || rec.Last != 24 || rec.Records != 15 {
			t.Fatalf("%d records of a run that is superseded: %+v, %v", records, rec, err)
		}
	}
}
