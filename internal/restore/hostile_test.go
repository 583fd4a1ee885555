package restore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// TestDamageAfterTheTargetTimeIsNoObstacle: a file that is not needed for a time may be damaged.
func TestDamageAfterTheTargetTimeIsNoObstacle(t *testing.T) {
	b := newBench(t)
	for len(b.objects()) < 4 {
		b.commits(5)
		b.archived()
	}
	times := b.times()
	early := times[2]
	for _, other := range times { // the last epoch of this time
		if !other.at.After(early.at) {
			early = other
		}
	}
	b.close()
	names := b.objects()
	last := names[len(names)-1]
	r, err := b.target.Read(t.Context(), last, 0, -1)
	check(t, err)
	data, err := io.ReadAll(r)
	check(t, errors.Join(err, r.Close(), b.target.Delete(t.Context(), last)))
	check(t, b.target.Create(t.Context(), last, objectstore.Bytes(bytes.Repeat([]byte("x"), len(data)))))
	_, got, err := b.restore(archive.Target{Time: early.at})
	check(t, err)
	if got != b.state(early.epoch) {
		t.Fatal("another state was restored")
	}
	if _, _, err := b.restore(archive.Target{}); !errors.Is(err, archive.ErrDamaged) {
		t.Fatalf("the latest state needs the damaged file: %v", err)
	}
}

// readOnly is a store that can only be read.
type readOnly struct{ objectstore.Store }

func (s readOnly) Create(_ context.Context, name string, _ objectstore.Content) error {
	return fmt.Errorf("create %s: %w", name, syscall.EROFS)
}

// TestArchiveThatCannotBeWrittenIsRestored: neither a volume that is mounted to be read nor a missing right to write prevents a restore.
func TestArchiveThatCannotBeWrittenIsRestored(t *testing.T) {
	b := newBench(t)
	b.commits(20)
	b.archived()
	r, err := Run(t.Context(), Options{Store: readOnly{b.target}, Dir: filepath.Join(t.TempDir(), "restored"), PageSize: 1024, Memory: 64 << 20, Lineage: b.lineage()})
	check(t, err)
	if r.Records == 0 {
		t.Fatal("nothing was restored")
	}
}

// TestTimeBeforeTheFirstCommitIsNotRestored: a wrong year does not make an empty store.
func TestTimeBeforeTheFirstCommitIsNotRestored(t *testing.T) {
	b := newBench(t)
	b.commits(5)
	b.archived()
	first := b.times()[0]
	none := new(NoBaseError)
	if _, _, err := b.restore(archive.Target{Time: first.at.Add(-time.Hour)}); !Unreachable(err) || !errors.As(err, &none) || none.First.IsZero() {
		t.Fatal(err)
	}
}
