package server

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/health"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/restore"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/vfs"
)

// basesOf are the backups in the archive of a server.
func basesOf(t *testing.T, h *harness) []*backup.Manifest {
	t.Helper()
	all, err := h.archivedBackups(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestBulkLoadIsArchivedWithoutABackup: the archive goes on after it, and what was loaded is restored.
func TestBulkLoadIsArchivedWithoutABackup(t *testing.T) {
	dir := t.TempDir()
	h := mustStart(t, func(c *config.Config) { c.Archive.URL, c.Archive.Interval = dir, 100*time.Millisecond })
	h.put(t, "before", "value")
	loaded, err := h.bulk(t, 20, 10, true)
	if err != nil {
		t.Fatal(err)
	}
	status := awaitArchive(t, h, func(s *pb.ArchiveStatusResponse) bool { return s.GetArchivedEpoch() >= loaded.GetEpoch() })
	if status.GetBreakReason() != "" || len(status.GetIntervals()) != 1 || len(basesOf(t, h)) != 0 {
		t.Fatalf("%+v", status)
	}
	if stats := h.stats().Archive.Loads; stats.Archived != 1 || stats.Objects == 0 || stats.Bytes == 0 {
		t.Fatalf("%+v", stats)
	}
	store, err := objectstore.Open(dir, objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	r, err := restore.Run(testContext(t), restore.Options{Store: store, Dir: filepath.Join(t.TempDir(), "restored"), Memory: 64 << 20})
	if err != nil || r.Loads != 1 || r.Reached.Epoch < keys.Epoch(loaded.GetEpoch()) {
		t.Fatalf("%+v, %v", r, err)
	}
}

// TestBulkLoadThatIsNotArchivedIsFollowedByAFullBackup: by itself, after a backup that runs, and once. After a start the metrics have it; if it is
// gone, the next start makes another one.
func TestBulkLoadThatIsNotArchivedIsFollowedByAFullBackup(t *testing.T) {
	dir, disk := t.TempDir(), vfs.NewMem()
	adjust := func(c *config.Config) { c.Archive.URL, c.Archive.Interval = dir, 100*time.Millisecond }
	h := mustStartOn(t, disk, adjust)
	h.store.HoldBulkLoads(false)
	h.put(t, "before", "value")
	b := &h.snapshots.backups
	if err := b.begin("another target"); err != nil {
		t.Fatal(err)
	}
	loaded, err := h.bulk(t, 20, 10, true)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "an attempt finds the other backup", func() bool { return strings.Contains(h.log.String(), errBackupRunning.Error()) })
	if all := basesOf(t, h); len(all) > 0 {
		t.Fatalf("%d backups at the same time", 1+len(all))
	}
	b.end(nil, errors.New("the other backup has failed"))
	eventually(t, "a backup is made", func() bool { return h.stats().Backups.Full.Bytes > 0 })
	all := basesOf(t, h)
	if len(all) != 1 || all[0].Kind != backup.Full || all[0].Epoch() < keys.Epoch(loaded.Epoch) {
		t.Fatalf("%+v", all)
	}
	if found := b.conditions(time.Now(), time.Hour); len(found) > 0 {
		t.Fatalf("%+v", found)
	}
	after := h.put(t, "after", "value")
	awaitArchive(t, h, func(s *pb.ArchiveStatusResponse) bool { return s.GetArchivedEpoch() >= after })
	if err := h.stop(); err != nil {
		t.Fatal(err)
	}

	h = mustStartOn(t, disk, adjust)
	eventually(t, "the metrics have the backup of before", func() bool { return h.stats().Backups.Full.Time.Equal(all[0].Created) })
	if err := h.stop(); err != nil {
		t.Fatal(err)
	}
	if again := basesOf(t, h); len(again) != 1 {
		t.Fatalf("%d backups, one is enough", len(again))
	}
	removeAll(t, dir, "/base/manifests/")
	h = mustStartOn(t, disk, adjust)
	eventually(t, "the backup that is gone is made again", func() bool { return len(basesOf(t, h)) == 1 })
}

// TestAutomaticBackupHasTheNewestEpoch: the newest state in the data file, which any other backup copies if it is young, may be older than what needs the backup.
func TestAutomaticBackupHasTheNewestEpoch(t *testing.T) {
	dir := t.TempDir()
	h := mustStart(t, func(c *config.Config) { c.Archive.URL = dir })
	h.put(t, "before", "value")
	if err := h.store.Checkpoint(testContext(t)); err != nil {
		t.Fatal(err)
	}
	needed := keys.Epoch(h.put(t, "after", "value"))
	b := &h.snapshots.backups
	if err := b.begin("target"); err != nil {
		t.Fatal(err)
	}
	m, err := h.backUpSince(testContext(t), needed)
	b.end(m, err)
	if err != nil || m.Epoch() < needed {
		t.Fatalf("%+v, %v", m, err)
	}
}

// TestNoAutomaticBackupOnAFullDisk: it would keep the pages that deletions free. It is made when the disk has space again. Nor is there a drill.
func TestNoAutomaticBackupOnAFullDisk(t *testing.T) {
	disk, dir := vfs.NewMem(), t.TempDir()
	h := mustStartOn(t, disk, func(c *config.Config) { c.Archive.URL, c.Archive.Interval = dir, 100*time.Millisecond })
	first := h.put(t, "k", "v")
	awaitArchive(t, h, func(s *pb.ArchiveStatusResponse) bool { return s.GetArchivedEpoch() >= first })
	ctx, stop := h.untilDiskFull(testContext(t))
	defer stop()
	if ctx.Err() != nil {
		t.Fatalf("a disk with space: %v", context.Cause(ctx))
	}
	disk.SetCapacity(1)
	value := make([]byte, 32<<10)
	for i := 0; h.store.Shortage() == nil; i++ {
		_, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: fmt.Appendf(nil, "large-%05d", i), Value: value, Durability: pb.Durability_DURABILITY_ASYNC})
		if err != nil && i > 1000 {
			t.Fatal(err)
		}
	}
	<-ctx.Done()
	if err := context.Cause(ctx); !errors.Is(err, vfs.ErrNoSpace) {
		t.Fatal(err)
	}
	if err := h.backUpForArchive(testContext(t), "the test"); !errors.Is(err, vfs.ErrNoSpace) {
		t.Fatalf("a backup on a full disk: %v", err)
	}
	h.config.Archive.DrillDir = t.TempDir()
	if _, err := h.drill(testContext(t)); !errors.Is(err, vfs.ErrNoSpace) {
		t.Fatalf("a drill on a full disk: %v", err)
	}
	disk.SetCapacity(0)
	eventually(t, "a backup is made if it is needed", func() bool {
		err := h.backUpForArchive(testContext(t), "the test")
		return err == nil || errors.Is(err, errBackupRunning)
	})
}

