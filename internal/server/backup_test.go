package server

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/vfs"
)

// createBackup makes a backup, and returns it with the messages of progress before it.
func createBackup(ctx context.Context, c pb.BackupServiceClient, req *pb.CreateBackupRequest) (*pb.BackupInfo, error) {
	stream, err := c.CreateBackup(ctx, req)
	if err != nil {
		return nil, err
	}
	for {
		response, err := stream.Recv()
		if err != nil {
			return nil, err
		}
		if made := response.GetBackup(); made != nil {
			_, err := stream.Recv()
			if err == io.EOF {
				err = nil
			}
			return made, err
		}
	}
}

func TestBackupsOfAServerRestore(t *testing.T) {
	h := mustStart(t)
	c, target := pb.NewBackupServiceClient(h.conn), t.TempDir()
	large := bytes.Repeat([]byte("large"), 40000)
	for i := range 50 {
		h.put(t, fmt.Sprintf("key-%d", i), string(large[:i*1000]))
	}
	first, err := createBackup(testContext(t), c, &pb.CreateBackupRequest{Target: target, Base: backup.LatestBase})
	if err != nil || first.Kind != "full" || first.Epoch < 50 || first.Pages != first.LivePages || first.Bytes == 0 {
		t.Fatalf("%v, %v", first, err)
	}
	h.put(t, "later", "value")
	if err := h.store.Checkpoint(testContext(t)); err != nil {
		t.Fatal(err)
	}
	second, err := createBackup(testContext(t), c, &pb.CreateBackupRequest{Target: "file://" + target, Base: backup.LatestBase})
	if err != nil || second.Kind != "incremental" || second.Base != first.Id || second.Pages >= second.LivePages {
		t.Fatalf("%v, %v", second, err)
	}
	status, err := c.GetBackupStatus(testContext(t), &pb.GetBackupStatusRequest{})
	if err != nil || status.Running != nil || status.Last.GetBackup().GetId() != second.Id || status.Last.Error != "" {
		t.Fatalf("%v, %v", status, err)
	}
	text := string(metricsOf(t, h))
	for _, want := range []string{`kvserver_backup_last_success_timestamp_seconds{kind="full"} 1`, `kvserver_backup_bytes{kind="incremental"}`, `kvserver_backup_running 0`} {
		if !strings.Contains(text, want) {
			t.Errorf("the metrics have no %s", want)
		}
	}
	restoreAndCompare(t, target, second, map[string][]byte{"later": []byte("value"), "key-49": large[:49000], "key-0": {}})
}

func metricsOf(t *testing.T, h *harness) []byte {
	t.Helper()
	_, text := httpGet(t, h, "/metrics")
	return []byte(text)
}

// restoreAndCompare opens what a backup has, and looks at some keys.
func restoreAndCompare(t *testing.T, target string, b *pb.BackupInfo, want map[string][]byte) {
	t.Helper()
	from, err := objectstore.Open(target, objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := backup.Find(testContext(t), from, b.Lineage, b.Id)
	if err != nil {
		t.Fatal(err)
	}
	disk := vfs.NewMem()
	if err := disk.MkdirAll("data"); err != nil {
		t.Fatal(err)
	}
	if err := backup.RestoreBase(testContext(t), from, m, disk, "data", backup.RestoreOptions{}); err != nil {
		t.Fatal(err)
	}
	config := testConfig()
	s, err := mvcc.Open(storeOptions(&config, disk))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	x, err := s.Session()
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	for key, value := range want {
		if v, err := x.Get(nil, []byte(key), 0); err != nil || !v.Found || !bytes.Equal(v.Data, value) {
			t.Errorf("%s: %d bytes, %v", key, len(v.Data), err)
		}
	}
}

// running begins a backup that waits for its bandwidth.
func running(t *testing.T, h *harness) (cancel func(), ended <-chan error) {
	t.Helper()
	for i := range 4 {
		h.put(t, fmt.Sprintf("key-%d", i), strings.Repeat("x", 1<<20))
	}
	ctx, stop := context.WithCancel(testContext(t))
	t.Cleanup(stop)
	c, done := pb.NewBackupServiceClient(h.conn), make(chan error, 1)
	target := t.TempDir()
	go func() {
		_, err := createBackup(ctx, c, &pb.CreateBackupRequest{Target: target, Bandwidth: 1})
		done <- err
	}()
	eventually(t, "a backup runs", func() bool {
		s, err := c.GetBackupStatus(ctx, &pb.GetBackupStatusRequest{})
		return err == nil && s.Running != nil && s.Running.Progress.Pages > 0
	})
	return stop, done
}

func TestOneBackupRunsAndItsClientEndsIt(t *testing.T) {
	h := mustStart(t)
	cancel, ended := running(t, h)
	c := pb.NewBackupServiceClient(h.conn)
	_, err := createBackup(testContext(t), c, &pb.CreateBackupRequest{Target: t.TempDir()})
	failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_BACKUP_RUNNING)
	h.put(t, "beside", "it") // writers and checkpoints go on
	if err := h.store.Checkpoint(testContext(t)); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := <-ended; err == nil {
		t.Fatal("a cancelled backup was made")
	}
	eventually(t, "the backup ends", func() bool {
		s, err := c.GetBackupStatus(testContext(t), &pb.GetBackupStatusRequest{})
		return err == nil && s.Running == nil && s.Last.GetError() != ""
	})
	if _, err := createBackup(testContext(t), c, &pb.CreateBackupRequest{Target: t.TempDir()}); err != nil {
		t.Fatal(err)
	}
}

