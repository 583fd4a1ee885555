package server

import (
	"cmp"
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// verifyBackup verifies a backup, and returns the report.
func verifyBackup(ctx context.Context, c pb.BackupServiceClient, req *pb.VerifyBackupRequest) (*pb.BackupVerification, error) {
	stream, err := c.VerifyBackup(ctx, req)
	if err != nil {
		return nil, err
	}
	for {
		response, err := stream.Recv()
		if err != nil || response.GetReport() != nil {
			return response.GetReport(), err
		}
	}
}

// withBackups has made two full backups, and returns them, as the target orders them: they may be of one second.
func withBackups(t *testing.T) (h *harness, c pb.BackupServiceClient, target string, made []*pb.BackupInfo) {
	t.Helper()
	h, target = mustStart(t), t.TempDir()
	c = pb.NewBackupServiceClient(h.conn)
	h.put(t, "key", "value")
	for range 2 {
		b, err := createBackup(testContext(t), c, &pb.CreateBackupRequest{Target: target})
		if err != nil {
			t.Fatal(err)
		}
		made = append(made, b)
	}
	slices.SortFunc(made, func(a, b *pb.BackupInfo) int { return cmp.Compare(a.Id, b.Id) })
	return h, c, target, made
}

func TestServerListsAndVerifiesTheBackupsOfATarget(t *testing.T) {
	_, c, target, made := withBackups(t)
	list, err := c.ListBackups(testContext(t), &pb.ListBackupsRequest{Target: target})
	if err != nil || len(list.Backups) != 2 || list.Backups[0].Id != made[0].Id || list.Backups[1].Epoch != made[1].Epoch || len(list.Broken) != 0 || len(list.Lineages) != 1 {
		t.Fatalf("%v, %v", list, err)
	}
	report, err := verifyBackup(testContext(t), c, &pb.VerifyBackupRequest{Target: target})
	if err != nil || report.Id != made[1].Id || report.Parts != made[1].Parts || report.Bytes != made[1].Bytes || report.Backups != 1 {
		t.Fatalf("%v, %v, want %v", report, err, made[1])
	}
	byName := &pb.VerifyBackupRequest{Target: target, Lineage: list.Lineages[0], Id: made[0].Id}
	if report, err = verifyBackup(testContext(t), c, byName); err != nil || report.Id != made[0].Id {
		t.Fatalf("%v, %v", report, err)
	}
	for _, part := range mustGlob(t, filepath.Join(target, "*", "base", "parts", "*")) { // of both backups
		content, err := os.ReadFile(part)
		if err != nil {
			t.Fatal(err)
		}
		content[len(content)/2] ^= 1
		if err := os.WriteFile(part, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	_, err = verifyBackup(testContext(t), c, &pb.VerifyBackupRequest{Target: target})
	failureOf(t, err).want(t, codes.DataLoss, pb.ErrorReason_ERROR_REASON_BACKUP_DAMAGED)
}

func mustGlob(t *testing.T, pattern string) []string {
	t.Helper()
	names, err := filepath.Glob(pattern)
	if err != nil || len(names) == 0 {
		t.Fatalf("%s: %v, %v", pattern, names, err)
	}
	return names
}

func TestServerPrunesTheBackupsOfATarget(t *testing.T) {
	_, c, target, made := withBackups(t)
	request := &pb.PruneBackupsRequest{Target: target, KeepFull: 1, DryRun: true}
	for _, request.DryRun = range []bool{true, false} {
		r, err := c.PruneBackups(testContext(t), request)
		if err != nil || len(r.Removed) != 1 || r.Removed[0] != made[0].Id || len(r.Kept) != 1 || r.OldestEpoch != made[1].Epoch {
			t.Fatalf("dry run %v: %v, %v", request.DryRun, r, err)
		}
	}
	list, err := c.ListBackups(testContext(t), &pb.ListBackupsRequest{Target: target})
	if err != nil || len(list.Backups) != 1 || list.Backups[0].Id != made[1].Id {
		t.Fatalf("%v, %v", list, err)
	}
	request = &pb.PruneBackupsRequest{Target: target, KeepFor: durationpb.New(-time.Second)}
	_, err = c.PruneBackups(testContext(t), request)
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST)
}

// TestHistoriesOfATargetAreNamedByIt: a name is never a path, that of a backup neither.
func TestHistoriesOfATargetAreNamedByIt(t *testing.T) {
	_, c, target, made := withBackups(t)
	if err := os.WriteFile(filepath.Join(target, "host.conf"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"../../../host", "../manifests/" + made[0].Id} {
		_, err := verifyBackup(testContext(t), c, &pb.VerifyBackupRequest{Target: target, Id: id})
		failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_BACKUP_FAILED)
		_, err = createBackup(testContext(t), c, &pb.CreateBackupRequest{Target: target, Base: id})
		failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_BACKUP_FAILED)
	}
	for _, name := range []string{"..", "../x", "0123", "/"} {
		_, err := c.ListBackups(testContext(t), &pb.ListBackupsRequest{Target: target, Lineage: name})
		failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST)
		_, err = c.PruneBackups(testContext(t), &pb.PruneBackupsRequest{Target: target, Lineage: name})
		failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST)
		_, err = verifyBackup(testContext(t), c, &pb.VerifyBackupRequest{Target: target, Lineage: name})
		failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST)
	}
}