// removeAll deletes the objects of a target with a part of a name.
func removeAll(t *testing.T, target, part string) {
	t.Helper()
	store, err := objectstore.Open(target, objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	if err := store.List(testContext(t), "", func(o objectstore.Object) error {
		names = append(names, o.Name)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.DeleteFunc(names, func(n string) bool { return !strings.Contains(n, part) }) {
		if err := store.Delete(testContext(t), name); err != nil {
			t.Fatal(err)
		}
	}
}

// TestConditionsOfBackups: a failure is one until a backup is made, and an age is one if it was given.
func TestConditionsOfBackups(t *testing.T) {
	start := time.Now()
	b := &backupState{since: start}
	names := func(after, ageMax time.Duration) string {
		var out []string
		for _, c := range b.conditions(start.Add(after), ageMax) {
			if c.Severity != health.Warning || c.Message == "" || c.Cause == "" {
				t.Errorf("%+v", c)
			}
			out = append(out, c.Name)
		}
		return strings.Join(out, " ")
	}
	end := func(m *backup.Manifest, err error) {
		if err := b.begin("target"); err != nil {
			t.Fatal(err)
		}
		b.end(m, err)
	}
	full := &backup.Manifest{Kind: backup.Full, Created: start.Add(-time.Hour)}
	for _, step := range []struct {
		what   string
		do     func()
		after  time.Duration
		ageMax time.Duration
		want   string
	}{
		{"nothing is known", func() {}, time.Hour, 0, ""},
		{"nothing is known, for longer than the age", func() {}, 2 * time.Hour, time.Hour, "backup-old"},
		{"nothing is known, the server is young", func() {}, time.Minute, time.Hour, ""},
		{"a backup of before", func() { b.carryOver([]*backup.Manifest{full}) }, time.Minute, time.Hour, "backup-old"},
		{"the same, with a larger age", func() {}, time.Minute, 2 * time.Hour, ""},
		{"it is cancelled", func() { end(nil, context.Canceled) }, 0, 0, ""},
		{"it fails", func() { end(nil, errors.New("no space")) }, 0, 0, "backup-failing"},
		{"it is made", func() { end(full, nil) }, time.Minute, time.Hour, ""},
		{"an older one is found", func() { b.carryOver([]*backup.Manifest{full}) }, time.Minute, time.Hour, ""},
		{"it has damaged pages", func() { end(&backup.Manifest{Kind: backup.Full, Damaged: []uint64{7}}, nil) }, 0, 0, "backup-failing"},
		{"time passes", func() {}, 3 * time.Hour, time.Hour, "backup-failing backup-old"},
	} {
		step.do()
		if got := names(step.after, step.ageMax); got != step.want {
			t.Errorf("%s: %q, want %q", step.what, got, step.want)
		}
	}
	if n := b.metrics.Failures; n[telemetry.BackupDamage] != 1 || n[telemetry.BackupOther] != 1 || n[telemetry.BackupCancelled] != 1 {
		t.Errorf("failures %v", n)
	}
}
