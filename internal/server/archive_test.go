package server

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/health"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestArchiveStatusTellsWhatCanBeRestored: what is acknowledged is in the archive soon, and the status says so, also when the archive
// does not take anything.
func TestArchiveStatusTellsWhatCanBeRestored(t *testing.T) {
	dir := t.TempDir()
	h := mustStart(t, func(c *config.Config) { c.Archive.URL, c.Archive.Interval = dir, 100*time.Millisecond })
	ctx := testContext(t)
	put, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("a"), Value: []byte("b")})
	if err != nil {
		t.Fatal(err)
	}
	status := awaitArchive(t, h, func(s *pb.ArchiveStatusResponse) bool { return s.GetArchivedEpoch() >= put.GetEpoch() })
	i := status.GetIntervals()
	if len(i) != 1 || i[0].GetFirstEpoch() != 1 || i[0].GetLastEpoch() < put.GetEpoch() || i[0].GetNewestUs() < i[0].GetOldestUs() || status.GetBreakReason() != "" || status.GetFiles() == 0 {
		t.Fatalf("%v", status)
	}
	if found := h.feed.archiveConditions(time.Now()); len(found) != 0 {
		t.Fatalf("%+v", found)
	}
	late := h.feed.archiveConditions(time.Now().Add(time.Hour))
	if len(late) != 1 || late[0].Name != "archive-lagging" {
		t.Fatalf("%+v", late)
	}
	stats := h.stats().Archive
	if !stats.Enabled || uint64(stats.Archived) != status.GetArchivedEpoch() {
		t.Fatalf("%+v", stats)
	}
}

// awaitArchive waits for a state of the archive.
func awaitArchive(t *testing.T, h *harness, done func(*pb.ArchiveStatusResponse) bool) *pb.ArchiveStatusResponse {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		s, err := h.admin.ArchiveStatus(testContext(t), &pb.ArchiveStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if done(s) {
			return s
		}
		if time.Now().After(deadline) {
			t.Fatalf("%v", s)
		}
	}
}

