package mvcc

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAStartOnAFullDiskWaitsForNoCheckpoint: starts that were killed have used up the log's part of the reserve, and what they have recorded is not
// merged. The next one cannot write before a checkpoint gives back a segment, which is made once the store is open.
func TestAStartOnAFullDiskWaitsForNoCheckpoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fs := vfs.NewMem()
		o := tiny(fs)
		o.Retention, o.SyncInterval, o.Storage.DiskReserve = time.Hour, time.Hour, 1<<20
		s := mustOpen(t, o)
		mustPut(t, s, "key", "value")
		mustCheckpoint(t, s)
		mustClose(t, s)
		fs.LeaveFree(0)
		o.Storage.DiskReserve = 8 << 20
		for starts := 1; ; starts++ {
			start := time.Now()
			s = mustOpen(t, o)
			if waited := time.Since(start); waited > time.Second {
				t.Fatalf("the start took %v", waited)
			}
			if s.engine.AwaitsSegment() {
				break
			}
			if starts == 100 {
				t.Fatal("each start had a segment: the test proves nothing")
			}
			fs = fs.Crash(1, vfs.SurviveProcess)
			o.Storage.FS = fs
			_ = s.Close()
		}
		time.Sleep(2 * sampleEvery)
		x := mustSession(t, s)
		w := &Write{Durability: DurabilitySync}
		w.Delete([]byte("key"))
		if _, err := x.Commit(t.Context(), w); err != nil || !s.timeline.recorded {
			t.Errorf("%v; the floor is recorded: %v", err, s.timeline.recorded)
		}
		x.Close()
	})
}
