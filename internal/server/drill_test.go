package server

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// TestDrillsSayWhetherTheArchiveCanBeRestored: by themselves, in the metrics, the log and a condition; a drill that fails after one that
// was successful is noticed, and nothing is left.
func TestDrillsSayWhetherTheArchiveCanBeRestored(t *testing.T) {
	dir, scratch := t.TempDir(), t.TempDir()
	h := mustStart(t, func(c *config.Config) {
		c.Archive.URL, c.Archive.Interval, c.Archive.Drill, c.Archive.DrillDir = dir, 100*time.Millisecond, 500*time.Millisecond, scratch
	})
	put := h.put(t, "a", "b")
	status := awaitArchive(t, h, func(s *pb.ArchiveStatusResponse) bool { return s.GetArchivedEpoch() >= put })
	b := &h.snapshots.backups
	eventually(t, "a drill is successful", func() bool { return !h.stats().Backups.Drills.Success.IsZero() })
	if found := b.conditions(time.Now(), 0); len(found) > 0 {
		t.Fatalf("%+v", found)
	}
	logs, err := filepath.Glob(filepath.Join(dir, status.GetLineage(), "log", "0000000000000001-*"))
	if err != nil || len(logs) != 1 {
		t.Fatal(logs, err)
	}
	if err := os.Truncate(logs[0], 100); err != nil {
		t.Fatal(err)
	}
	before := h.stats().Backups.Drills.Failures // the first drills may have come before the backup that they need
	eventually(t, "a drill fails", func() bool { return h.stats().Backups.Drills.Failures > before })
	found := b.conditions(time.Now(), 0)
	if len(found) != 1 || found[0].Name != "restore-drill-failing" || !strings.Contains(found[0].Cause, filepath.Base(logs[0])) {
		t.Fatalf("%+v", found)
	}
	if err := h.stop(); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(scratch); err != nil || len(left) > 0 {
		t.Fatalf("the drills have left %v: %v", left, err)
	}
}

// TestDrillAfterABulkLoadWaitsForNoCommit: if the archive has no record of it, its epoch is reached by a backup alone.
func TestDrillAfterABulkLoadWaitsForNoCommit(t *testing.T) {
	dir, scratch := t.TempDir(), t.TempDir()
	h := mustStart(t, func(c *config.Config) {
		c.Archive.URL, c.Archive.Interval, c.Archive.Drill, c.Archive.DrillDir = dir, 100*time.Millisecond, 300*time.Millisecond, scratch
	})
	h.store.HoldBulkLoads(false)
	put := h.put(t, "a", "b")
	awaitArchive(t, h, func(s *pb.ArchiveStatusResponse) bool { return s.GetArchivedEpoch() >= put })
	if _, err := h.bulk(t, 100, 10, true); err != nil {
		t.Fatal(err)
	}
	backups := pb.NewBackupServiceClient(h.conn)
	eventually(t, "a backup is made", func() bool { // the server may be making one itself, because the archive has no base
		_, err := createBackup(testContext(t), backups, &pb.CreateBackupRequest{Target: dir})
		return err == nil
	})
	made := time.Now()
	eventually(t, "a drill is successful", func() bool { return h.stats().Backups.Drills.Success.After(made) })
}

// TestDrillAfterAnArchivedBulkLoadNeedsNoBackup: and compares what was loaded with the store.
func TestDrillAfterAnArchivedBulkLoadNeedsNoBackup(t *testing.T) {
	h := mustStart(t, func(c *config.Config) {
		c.Archive.URL, c.Archive.Interval, c.Archive.Drill, c.Archive.DrillDir = t.TempDir(), 100*time.Millisecond, 300*time.Millisecond, t.TempDir()
	})
	h.put(t, "a", "b")
	if _, err := h.bulk(t, 100, 10, true); err != nil {
		t.Fatal(err)
	}
	loaded := time.Now()
	eventually(t, "a drill is successful", func() bool { return h.stats().Backups.Drills.Success.After(loaded.Add(time.Second)) })
	if all := basesOf(t, h); len(all) > 0 {
		t.Fatalf("%d backups", len(all))
	}
}

// TestDrillsOnTheDeviceOfTheDataAreWarnedOf: as a condition, from the start on.
func TestDrillsOnTheDeviceOfTheDataAreWarnedOf(t *testing.T) {
	dir := t.TempDir()
	for beside, want := range map[string]int{dir: 1, "/proc": 0, filepath.Join(dir, "missing"): 0} {
		var b backupState
		b.drillsOn(beside, dir)
		if found := b.conditions(time.Now(), 0); len(found) != want || want == 1 && (found[0].Name != "restore-drill-on-data-device" || !strings.Contains(found[0].Cause, dir)) {
			t.Errorf("%s: %+v", beside, found)
		}
	}
}