// TestArchiveOfAnotherStoreIsRefused: the server serves, and a condition says that nothing is archived, and why. When the archive takes the store
// again, the backup is made that it needs by then.
func TestArchiveOfAnotherStoreIsRefused(t *testing.T) {
	dir, disk := t.TempDir(), vfs.NewMem()
	adjust := func(c *config.Config) { c.Archive.URL, c.Archive.Interval = dir, 100*time.Millisecond }
	h := mustStartOn(t, disk, adjust)
	first := h.put(t, "first", "value")
	status := awaitArchive(t, h, func(s *pb.ArchiveStatusResponse) bool { return s.GetArchivedEpoch() >= first })
	if err := h.stop(); err != nil {
		t.Fatal(err)
	}
	target, err := objectstore.Open(dir, objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	name := status.GetLineage() + "/lineage.json"
	if size, err := archive.PageSizeOf(testContext(t), target, h.store.History().Lineage); err != nil || size != int(h.config.PageSize) {
		t.Errorf("the archive notes pages of %d bytes: %v", size, err)
	}
	if err := target.Delete(testContext(t), name); err != nil {
		t.Fatal(err)
	}
	if err := target.Create(testContext(t), name, objectstore.Bytes(`{"format":1,"lineage":"`+status.GetLineage()+`","store_id":"another"}`)); err != nil {
		t.Fatal(err)
	}
	h = mustStartOn(t, disk, adjust)
	status = awaitArchive(t, h, func(s *pb.ArchiveStatusResponse) bool { return s.GetRefused() })
	found := h.feed.archiveConditions(time.Now())
	if !strings.Contains(status.GetError(), "store another") || len(found) == 0 || found[0].Name != "archive-refused" {
		t.Fatalf("%v %+v", status, found)
	}
	h.store.HoldBulkLoads(false) // the archive begins anew after it
	if _, err := h.bulk(t, 20, 10, true); err != nil {
		t.Fatal(err)
	}
	h.put(t, "a", "value")
	if err := target.Delete(testContext(t), name); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a backup is made", func() bool { return len(basesOf(t, h)) == 1 })
}

// TestServerWithoutAnArchiveSaysSo: the status is empty, and there are no conditions.
func TestServerWithoutAnArchiveSaysSo(t *testing.T) {
	h := mustStart(t)
	s, err := h.admin.ArchiveStatus(testContext(t), &pb.ArchiveStatusRequest{})
	if err != nil || s.GetEnabled() || h.feed.archiveConditions(time.Now()) != nil || h.stats().Archive.Enabled {
		t.Fatal(s, err)
	}
}

// deafBucket makes s3://bucket a target that accepts connections and never answers.
func deafBucket(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	t.Setenv("AWS_ENDPOINT_URL_S3", "http://"+listener.Addr().String())
	t.Setenv("AWS_ACCESS_KEY_ID", "id")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
}

// TestArchiveStatusDoesNotWaitForTheTarget: a target that accepts connections and never answers delays the status for two seconds, and
// neither writes nor the end of the server.
func TestArchiveStatusDoesNotWaitForTheTarget(t *testing.T) {
	deafBucket(t)
	h := mustStart(t, func(c *config.Config) { c.Archive.URL, c.Archive.Interval = "s3://bucket", 100*time.Millisecond })
	h.put(t, "a", "b")
	ctx, cancel := context.WithTimeout(testContext(t), 8*time.Second)
	defer cancel()
	status, err := h.admin.ArchiveStatus(ctx, &pb.ArchiveStatusRequest{})
	if err != nil || !status.GetEnabled() || status.GetError() == "" {
		t.Fatalf("%v, %v", status, err)
	}
	if err := h.stop(); err != nil {
		t.Fatal(err)
	}
}

// TestLagOfAnArchiveThatHasNotAnsweredIsThatOfTheLog: after a start it was the time since then, although the archive may have ended long before it.
func TestLagOfAnArchiveThatHasNotAnsweredIsThatOfTheLog(t *testing.T) {
	deafBucket(t)
	disk := vfs.NewMem()
	adjust := func(c *config.Config) { c.Archive.URL, c.Archive.Interval = "s3://bucket", 100*time.Millisecond }
	h := mustStartOn(t, disk, adjust)
	h.put(t, "a", "b")
	committed := time.Now()
	if err := h.stop(); err != nil {
		t.Fatal(err)
	}
	h = mustStartOn(t, disk, adjust)
	eventually(t, "the commit before the start counts", func() bool { return !h.feed.archive.Status().AsOf.After(committed) })
	asked := time.Now()
	status, err := h.admin.ArchiveStatus(testContext(t), &pb.ArchiveStatusRequest{})
	if err != nil || status.GetLag().AsDuration() < asked.Sub(committed) {
		t.Errorf("the lag is %v, %v", status.GetLag().AsDuration(), err)
	}
	if found := h.feed.archiveConditions(h.feed.archive.Status().AsOf.Add(archiveLagMin + time.Nanosecond)); len(found) != 0 {
		t.Errorf("before the archive had its time to answer: %+v", found)
	}
}

// storeToCopy is a store that was stopped, and is archived to a directory.
func storeToCopy(t *testing.T) (dir string, disk *vfs.Mem, adjust func(*config.Config)) {
	t.Helper()
	dir, disk = t.TempDir(), vfs.NewMem()
	adjust = func(c *config.Config) { c.Archive.URL, c.Archive.Interval = dir, 100*time.Millisecond }
	h := mustStartOn(t, disk, adjust)
	h.put(t, "a", "b")
	if err := h.stop(); err != nil {
		t.Fatal(err)
	}
	return dir, disk, adjust
}

// TestSecondCopyOfAStoreSaysThatItIsNotArchived: of two servers with copies of one data directory and one archive, the second one says in
// its status, its log and its metrics that it is not archived, and why; it serves, and the first one archives.
func TestSecondCopyOfAStoreSaysThatItIsNotArchived(t *testing.T) {
	t.Parallel() // it waits for an owner to answer
	dir, disk, adjust := storeToCopy(t)
	first := mustStartOn(t, disk.Crash(1, vfs.SurviveAll), adjust)
	awaitArchive(t, first, func(s *pb.ArchiveStatusResponse) bool { return s.GetArchivedEpoch() > 0 && s.GetError() == "" })
	second := mustStartOn(t, disk.Crash(2, vfs.SurviveAll), adjust)
	status := awaitArchive(t, second, func(s *pb.ArchiveStatusResponse) bool { return s.GetRefused() })
	if !strings.Contains(status.GetError(), "archives a copy of this store to the same place") || status.GetFiles() != 0 || status.GetOwner() == nil || status.GetOwner().GetSelf() {
		t.Fatalf("%v", status)
	}
	if o := awaitArchive(t, first, func(s *pb.ArchiveStatusResponse) bool { return s.GetOwner() != nil }).GetOwner(); !o.GetSelf() || o.GetHost() != status.GetOwner().GetHost() || o.GetSince() == nil || o.GetProcess() != int64(os.Getpid()) {
		t.Fatalf("%v owns the archive, and the other one says %v", o, status.GetOwner())
	}
	copyIsNoBackup(t, first, second, dir)
	eventually(t, "the log has the condition", func() bool { return strings.Contains(second.log.String(), "archive-in-use") })
	eventually(t, "the metrics have the condition", func() bool {
		return slices.ContainsFunc(second.observe(), func(c health.Condition) bool { return c.Name == "archive-in-use" })
	})
	second.put(t, "a", "c")
	put, err := first.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("a"), Value: []byte("d")})
	if err != nil {
		t.Fatal(err)
	}
	awaitArchive(t, first, func(s *pb.ArchiveStatusResponse) bool {
		return s.GetArchivedEpoch() >= put.GetEpoch() && !s.GetRefused()
	})
	if s := second.stats().Archive; !s.Refused() || s.Files != 0 {
		t.Fatalf("%+v", s)
	}
}

