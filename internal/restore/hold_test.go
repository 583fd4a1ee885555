package restore

import (
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// TestTargetThatHangsDoesNotEndTheHold: while one call to the target does not return, however long that takes, the log is kept.
func TestTargetThatHangsDoesNotEndTheHold(t *testing.T) {
	b := newBench(t)
	b.close()
	b.age, b.lifetime = 0, time.Second // nothing but the archiver holds the log
	b.open()
	b.commits(20)
	b.archived()
	answer := make(chan struct{})
	hangs := b.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Kind: objectstore.Slow, Until: answer})
	b.commits(20)
	for deadline := time.Now().Add(20 * time.Second); b.target.Fired(hangs) == 0 && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	for end := time.Now().Add(2 * b.lifetime); time.Now().Before(end); time.Sleep(b.lifetime / 20) {
		if b.store.Changes().LogHolder(archive.HolderName) == nil {
			break
		}
		b.commits(10)
		check(t, b.store.Checkpoint(t.Context()))
	}
	b.target.Heal()
	close(answer)
	b.archived()
	if s := b.arch.Status(); s.Breaks != 0 {
		t.Fatalf("the archive has a gap: %+v", s.Break)
	}
	b.whole()
}