func TestTargetIsVerifiedOrPrunedOnceAtATime(t *testing.T) {
	h, c, target, made := withBackups(t)
	work := &h.snapshots.backups.targets
	work.working <- struct{}{}
	_, err := verifyBackup(testContext(t), c, &pb.VerifyBackupRequest{Target: target})
	failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_BACKUP_RUNNING)
	_, err = c.PruneBackups(testContext(t), &pb.PruneBackupsRequest{Target: target, KeepFull: 1})
	failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_BACKUP_RUNNING)
	<-work.working
	if report, err := verifyBackup(testContext(t), c, &pb.VerifyBackupRequest{Target: target}); err != nil || report.Id != made[1].Id {
		t.Fatalf("%v, %v", report, err)
	}
}

// TestListsOfTargetsAreInTurnByClient: a list may take as long as its target does not answer, and a client that asks for many lets others wait for
// one of them.
func TestListsOfTargetsAreInTurnByClient(t *testing.T) {
	h, c, target, _ := withBackups(t)
	line := &h.snapshots.backups.targets.lists
	waiting := func(n int) func() bool {
		return func() bool {
			line.mu.Lock()
			defer line.mu.Unlock()
			return line.requests == n
		}
	}
	leave, err := line.enter(t.Context(), "slow")
	if err != nil {
		t.Fatal(err)
	}
	var lists, other sync.WaitGroup
	defer lists.Wait()
	for range 2 {
		lists.Go(func() {
			list, err := c.ListBackups(testContext(t), &pb.ListBackupsRequest{Target: target})
			if err != nil || len(list.Backups) != 2 {
				t.Errorf("%v, %v", list, err)
			}
		})
	}
	eventually(t, "two lists of a client wait", waiting(3))
	other.Go(func() {
		leave, err := line.enter(testContext(t), "other")
		if err != nil {
			t.Error(err)
			return
		}
		defer leave()
		if waiting(1)() {
			t.Error("all lists of a client were made before that of another")
		}
	})
	eventually(t, "another client waits", waiting(4))
	late, cancel := context.WithTimeout(testContext(t), 50*time.Millisecond)
	defer cancel()
	if _, err := c.ListBackups(late, &pb.ListBackupsRequest{Target: target}); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("a list whose deadline has come: %v", err)
	}
	eventually(t, "it has left the line", waiting(4))
	if _, err := pb.NewLeaseServiceClient(h.conn).GetLease(testContext(t), &pb.GetLeaseRequest{Id: 1}); status.Code(err) != codes.NotFound {
		t.Errorf("beside lists of a target: %v", err)
	}
	leave()
	other.Wait()
	lists.Wait()
	if !waiting(0)() {
		t.Error("places of the line were not given back")
	}
}
