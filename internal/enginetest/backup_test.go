package enginetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/vfs"
)

// restored makes a backup and restores it to a file system in memory.
func restored(t *testing.T, s *mvcc.Store, keepGoing bool) (*vfs.Mem, *backup.Manifest) {
	t.Helper()
	target, err := objectstore.Open(t.TempDir(), objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := backup.Create(t.Context(), s, target, backup.Options{KeepGoing: keepGoing})
	if err != nil {
		t.Fatal(err)
	}
	fs := vfs.NewMem()
	if err := fs.MkdirAll("db"); err != nil {
		t.Fatal(err)
	}
	if err := backup.RestoreBase(t.Context(), target, m, fs, "db", backup.RestoreOptions{AllowDamaged: keepGoing}); err != nil {
		t.Fatal(err)
	}
	return fs, m
}

// TestBackupOfLevel1Restores: with its level, so that the version that has written the store can open what is restored.
func TestBackupOfLevel1Restores(t *testing.T) {
	old, want := level1Store(t)
	s := mustOpen(t, level1Options(old))
	fs, m := restored(t, s, false)
	if m.State.FeatureLevel != uint32(keys.FeatureLevelOldest) || !strings.HasPrefix(backup.Dir(s.History().Lineage, s.ID()), "store-") {
		t.Fatalf("feature level %d, directory %s", m.State.FeatureLevel, backup.Dir(s.History().Lineage, s.ID()))
	}
	again := mustOpen(t, level1Options(fs))
	if again.FeatureLevel() != keys.FeatureLevelOldest || again.ID() != s.ID() {
		t.Fatalf("restored at feature level %d, store %x", again.FeatureLevel(), again.ID())
	}
	if err := equalMaps(want, dump(t, again)); err != nil {
		t.Fatal(err)
	}
}

// TestBackupHasTheRepairTree: what was written over damaged pages is restored; what they hid stays an error and is never "not found".
// Without keepGoing such a backup fails and names the page.
func TestBackupHasTheRepairTree(t *testing.T) {
	o := tiny(vfs.NewMem())
	s, err := mvcc.Open(o) // not mustOpen, which would verify in the end
	if err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		mustPut(t, s, fmt.Sprintf("k%03d", i), strings.Repeat("v", 100))
	}
	mustClose(t, s)
	damageLeaves(t, o.Storage.FS, 8192, 1)
	if s, err = mvcc.Open(o); err != nil {
		t.Fatal(err)
	}
	for i := range 10 {
		mustPut(t, s, fmt.Sprintf("k%03d", i), "written again")
	}
	if err := s.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
	target, err := objectstore.Open(t.TempDir(), objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	var damaged *backup.DamagedPageError
	if _, err := backup.Create(t.Context(), s, target, backup.Options{}); !errors.As(err, &damaged) {
		t.Fatalf("a backup of a damaged store: %v", err)
	}
	fs, m := restored(t, s, true)
	if len(m.Damaged) == 0 || m.Damaged[0] != uint64(damaged.Page) {
		t.Fatalf("damaged pages %v, %d was named", m.Damaged, damaged.Page)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := mvcc.Open(tiny(fs))
	if err != nil {
		t.Fatal(err)
	}
	x := mustSession(t, again)
	for i := range 100 {
		v, err := x.Get(nil, fmt.Appendf(nil, "k%03d", i), 0)
		if i < 10 && (err != nil || string(v.Data) != "written again") || i >= 10 && !asDamage(err) {
			t.Fatalf("key %d: %q, %v", i, v.Data, err)
		}
	}
	x.Close()
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestABackupHasTheRecordOfLostEpochs: a crash has lost a commit that a client saw. A start that has no segment of the log, because the disk is full, has committed nothing
// of that when the backup is made. What is restored refuses the epoch all the same.
func TestABackupHasTheRecordOfLostEpochs(t *testing.T) {
	for kills := range 7 { // the last of which leave no segment to the next start
		fs := vfs.NewMem()
		o := tiny(fs)
		o.Retention, o.SyncInterval, o.Storage.DiskReserve = time.Hour, time.Hour, 1<<20
		s := mustOpen(t, o)
		mustPut(t, s, "key", "durable")
		lost := keys.Epoch(0)
		for range kills + 1 {
			w := mvcc.Write{Durability: mvcc.DurabilityAsync}
			w.Delete([]byte("key"))
			x := mustSession(t, s)
			e, err := commitAndWait(x, &w)
			if err != nil || e <= s.Durable() {
				t.Fatalf("epoch %d, durable %d: %v", e, s.Durable(), err)
			}
			x.Close()
			lost, fs = e, fs.Crash(1, vfs.SurviveNone)
			_ = s.Close()
			fs.LeaveFree(0)
			o.Storage.FS = fs
			s = mustOpen(t, o)
		}
		fs.SetCapacity(0)
		w, x := mvcc.Write{Durability: mvcc.DurabilitySync}, mustSession(t, s) // a put may be refused for another moment
		w.Delete([]byte("other"))
		if _, err := commitAndWait(x, &w); err != nil {
			t.Fatal(err)
		}
		x.Close()
		o.Storage.FS, _ = restored(t, s, false)
		x = mustSession(t, mustOpen(t, o))
		if v, err := x.Get(nil, []byte("key"), lost); !errors.As(err, new(*mvcc.SnapshotGoneError)) {
			t.Errorf("%d kills: restored, at the lost epoch %d: found %v %q, %v", kills, lost, v.Found, v.Data, err)
		}
		x.Close()
	}
}
