package wal

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

var crashSeed = flag.Uint64("crash-seed", 0, "seed of the crash tests; 0 draws one")

func testSeed(t *testing.T) uint64 {
	t.Helper()
	seed := *crashSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("replay with: go test ./internal/wal -run '^%s$' -crash-seed %d", t.Name(), seed)
	return seed
}

// ledger records what a log promised a workload, and what the workload truncated.
type ledger struct {
	run   uint64
	acked keys.Epoch // durable, by WaitDurable
	after keys.Epoch // truncated: a checkpoint holds it
	twice error
	seen  map[keys.Epoch]uint64 // every epoch that was given out, with its run
}

func tagOf(run uint64, e keys.Epoch) uint64 { return run<<48 | uint64(e) }

// bodyFor differs between runs, so that a test can tell the records of one run from those of another.
func bodyFor(run uint64, e keys.Epoch) []byte {
	return bodyOf(tagOf(run, e), int(uint64(e)*uint64(e)%900))
}

// work writes a scripted mix of single and grouped records, a large one, and truncations, until done or crashed.
func (l *ledger) work(a *appender, from keys.Epoch, records int) error {
	for i := range records {
		e := from + keys.Epoch(i)
		body := bodyFor(l.run, e)
		if i == records/2 {
			body = bodyOf(tagOf(l.run, e), 3*pageSize)
		}
		got, err := a.append(body)
		if err != nil {
			return err
		}
		if got != e {
			return errors.New("epochs are not consecutive")
		}
		if run, ok := l.seen[e]; ok {
			l.twice = fmt.Errorf("run %d was given epoch %d, which run %d had been given", l.run, e, run)
		}
		l.seen[e] = l.run
		if i%3 == 0 {
			if err := a.log.Flush(e); err != nil {
				return err
			}
			l.acked = e
		}
		if i%20 == 19 {
			l.after = max(l.after, l.acked-6) // the checkpoint comes first, the truncation may be half done
			if err := a.log.TruncateBefore(l.after + 1); err != nil {
				return err
			}
		}
	}
	return nil
}

// check replays the log after a crash: it must have everything that was acknowledged, and nothing that was not written.
func (l *ledger) check(t *testing.T, fs vfs.FS) Recovery {
	t.Helper()
	rec, got, err := replayAll(fs, l.after)
	if err != nil {
		t.Fatalf("acked %d, after %d: %v", l.acked, l.after, err)
	}
	if rec.Last < l.acked {
		t.Fatalf("acknowledged %d, replayed up to %d", l.acked, rec.Last)
	}
	if l.twice != nil {
		t.Fatal(l.twice)
	}
	for i, body := range got.bodies {
		e := got.epochs[i]
		if tag, whole := isBody(body); !whole || tag != tagOf(l.seen[e], e) {
			t.Fatalf("epoch %d: body %x, want run %d", e, tag, l.seen[e])
		}
	}
	return rec
}

// TestAcknowledgedRecordsSurviveACrashAtEveryOperation crashes a workload at each file system operation, recovers, crashes
// the recovery at a random operation, recovers again, and writes again.
func TestAcknowledgedRecordsSurviveACrashAtEveryOperation(t *testing.T) {
	seed := testSeed(t)
	const records = 90
	whole := vfs.NewMem()
	a := mustStart(t, testOptions(whole, SegmentBytesMin))
	if err := (&ledger{run: 1, seen: map[keys.Epoch]uint64{}}).work(a, 1, records); err != nil {
		t.Fatal(err)
	}
	mustClose(t, a.log)
	operations := whole.Mutations()
	if operations < 100 {
		t.Fatalf("only %d operations", operations)
	}
	for k := int64(1); k <= operations+1; k++ {
		rng := rand.New(rand.NewPCG(seed, uint64(k)))
		fs := vfs.NewMem()
		fs.CrashAt(k)
		first := &ledger{run: 1, seen: map[keys.Epoch]uint64{}}
		first.until(fs, 1, records, Recovery{})
		for _, keep := range []vfs.Survival{vfs.SurviveSome, vfs.SurviveSome, vfs.SurviveNone, vfs.SurviveAll} {
			first.recoverTwice(t, fs.Crash(rng.Uint64(), keep), rng)
		}
	}
}

// until runs the workload until it ends or crashes.
func (l *ledger) until(fs vfs.FS, from keys.Epoch, records int, rec Recovery) {
	a, err := startLog(testOptions(fs, SegmentBytesMin), rec)
	if err != nil {
		return
	}
	_ = l.work(a, from, records)
	_ = a.log.Close()
}

func (l *ledger) recoverTwice(t *testing.T, fs *vfs.Mem, rng *rand.Rand) {
	t.Helper()
	rec := l.check(t, fs)
	fs.CrashAt(fs.Mutations() + 1 + rng.Int64N(40))
	second := &ledger{run: l.run + 1, acked: l.acked, after: l.after, seen: maps.Clone(l.seen)}
	a, err := startLog(testOptions2(fs), rec)
	if err == nil {
		second.acked = rec.Last // Open made durable what it continues from
		_ = second.work(a, rec.Next(), 40)
		_ = a.log.Close()
	}
	if !fs.Crashed() {
		fs = fs.Crash(rng.Uint64(), vfs.SurviveSome)
	} else {
		fs = fs.Crash(rng.Uint64(), vfs.Survival(rng.IntN(3)))
	}
	rec = second.check(t, fs)
	third := &ledger{run: l.run + 2, acked: rec.Last, after: second.after, seen: second.seen}
	a, err = startLog(testOptions2(fs), rec)
	if err != nil {
		t.Fatal(err)
	}
	if err := third.work(a, rec.Next(), 10); err != nil {
		t.Fatal(err)
	}
	mustClose(t, a.log)
	if end := third.check(t, fs); end.Last != rec.Next()+9 || end.Unclean {
		t.Fatalf("after the last run: %d, want %d; unclean %v", end.Last, rec.Next()+9, end.Unclean)
	}
}

// testOptions2 gives a later run its own identities.
func testOptions2(fs vfs.FS) Options {
	opts := testOptions(fs, SegmentBytesMin)
	opts.Identity = nil
	return opts
}
