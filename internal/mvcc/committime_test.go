package mvcc

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// loggedHeaders are the headers of the commits in the log.
func loggedHeaders(t *testing.T, o Options) map[keys.Epoch]batch.Header {
	t.Helper()
	segments, err := wal.Segments(o.Storage.FS, o.Storage.Dir)
	if err != nil {
		t.Fatal(err)
	}
	headers := map[keys.Epoch]batch.Header{}
	for _, segment := range segments {
		err := wal.ReadSegment(o.Storage.FS, segment, func(r wal.Record) error {
			if !r.HoldsEpoch() || len(r.Body) == 0 {
				return nil
			}
			h, err := batch.HeaderOf(r.Body)
			headers[r.Epoch] = h
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return headers
}

// TestLogHasTimeAndOriginOfEveryCommit: plain writes, values in pieces, operations computed under latches, transactions and
// the commits of the store itself.
func TestLogHasTimeAndOriginOfEveryCommit(t *testing.T) {
	o := tiny(vfs.NewMem())
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	ctx, long := t.Context(), bytes.Repeat([]byte("v"), 1000)
	committed := func(e keys.Epoch, err error) keys.Epoch {
		t.Helper()
		if err == nil {
			err = s.Wait(ctx, e, DurabilitySync)
		}
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	want := map[keys.Epoch]batch.Origin{}
	w := &Write{Durability: DurabilitySync}
	for origin := range batch.OriginRestore + 1 {
		w.Reset()
		w.Durability, w.Origin = DurabilitySync, origin
		w.SetShared([]byte("b"), long)
		w.Delete([]byte("a"))
		want[committed(x.Commit(ctx, w))] = origin
	}
	w.Reset() // forgets the origin
	w.Identify(newRequest())
	w.Set([]byte("c"), nil)
	before := s.Clock().Now()
	want[committed(x.Commit(ctx, w))] = batch.OriginClient
	out := make([]Invoked, 1)
	want[committed(x.InvokeAll(ctx, []Invoke{{Kind: InvokeAdd, Key: []byte("n"), Delta: 1}}, nil, DurabilitySync, out))] = batch.OriginClient
	txn, err := x.Begin(TxnOptions{Durability: DurabilitySync})
	if err != nil {
		t.Fatal(err)
	}
	if err := txn.Set([]byte("d"), long); err != nil {
		t.Fatal(err)
	}
	want[committed(txn.Commit(ctx))] = batch.OriginClient
	if err := s.advanceCutoff(ctx, x, 1); err != nil {
		t.Fatal(err)
	}
	want[s.Visible()] = batch.OriginCleanup
	after, last := s.Clock().Now(), uint64(0)
	headers := loggedHeaders(t, o)
	for e := keys.Epoch(1); e <= s.Visible(); e++ {
		h := headers[e]
		if origin, ok := want[e]; !ok || h.Origin != origin {
			t.Errorf("epoch %d has origin %d, want %d", e, h.Origin, origin)
		}
		if h.Time < last || h.Time > after || h.Time == 0 {
			t.Errorf("epoch %d has time %d, after %d and before %d", e, h.Time, last, after)
		}
		last = h.Time
	}
	if last < before {
		t.Errorf("the last commit is of %d, begun at %d", last, before)
	}
}

// TestCommitsBegunLaterHaveLaterTimes: every epoch that is not reserved yet when the clock shows a time gets that time or a
// later one, so that what was committed up to a time in the past is fixed once visible has reached what was reserved.
func TestCommitsBegunLaterHaveLaterTimes(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Storage.MemtableBytes, o.Storage.SegmentBytes = 8<<20, 8<<20 // the log keeps everything
	s := mustOpen(t, o)
	stop, cancel := context.WithCancel(t.Context())
	var writers sync.WaitGroup
	for writer := range 3 {
		writers.Go(func() {
			x, err := s.Session()
			if err != nil {
				return
			}
			defer x.Close()
			// Commits on one key wait for each other's latch, with times that they read before at hand.
			for i := 0; stop.Err() == nil && i < 3000; i++ {
				if _, err := put(x, fmt.Sprint("k", i%2), fmt.Sprint(writer), DurabilityAsync); err != nil {
					t.Error(err)
				}
			}
		})
	}
	type point struct {
		at       uint64
		reserved keys.Epoch
	}
	var points []point
	for range 40 {
		at := s.Clock().Now()
		points = append(points, point{at, s.engine.Reserved()})
		time.Sleep(500 * time.Microsecond)
	}
	cancel()
	writers.Wait()
	mustPut(t, s, "end", "")
	headers := loggedHeaders(t, o)
	if len(headers) < 100 {
		t.Fatalf("%d commits are in the log", len(headers))
	}
	for _, p := range points {
		for e, h := range headers {
			if e > p.reserved && h.Time < p.at {
				t.Fatalf("epoch %d is of %d; at %d up to %d was reserved", e, h.Time, p.at, p.reserved)
			}
		}
	}
}

// TestClockStaysAfterTheNewestCommitAcrossStarts: a wall clock that is set back while the store is closed, or before it
// crashes, does not give later commits earlier times, whether the log or the tree has the newest commit.
func TestClockStaysAfterTheNewestCommitAcrossStarts(t *testing.T) {
	ends := map[string]func(t *testing.T, s *Store, fs *vfs.Mem) *vfs.Mem{
		"crash": func(_ *testing.T, s *Store, fs *vfs.Mem) *vfs.Mem {
			crashed := fs.Crash(1, vfs.SurviveSome)
			_ = s.Close()
			return crashed
		},
		"close": func(t *testing.T, s *Store, fs *vfs.Mem) *vfs.Mem {
			mustClose(t, s)
			return fs
		},
		"bulk load": func(t *testing.T, s *Store, fs *vfs.Mem) *vfs.Mem {
			mustLoad(t, s, map[string]string{"loaded": "value"})
			crashed := fs.Crash(1, vfs.SurviveSome)
			_ = s.Close()
			return crashed
		},
	}
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			o := tiny(vfs.NewMem())
			o.WallClock = func() time.Time { return time.Now().Add(time.Hour) }
			s := mustOpen(t, o)
			epoch, before := mustPut(t, s, "key", "value"), s.Clock().Now()
			newest := loggedHeaders(t, o)[epoch].Time
			o.Storage.FS = end(t, s, o.Storage.FS.(*vfs.Mem))
			o.WallClock = nil
			s = mustOpen(t, o)
			if name == "bulk load" {
				newest = before
			}
			if s.Clock().Now() < newest || s.Recovery().CommitTime < newest {
				t.Fatalf("the clock shows %d, recovered %d, after a commit at %d", s.Clock().Now(), s.Recovery().CommitTime, newest)
			}
			if s.Clock().Difference() > -50*time.Minute {
				t.Fatalf("difference %v", s.Clock().Difference())
			}
		})
	}
}

// TestSuperblockHasTheTimeOfItsEpoch: the commit time of a durable state is the latest of the commits in it, also after
// checkpoints that merge nothing, and in the checkpoints of a recovery.
func TestSuperblockHasTheTimeOfItsEpoch(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.CheckpointInterval = time.Hour
	s := mustOpen(t, o)
	for round := range 4 {
		for i := range 40 {
			mustPut(t, s, fmt.Sprintf("%d/%d", round, i), string(bytes.Repeat([]byte("v"), 500)))
		}
		latest := uint64(0)
		for _, h := range loggedHeaders(t, o) {
			latest = max(latest, h.Time)
		}
		time.Sleep(3 * time.Millisecond) // the time of the checkpoint is not that of a commit
		if err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := uint64(s.History().CommitTime.UnixMicro()); got != latest {
			t.Fatalf("round %d: the state is of %d, its latest commit of %d", round, got, latest)
		}
	}
}
