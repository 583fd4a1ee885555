package mvcc

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestALostEpochIsRefusedAfterKillsOnAFullDisk: a client saw a commit that a crash has lost. Starts on a full disk then give back the segments of the log that say so,
// and each is killed near its end. A read at the epoch is refused all the same: the older value would be a wrong answer.
func TestALostEpochIsRefusedAfterKillsOnAFullDisk(t *testing.T) {
	refused, opened, kept := 0, 0, 0
	for seed := range uint64(12) {
		r := rand.New(rand.NewPCG(seed, 5))
		o := tiny(vfs.NewMem())
		o.Retention, o.SyncInterval, o.Storage.DiskReserve = time.Hour, time.Hour, 1<<20
		s := mustOpen(t, o)
		durable := mustPut(t, s, "key", "durable")
		if r.IntN(2) == 0 {
			mustCheckpoint(t, s)
		}
		x := mustSession(t, s)
		lost, err := put(x, "key", "lost", DurabilityAsync)
		x.Close()
		if err != nil || lost <= s.Durable() {
			t.Fatalf("epoch %d, durable %d: %v", lost, s.Durable(), err)
		}
		fs := o.Storage.FS.(*vfs.Mem).Crash(seed, vfs.SurviveNone)
		_ = s.Close()
		fs.LeaveFree(0)
		trace := ""
		for range 4 + r.IntN(8) {
			probe := fs.Crash(1, vfs.SurviveProcess)
			fs = fs.Crash(1, vfs.SurviveProcess)
			probe.LeaveFree(0)
			fs.LeaveFree(0)
			o.Storage.FS = probe
			s := mustOpen(t, o)
			at := max(1, probe.Mutations()-r.Int64N(9))
			_ = s.Close()
			o.Storage.FS = fs
			fs.CrashAt(at)
			s, err := Open(o)
			survival := []vfs.Survival{vfs.SurviveProcess, vfs.SurviveProcess, vfs.SurviveAll, vfs.SurviveSome, vfs.SurviveNone}[r.IntN(5)]
			trace += fmt.Sprintf(" %d/%d:%v", at, survival, err == nil)
			next := fs.Crash(r.Uint64(), survival)
			if err == nil {
				opened++
				_ = s.Close()
			}
			fs = next
			fs.LeaveFree(0)
		}
		fs.SetCapacity(0)
		o.Storage.FS = fs
		s = mustOpen(t, o)
		x = mustSession(t, s)
		var gone *SnapshotGoneError
		if v, err := x.Get(nil, []byte("key"), lost); !errors.As(err, &gone) {
			t.Errorf("seed %d: at the lost epoch %d: %q, %v;%s", seed, lost, v.Data, err, trace)
		} else if gone.Missing.First != 0 {
			refused++
		}
		if v, err := x.Get(nil, []byte("key"), durable); err == nil && string(v.Data) == "durable" {
			kept++
		}
		x.Close()
		mustClose(t, s)
	}
	if refused == 0 || opened == 0 || kept == 0 {
		t.Errorf("%d refused as missing, %d starts were not killed before they ended, %d times the retention was kept", refused, opened, kept)
	}
}

// TestALostEpochIsRefusedAfterWritesOnAFullDisk: a start has no segment of the log, so it cannot commit a record of what the crash before it has lost. Deletions get
// segments later, of which checkpoints use the files again, also that of the skip record.
func TestALostEpochIsRefusedAfterWritesOnAFullDisk(t *testing.T) {
	for writes := range 4 {
		o := tiny(vfs.NewMem())
		o.Retention, o.SyncInterval, o.Storage.DiskReserve = time.Hour, time.Hour, 1<<20
		s := mustOpen(t, o)
		mustPut(t, s, "key", "durable")
		lost, awaits := keys.Epoch(0), false
		for starts := 0; !awaits; starts++ {
			if starts == 60 {
				t.Fatal("each start has a segment")
			}
			lost = mustDelete(t, s, "key", DurabilityAsync)
			crashOnAFullDisk(s, &o, vfs.SurviveNone)
			s = mustOpen(t, o)
			awaits = s.engine.AwaitsSegment()
		}
		mustRefuse(t, s, []keys.Epoch{lost})
		for range writes {
			mustDelete(t, s, "other", DurabilitySync)
			mustCheckpoint(t, s)
		}
		crashOnAFullDisk(s, &o, vfs.SurviveAll)
		o.Storage.FS.(*vfs.Mem).SetCapacity(0)
		s = mustOpen(t, o)
		mustRefuse(t, s, []keys.Epoch{lost})
		mustClose(t, s)
	}
}

// crashOnAFullDisk ends a run. The options are for the next one.
func crashOnAFullDisk(s *Store, o *Options, survival vfs.Survival) {
	fs := o.Storage.FS.(*vfs.Mem).Crash(1, survival)
	_ = s.Close()
	fs.LeaveFree(0)
	o.Storage.FS = fs
}

func mustDelete(t *testing.T, s *Store, key string, d Durability) keys.Epoch {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	w := Write{Durability: d}
	w.Delete([]byte(key))
	e, err := commitAndWait(x, &w)
	if err != nil {
		t.Fatal(err)
	}
	return e
}
