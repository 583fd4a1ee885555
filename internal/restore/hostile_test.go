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
	"github.com/epochkv/epochkv/internal/backup"
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
type readOnly struct {
	objectstore.Store
	why error
}

func (s readOnly) Create(_ context.Context, name string, _ objectstore.Content) error {
	return fmt.Errorf("create %s: %w", name, s.why)
}

// TestArchiveThatCannotBeWrittenIsRestored: neither a volume that is full or mounted to be read nor a missing right to write prevents a restore, or ends
// one when its lease cannot be renewed.
func TestArchiveThatCannotBeWrittenIsRestored(t *testing.T) {
	b := newBench(t)
	b.commits(20)
	b.archived()
	for _, why := range []error{syscall.EROFS, syscall.ENOSPC, syscall.EDQUOT, objectstore.ErrDenied} {
		r, err := Run(t.Context(), Options{Store: readOnly{b.target, why}, Dir: filepath.Join(t.TempDir(), "restored"), PageSize: 1024, Memory: 64 << 20, Lineage: b.lineage()})
		check(t, err)
		if r.Records == 0 {
			t.Fatal("nothing was restored")
		}
		running, end := context.WithCancelCause(t.Context())
		if unlessFull(end)(fmt.Errorf("renew: %w", why)); running.Err() != nil {
			t.Errorf("%v ends a restore", why)
		}
		if unlessFull(end)(errors.New("another error")); running.Err() == nil {
			t.Error("a restore goes on that may have lost its lease")
		}
	}
}

// TestAnObjectThatTheDeviceCannotReadIsDamage: it hides no other object, and a restore that does not need it succeeds.
func TestAnObjectThatTheDeviceCannotReadIsDamage(t *testing.T) {
	b := newBench(t)
	b.commits(15)
	b.archived()
	early := b.arch.Status().Archived
	old, err := backup.Create(t.Context(), b.store, b.target, backup.Options{})
	check(t, err)
	b.commits(15)
	m, err := backup.Create(t.Context(), b.store, b.target, backup.Options{})
	check(t, err)
	b.commits(15)
	b.archived()
	at := b.arch.Status().Archived
	dir := b.lineage().String()
	names := b.objects()
	for _, kind := range []objectstore.FaultKind{objectstore.ReadUnreadable, objectstore.InodeUnreadable} {
		for _, name := range []string{dir + "/base/manifests/" + m.ID, dir + "/base/parts/" + m.Parts[0].SHA256} {
			b.target.Inject(objectstore.Fault{Op: objectstore.OpRead, Prefix: name, Kind: kind})
			r, got, err := b.restore(archive.Target{Epoch: at})
			check(t, err)
			if got != b.state(at) || r.Base.ID != old.ID {
				t.Fatalf("without %s another state is restored, from %s", name, r.Base.ID)
			}
			b.target.Heal()
		}
		b.target.Inject(objectstore.Fault{Op: objectstore.OpRead, Prefix: names[len(names)-1], Kind: kind})
		for _, target := range []archive.Target{{Epoch: at}, {}} {
			if _, _, err := b.restore(target); !errors.Is(err, archive.ErrDamaged) {
				t.Fatalf("without the last file of the log, to %+v: %v", target, err)
			}
		}
		_, got, err := b.restore(archive.Target{Epoch: early})
		check(t, err)
		if got != b.state(early) {
			t.Fatal("another state is restored")
		}
		b.target.Heal()
	}
}

// stoppedArchive is an archive of some files and its objects; the archiver has ended.
func stoppedArchive(t *testing.T) (b *bench, names []string) {
	t.Helper()
	b = newBench(t)
	for range 3 {
		b.commits(5)
		b.archived()
	}
	b.stop()
	return b, b.objects()
}

// TestADamagedNewestFileIsArchivedAgain: a server that starts beside it goes on, as far as its log has what was in the file.
func TestADamagedNewestFileIsArchivedAgain(t *testing.T) {
	for name, spoil := range map[string]func([]byte) []byte{
		"cut":      func(data []byte) []byte { return data[:len(data)-7] },
		"empty":    func([]byte) []byte { return nil },
		"flipped":  func(data []byte) []byte { data[len(data)-100] ^= 1; return data },
		"of zeros": func(data []byte) []byte { return make([]byte, len(data)) },
	} {
		t.Run(name, func(t *testing.T) {
			b, names := stoppedArchive(t)
			spoilt := names[len(names)-2:]
			if name != "flipped" { // which may leave it readable
				spoilt = append(spoilt, b.lineage().String()+"/lineage.json")
			}
			for _, name := range spoilt {
				r, err := b.target.Read(t.Context(), name, 0, -1)
				check(t, err)
				data, err := io.ReadAll(r)
				check(t, errors.Join(err, r.Close(), b.target.Delete(t.Context(), name)))
				check(t, b.target.Create(t.Context(), name, objectstore.Bytes(spoil(data))))
			}
			b.archive()
			b.commits(5)
			b.whole()
			if intervals, err := b.arch.Intervals(t.Context()); err != nil || len(intervals) != 1 {
				t.Fatalf("%v, %v", intervals, err)
			}
		})
	}
}

// TestANewestFileWithoutAnInodeIsArchivedAgain: it can neither be read nor deleted, nor can another file have its name.
func TestANewestFileWithoutAnInodeIsArchivedAgain(t *testing.T) {
	b, names := stoppedArchive(t)
	b.target.Inject(objectstore.Fault{Prefix: names[len(names)-1], Kind: objectstore.InodeUnreadable})
	b.archive()
	b.commits(5)
	b.whole()
	if intervals, err := b.arch.Intervals(t.Context()); err != nil || len(intervals) != 1 {
		t.Fatalf("%v, %v", intervals, err)
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
