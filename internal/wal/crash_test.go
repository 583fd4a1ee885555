package wal

import (
	"errors"
	"flag"
	"math/rand/v2"
	"testing"

	"epochkv/internal/storage/keys"
	"epochkv/internal/vfs"
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

// ledger is what a workload was promised, and what it gave up.
type ledger struct {
	run   uint64
	acked keys.Epoch // durable, by WaitDurable
	after keys.Epoch // truncated: a checkpoint holds it
}

// bodyFor differs between runs, since epochs that a crash took back are given again.
func bodyFor(run uint64, e keys.Epoch) []byte {
	return bodyOf(run<<32|uint64(e), int(uint64(e)*uint64(e)%900))
}

// work writes a scripted mix of single and grouped records, a large one, and truncations, until done or crashed.
func (l *ledger) work(a *appender, from keys.Epoch, records int) error {
	for i := range records {
		e := from + keys.Epoch(i)
		body := bodyFor(l.run, e)
		if i == records/2 {
			body = bodyOf(l.run<<32|uint64(e), 3*pageSize)
		}
		got, err := a.append(body)
		if err != nil {
			return err
		}
		if got != e {
			return errors.New("epochs are not consecutive")
		}
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

// check replays what a crash left: everything acknowledged, and nothing that was not written.
func (l *ledger) check(t *testing.T, fs vfs.FS, known map[keys.Epoch]uint64) Recovery {
	t.Helper()
	rec, got, err := replayAll(fs, l.after)
	if err != nil {
		t.Fatalf("acked %d, after %d: %v", l.acked, l.after, err)
	}
	if rec.Last < l.acked {
		t.Fatalf("acknowledged %d, replayed up to %d", l.acked, rec.Last)
	}
	for i, body := range got.bodies {
		e := got.first + keys.Epoch(i)
		run, ok := known[e]
		if !ok {
			run = l.run
		}
		if tag, whole := isBody(body); !whole || tag != run<<32|uint64(e) {
			t.Fatalf("epoch %d: body of run %d epoch %d, want run %d", e, tag>>32, uint32(tag), run)
		}
	}
	return rec
}

// TestWhatWasAcknowledgedSurvivesACrashAtEveryOperation crashes a workload at each file system operation, recovers, crashes the recovery at
// a random operation, recovers again, and goes on writing.
func TestWhatWasAcknowledgedSurvivesACrashAtEveryOperation(t *testing.T) {
	seed := testSeed(t)
	const records = 90
	whole := vfs.NewMem()
	a := mustStart(t, testOptions(whole, SegmentBytesMin))
	if err := (&ledger{run: 1}).work(a, 1, records); err != nil {
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
		first := &ledger{run: 1}
		first.until(fs, 1, records, Recovery{})
		for _, keep := range []vfs.Keep{vfs.KeepSome, vfs.KeepSome, vfs.KeepNone, vfs.KeepAll} {
			first.recoverTwice(t, fs.Crash(rng.Uint64(), keep), rng)
		}
	}
}

// until runs the workload to its end or to the crash.
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
	rec := l.check(t, fs, nil)
	known := map[keys.Epoch]uint64{}
	for e := l.after + 1; e <= rec.Last; e++ {
		known[e] = l.run
	}
	fs.CrashAt(fs.Mutations() + 1 + rng.Int64N(40))
	second := &ledger{run: l.run + 1, acked: l.acked, after: l.after}
	a, err := startLog(testOptions2(fs), rec)
	if err == nil {
		second.acked = rec.Last // Open made durable what it continues from
		_ = second.work(a, rec.Last+1, 40)
		_ = a.log.Close()
	}
	if !fs.Crashed() {
		fs = fs.Crash(rng.Uint64(), vfs.KeepSome)
	} else {
		fs = fs.Crash(rng.Uint64(), vfs.Keep(rng.IntN(3)))
	}
	rec = second.check(t, fs, known)
	third := &ledger{run: l.run + 2, acked: rec.Last, after: second.after}
	a, err = startLog(testOptions2(fs), rec)
	if err != nil {
		t.Fatal(err)
	}
	for e := l.after + 1; e <= rec.Last; e++ {
		if _, ok := known[e]; !ok {
			known[e] = second.run
		}
	}
	if err := third.work(a, rec.Last+1, 10); err != nil {
		t.Fatal(err)
	}
	mustClose(t, a.log)
	if end := third.check(t, fs, known); end.Last != rec.Last+10 {
		t.Fatalf("after the last run: %d, want %d", end.Last, rec.Last+10)
	}
}

// testOptions2 gives a later run its own identities.
func testOptions2(fs vfs.FS) Options {
	opts := testOptions(fs, SegmentBytesMin)
	opts.Identity = nil
	return opts
}