// TestClientLeavesABackupThatCannotEnd: the backup waits for the device when its client leaves, so that the next message of progress cannot be sent.
func TestClientLeavesABackupThatCannotEnd(t *testing.T) {
	h := mustStart(t)
	h.put(t, "key", strings.Repeat("x", 1<<20))
	until := make(chan struct{})
	release := sync.OnceFunc(func() { close(until) })
	t.Cleanup(release)
	if err := h.store.Checkpoint(testContext(t)); err != nil {
		t.Fatal(err)
	}
	reads := h.faults.Inject(vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Fault: vfs.Slow, Until: until})
	ctx, leave := context.WithCancel(testContext(t))
	defer leave()
	c, ended := pb.NewBackupServiceClient(h.conn), make(chan error, 1)
	go func() {
		_, err := createBackup(ctx, c, &pb.CreateBackupRequest{Target: t.TempDir()})
		ended <- err
	}()
	eventually(t, "the backup reads", func() bool { return reads.Fired() > 0 })
	leave()
	if err := <-ended; status.Code(err) != codes.Canceled {
		t.Fatal(err)
	}
	time.Sleep(3 * progressEvery)
	release()
	eventually(t, "the backup ends", func() bool {
		s, err := c.GetBackupStatus(testContext(t), &pb.GetBackupStatusRequest{})
		return err == nil && s.Running == nil && s.Last.GetError() != ""
	})
}

// unreadStream is the stream of a client that takes nothing until it leaves.
type unreadStream struct {
	grpc.ServerStreamingServer[pb.CreateBackupResponse]
	sending, left chan struct{}
}

func (s *unreadStream) Send(*pb.CreateBackupResponse) error {
	select {
	case s.sending <- struct{}{}:
	default:
	}
	<-s.left
	return io.ErrClosedPipe
}

// TestClientThatTakesNoProgressKeepsNoBackupWaiting: a backup ends, and another one can be made, although the first one's client takes nothing.
func TestClientThatTakesNoProgressKeepsNoBackupWaiting(t *testing.T) {
	h := mustStart(t)
	h.put(t, "key", strings.Repeat("x", 1<<20))
	if err := h.store.Checkpoint(testContext(t)); err != nil {
		t.Fatal(err)
	}
	until := make(chan struct{})
	h.faults.Inject(vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Fault: vfs.Slow, Until: until})
	stream := &unreadStream{sending: make(chan struct{}, 1), left: make(chan struct{})}
	target, err := objectstore.Open("file://"+t.TempDir(), objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := h.snapshots.backups.begin(target.String()); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := h.createBackup(testContext(t), &pb.CreateBackupRequest{}, target, stream)
		ended <- err
	}()
	<-stream.sending
	close(until)
	c := pb.NewBackupServiceClient(h.conn)
	eventually(t, "the backup ends", func() bool {
		s, err := c.GetBackupStatus(testContext(t), &pb.GetBackupStatusRequest{})
		return err == nil && s.Running == nil && s.Last.GetBackup() != nil
	})
	if _, err := createBackup(testContext(t), c, &pb.CreateBackupRequest{Target: t.TempDir()}); err != nil {
		t.Fatal(err)
	}
	close(stream.left)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

func TestShutdownEndsABackup(t *testing.T) {
	h := mustStart(t)
	_, ended := running(t, h)
	if err := h.stop(); err != nil {
		t.Fatal(err)
	}
	failureOf(t, <-ended).want(t, codes.Unavailable, pb.ErrorReason_ERROR_REASON_SHUTTING_DOWN)
}

func TestTargetsThatCannotBeUsedAreRefused(t *testing.T) {
	h := mustStart(t)
	c := pb.NewBackupServiceClient(h.conn)
	data, err := filepath.Abs(h.config.DataDir)
	if err != nil {
		t.Fatal(err)
	}
	for _, target := range []string{"", "relative/path", "ftp://host/x", data, data + "/backups", "s3://"} {
		_, err := createBackup(testContext(t), c, &pb.CreateBackupRequest{Target: target})
		f := failureOf(t, err)
		f.want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST)
		if f.field != "target" {
			t.Errorf("%q: field %q", target, f.field)
		}
	}
	_, err = createBackup(testContext(t), c, &pb.CreateBackupRequest{Target: t.TempDir(), Base: "none"})
	failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_BACKUP_FAILED)
}
