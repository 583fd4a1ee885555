package enginetest

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAFullDiskTakesADeletionThatIsLargerThanASegment: its record needs a file of its own, for which the reserve of the log makes room.
func TestAFullDiskTakesADeletionThatIsLargerThanASegment(t *testing.T) {
	fs := vfs.NewMem()
	o := reserving(fs)
	o.Storage.MemoryBytes = 1 << 20 // so that the log has few segments in memory, and no more files than in a large store
	s := mustOpen(t, o)
	want := map[string]string{}
	const keys = 12000
	fillSmall(t, s, want, keys, "v")
	for range 3 { // what a checkpoint gives back
		fs.LeaveFree(0)
		if err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	fs.LeaveFree(0)
	mustDeleteRange(t, s, want, numbered(0), numbered(keys-10))
	awaitSpace(t, s, "later")
	want["later"] = "v"
	mustHold(t, s, want)
	mustClose(t, s)
	mustHold(t, mustOpen(t, o), want)
}

// TestSegmentsThatWereDurableBeforeTheirEndAreGivenBack: a large deletion has taken all other files of the log, and nothing else can be merged.
func TestSegmentsThatWereDurableBeforeTheirEndAreGivenBack(t *testing.T) {
	fs := vfs.NewMem()
	o := reserving(fs)
	o.Storage.MemoryBytes, o.SyncInterval = 1<<20, time.Hour
	s := mustOpen(t, o)
	mustPut(t, s, "one", "v")
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	fs.LeaveFree(0)
	x, others := mustSession(t, s), logBytes(t, fs)-int64(s.Stats().Storage.Log.Segments)*o.Storage.SegmentBytes
	defer x.Close()
	w := mvcc.Write{Durability: mvcc.DurabilityAsync}
	for i := 0; w.Batch.Size() < int(others-8<<10); i++ {
		w.Delete(fmt.Appendf(nil, "%0100d", i))
	}
	if _, err := x.Commit(t.Context(), &w); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); len(s.Stats().Storage.Generations) > 1 && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	if err := s.AwaitDurable(t.Context(), s.Visible()); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); s.Checkpoint(t.Context()) != nil && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
	}
	mustDelete(t, s, "one")
	mustHold(t, s, nil)
}

// TestALargeRecordIsAcceptedOnlyIfItCanBeMerged: with 1 MiB the disk has room for its log file, and not for its pages as well. Accepted, it would fill
// memory for good, and deletions would be refused.
func TestALargeRecordIsAcceptedOnlyIfItCanBeMerged(t *testing.T) {
	for left, fits := range map[int64]bool{1 << 20: false, 4 << 20: true} {
		fs := vfs.NewMem()
		o := reserving(fs)
		o.Storage.MemoryBytes = 1 << 20
		s, want, large := mustOpen(t, o), map[string]string{}, strings.Repeat("l", 1<<20)
		fillSmall(t, s, want, 2000, "v")
		fs.LeaveFree(left)
		x := mustSession(t, s)
		defer x.Close()
		if _, err := put(x, "large", large, mvcc.DurabilitySync); (err == nil) != fits || err != nil && !errors.Is(err, vfs.ErrNoSpace) {
			t.Errorf("%d KiB are left: %v", left>>10, err)
		}
		if fits {
			want["large"] = large
		}
		mustDeleteRange(t, s, want, numbered(0), numbered(2000))
		mustHold(t, s, want)
	}
}

// TestALargeRecordThatDoesNotFitRefusesNoOther: it is refused soon, and the others go on, also while there is always one of other clients.
func TestALargeRecordThatDoesNotFitRefusesNoOther(t *testing.T) {
	fs := vfs.NewMem()
	s := mustOpen(t, reserving(fs))
	want := map[string]string{}
	fillSmall(t, s, want, 1000, "v")
	fs.LeaveFree(256 << 10)
	before := s.Stats().Storage.Rotations
	soon := func(x *session, key, value string, fits bool) {
		began := time.Now()
		if _, err := put(x, key, value, mvcc.DurabilitySync); fits && err != nil || !fits && !errors.Is(err, vfs.ErrNoSpace) {
			t.Errorf("a put of %d bytes: %v", len(value), err)
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("a put of %d bytes took %v", len(value), took)
		}
		if short := s.Shortage(); short != nil {
			t.Error(short)
		}
	}
	var stop atomic.Bool
	var others sync.WaitGroup
	large := strings.Repeat("l", 2<<20)
	for i := range 4 {
		x := mustSession(t, s)
		others.Go(func() {
			defer x.Close()
			for !stop.Load() {
				soon(x, fmt.Sprint("large", i), large, false)
			}
		})
	}
	x := mustSession(t, s)
	defer x.Close()
	for i := range 10 {
		soon(x, "large", large, false)
		soon(x, numbered(i), "w", true)
		want[numbered(i)] = "w"
	}
	stop.Store(true)
	others.Wait()
	if n := s.Stats().Storage.Rotations - before; n > 2 {
		t.Errorf("records that were refused have ended %d segments", n)
	}
	mustHold(t, s, want)
}

// TestALargePutLeavesTheReserveToDeletions: the disk has room for the log file of the second one only if the reserve of the log makes room for it, and
// others take what is left of that room. Then deletions would have no segment any more.
func TestALargePutLeavesTheReserveToDeletions(t *testing.T) {
	fs := vfs.NewMem()
	o := reserving(fs)
	o.Storage.MemoryBytes, o.Storage.DiskReserve = 1<<20, 8<<20 // there are pages for the record
	s, want, large := mustOpen(t, o), map[string]string{}, strings.Repeat("l", 1<<20)
	fillSmall(t, s, want, 2000, "v")
	x := mustSession(t, s)
	defer x.Close()
	if _, err := put(x, "large", large, mvcc.DurabilitySync); err != nil {
		t.Fatal(err)
	}
	want["large"] = large
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	fs.LeaveFree(int64(len(large)) - 5*o.Storage.SegmentBytes/2)
	fs.SetHook(func(op vfs.Op, name string) {
		if op == vfs.OpPreallocate && strings.Contains(name, "reserve") {
			fs.LeaveFree(0)
		}
	})
	if _, err := put(x, "larger", large, mvcc.DurabilitySync); !errors.Is(err, vfs.ErrNoSpace) {
		t.Errorf("a large put that needs the reserve: %v", err)
	}
	fs.LeaveFree(0)
	for i := range 2000 {
		mustDelete(t, s, numbered(i))
		delete(want, numbered(i))
	}
	mustHold(t, s, want)
}