// TestACopyThatHasGoneOnMakesNoBackupIntoTheArchive: a restore would take it for the latest state of the store that is archived there.
func TestACopyThatHasGoneOnMakesNoBackupIntoTheArchive(t *testing.T) {
	dir, disk, adjust := storeToCopy(t)
	copied := disk.Crash(2, vfs.SurviveAll)
	first := mustStartOn(t, disk.Crash(1, vfs.SurviveAll), adjust)
	e := first.put(t, "a", "of the archived store")
	awaitArchive(t, first, func(s *pb.ArchiveStatusResponse) bool { return s.GetArchivedEpoch() >= e })
	alone := mustStartOn(t, copied)
	for range 20 {
		alone.put(t, "a", "of the copy")
	}
	if err := alone.stop(); err != nil {
		t.Fatal(err)
	}
	second := mustStartOn(t, copied, adjust)
	awaitArchive(t, second, func(s *pb.ArchiveStatusResponse) bool { return s.GetRefused() })
	copyIsNoBackup(t, first, second, dir)
	status := second.feed.archive.Status() // of an owner: an upload was refused
	status.Owner = &archive.Owner{Self: true}
	if target, err := objectstore.Open(dir, objectstore.Options{}); err != nil || second.refuseCopyAt(t.Context(), target, &status) == nil {
		t.Errorf("an owner that is refused makes a backup: %v", err)
	}
	refusalIsNotForgotten(t, first, second, dir)
	if err := second.stop(); err != nil {
		t.Fatal(err)
	}
	copyIsNoBackup(t, first, mustStartOn(t, copied, adjust), dir) // which waits for the archive to answer
}

// refusalIsNotForgotten: another error comes after it, and the notes of the owners go.
func refusalIsNotForgotten(t *testing.T, owner, other *harness, dir string) {
	t.Helper()
	origins, err := filepath.Glob(filepath.Join(dir, "*", "lineage.json"))
	if err != nil || len(origins) != 1 {
		t.Fatalf("%v, %v", origins, err)
	}
	owners, hidden := filepath.Join(filepath.Dir(origins[0]), "owners"), origins[0]+".hidden"
	move := func(from, to string) {
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
	}
	move(origins[0], hidden)
	if err := os.Mkdir(origins[0], 0o700); err != nil {
		t.Fatal(err)
	}
	s := awaitArchive(t, other, func(s *pb.ArchiveStatusResponse) bool { return strings.Contains(s.GetError(), "regular file") })
	if !s.GetRefused() {
		t.Errorf("after another error, it is no matter of an operator any more: %v", s)
	}
	if c := other.feed.archiveConditions(time.Now()); len(c) != 1 || c[0].Name != "archive-refused" || strings.Contains(c[0].Cause, "regular file") {
		t.Errorf("the conditions are %+v", c)
	}
	copyIsNoBackup(t, owner, other, dir)
	move(owners, owners+".hidden")
	_, err = createBackup(testContext(t), pb.NewBackupServiceClient(other.conn), &pb.CreateBackupRequest{Target: dir})
	move(owners+".hidden", owners)
	failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_BACKUP_FAILED)
	if err := os.Remove(origins[0]); err != nil {
		t.Fatal(err)
	}
	move(hidden, origins[0])
}

// TestABackupToTheArchiveRightAfterAStartWaitsForIt: the server before has left a note that it is the owner.
func TestABackupToTheArchiveRightAfterAStartWaitsForIt(t *testing.T) {
	dir, disk, adjust := storeToCopy(t)
	h := mustStartOn(t, disk, adjust)
	if _, err := createBackup(testContext(t), pb.NewBackupServiceClient(h.conn), &pb.CreateBackupRequest{Target: dir}); err != nil {
		t.Fatal(err)
	}
}

// copyIsNoBackup: a copy that is not archived makes no backup into the archive of the other one, under whatever name, but to other places.
func copyIsNoBackup(t *testing.T, owner, other *harness, dir string) {
	t.Helper()
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	c := pb.NewBackupServiceClient(other.conn)
	for _, target := range []string{dir, "file://" + dir, link} {
		_, err := createBackup(testContext(t), c, &pb.CreateBackupRequest{Target: target})
		failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_ARCHIVE_IN_USE, "host", "process")
	}
	if _, err := createBackup(testContext(t), c, &pb.CreateBackupRequest{Target: t.TempDir()}); err != nil {
		t.Fatal(err)
	}
	if _, err := createBackup(testContext(t), pb.NewBackupServiceClient(owner.conn), &pb.CreateBackupRequest{Target: dir}); err != nil {
		t.Fatal(err)
	}
}
