package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/telemetry"
)

var (
	// errBackupRunning refuses a second backup at the same time.
	errBackupRunning = errors.New("another backup is being made")
	// errTargetInUse refuses a second verification or prune at the same time.
	errTargetInUse = errors.New("another backup is being verified or pruned by the server")
)

// backupError is work on backups that failed for a reason that has no name of its own.
type backupError struct {
	what  string // "the backup was not made", for instance
	cause error
}

func (e *backupError) Error() string { return e.what + ": " + e.cause.Error() }
func (e *backupError) Unwrap() error { return e.cause }

// archiveInUseError refuses a backup of a copy of a store to the place where another process archives the store: a restore from there would
// not know which of the two histories it belongs to.
type archiveInUseError struct {
	owner   *archive.Owner
	cause   error                 // why the store is not archived now; may be nil
	refusal *archive.RefusedError // why the archive does not fit the store; may be nil
}

func (e *archiveInUseError) Error() string {
	if e.refusal != nil {
		return fmt.Sprintf("the backup was not made: the archive in the same place is that of process %d on host %q, and does not fit this store: %v", e.owner.Process, e.owner.Host, e.refusal)
	}
	text := fmt.Sprintf("the backup was not made: process %d on host %q archives a copy of this store to the same place, or has not answered yet whether it does", e.owner.Process, e.owner.Host)
	if e.cause != nil {
		text += ": " + e.cause.Error()
	}
	return text
}

// classifyBackup classifies the errors of this file.
func classifyBackup(err error) (fault, bool) {
	failed, inUse := (*backupError)(nil), (*archiveInUseError)(nil)
	switch {
	case errors.As(err, &inUse):
		return fault{
			code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_ARCHIVE_IN_USE,
			metadata: map[string]string{"host": inUse.owner.Host, "process": strconv.Itoa(inUse.owner.Process)},
		}, true
	case errors.Is(err, errBackupRunning), errors.Is(err, errTargetInUse):
		return fault{code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_BACKUP_RUNNING}, true
	case errors.Is(err, backup.ErrDamaged):
		return fault{code: codes.DataLoss, reason: pb.ErrorReason_ERROR_REASON_BACKUP_DAMAGED}, true
	case errors.As(err, &failed):
		return fault{code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_BACKUP_FAILED}, true
	}
	return fault{}, false
}

// backupState is the backup that is being made, and what became of the ones before.
type backupState struct {
	automatic automaticBackups
	targets   targetWork
	since     time.Time // when the server was opened; constant after Open

	mu          sync.Mutex // guards everything below
	failed      error      // of the last backup, unless it was cancelled; nil if it was made
	drillFailed error      // of the last drill; nil if it was successful
	drillBeside string     // why drills can fill the device of the data; empty if they cannot
	running     *runningBackup
	last        *pb.EndedBackup
	metrics     telemetry.BackupStats
}

// runningBackup is a backup that is being made.
type runningBackup struct {
	target   string
	started  time.Time
	progress backup.Progress
}

// begin registers a backup, unless one is running.
func (b *backupState) begin(target string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.running != nil {
		return errBackupRunning
	}
	b.running = &runningBackup{target: target, started: time.Now()}
	return nil
}

func (b *backupState) report(p backup.Progress) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.running.progress = p
}

// progress is how far the running backup is; nil if none runs.
func (b *backupState) progress() *pb.BackupProgress {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.running == nil {
		return nil
	}
	return progressMessage(&b.running.progress)
}

// end records what became of the running backup.
func (b *backupState) end(m *backup.Manifest, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	r, now := b.running, time.Now()
	took := now.Sub(r.started)
	b.running = nil
	b.last = &pb.EndedBackup{Target: r.target, EndTime: timestamppb.New(now), Duration: durationpb.New(took)}
	if err != nil {
		b.last.Error = err.Error()
		b.countFailure(backupFailure(err), err)
		return
	}
	b.last.Backup = backupMessage(m)
	if len(m.Damaged) > 0 {
		b.countFailure(telemetry.BackupDamage, errDamagedBackup)
		return
	}
	b.failed = nil
	*b.success(m.Kind) = telemetry.BackupSuccess{Time: now, Duration: took, Bytes: m.Bytes()}
}

func (b *backupState) countFailure(why telemetry.BackupFailure, err error) {
	if b.metrics.Failures[why]++; why != telemetry.BackupCancelled {
		b.failed = err
	}
}

func backupFailure(err error) telemetry.BackupFailure {
	damaged := (*backup.DamagedPageError)(nil)
	switch {
	case errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errShuttingDown):
		return telemetry.BackupCancelled
	case errors.As(err, &damaged):
		return telemetry.BackupDamage
	case errors.Is(err, storage.ErrPinEnded):
		return telemetry.BackupStalled
	}
	return telemetry.BackupOther
}

// stats are for the metrics of a server whose operator expects backups or does not.
func (b *backupState) stats(store *mvcc.Store, expected, drills bool) telemetry.BackupStats {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := b.metrics
	out.Expected, out.Drills.Expected = expected, drills
	if out.Running = b.running != nil; out.Running {
		out.PinnedBytes = pinnedBytes(store)
	}
	return out
}

// pinnedBytes are pages of older states: what the pin of a backup keeps is among them.
func pinnedBytes(store *mvcc.Store) uint64 {
	pages := store.Stats().Storage.Pages
	return pages.Pending * uint64(pages.PageSize)
}

// backupService implements BackupService.
type backupService struct {
	pb.UnimplementedBackupServiceServer
	*Server
}

// progressEvery is the time between two messages of progress.
const progressEvery = 200 * time.Millisecond

// CreateBackup implements BackupService. The backup ends with the request, when the server drains, and when its caller loses the right to it.
func (s *backupService) CreateBackup(req *pb.CreateBackupRequest, stream grpc.ServerStreamingServer[pb.CreateBackupResponse]) error {
	return s.serveStream(stream.Context(), telemetry.MethodCreateBackup, func(*connection) error {
		target, err := s.openTarget(req.Target)
		if err != nil {
			return err
		}
		if err := s.refuseCopy(stream.Context(), target); err != nil {
			return err
		}
		if err := s.snapshots.backups.begin(target.String()); err != nil {
			return err
		}
		ctx, mended, stop := s.untilDenied(stream.Context())
		defer stop()
		m, err := s.createBackup(ctx, req, target, stream)
		if err != nil {
			return mended(err)
		}
		return stream.Send(&pb.CreateBackupResponse{Event: &pb.CreateBackupResponse_Backup{Backup: backupMessage(m)}})
	})
}

const (
	archiveAnswerMax  = 10 * time.Second // how long a backup waits for the first answer of the log archive after a start
	archiveAnswerLook = 100 * time.Millisecond
)

// refuseCopy returns an error if the target is the place of the log archive, and another process is its owner, or may be.
func (s *Server) refuseCopy(ctx context.Context, target objectstore.Store) error {
	if s.feed.archive == nil {
		return nil
	}
	for began := time.Now(); ; {
		status := s.feed.archive.Status()
		err := s.refuseCopyAt(ctx, target, &status)
		if answered := status.Owner != nil || status.Err != nil; err == nil || answered || time.Since(began) > archiveAnswerMax {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(archiveAnswerLook):
		}
	}
}

// refuseCopyAt is refuseCopy at a moment with this status of the archive.
func (s *Server) refuseCopyAt(ctx context.Context, target objectstore.Store, status *archive.Status) error {
	switch {
	case status.Owner == nil || status.Refusal != nil: // the archive does not fit this store, has failed, or has not answered yet
		return s.refuseForeign(ctx, target, status)
	case status.Owner.Self:
		return nil
	}
	if target.String() != status.Target { // it may be the same place by another name
		owner, _, err := archive.OwnerOf(ctx, target, s.store.History().Lineage)
		if err != nil {
			return backupStatus("the backup was not made", err)
		}
		if owner.Session != status.Owner.Session {
			return nil
		}
	}
	return &archiveInUseError{owner: status.Owner, cause: status.Err}
}

// refuseForeign is refuseCopy of a store of which it is not known that it may write to the archive: its history may be another one than
// that of the files there. Other places take its backups.
func (s *Server) refuseForeign(ctx context.Context, target objectstore.Store, status *archive.Status) error {
	lineage := s.store.History().Lineage
	owner, found, err := archive.OwnerOf(ctx, target, lineage)
	same := target.String() == status.Target
	if err == nil && found && !same {
		var place objectstore.Store
		if place, err = objectstore.Open(s.config.Archive.URL, objectstore.Options{}); err == nil {
			var there archive.Owner
			there, found, err = archive.OwnerOf(ctx, place, lineage)
			same = found && there.Session == owner.Session // by another name
		}
	}
	switch {
	case err != nil:
		return backupStatus("the backup was not made", err)
	case same && found:
		return &archiveInUseError{&owner, cmp.Or(status.Err, errArchiveNotConnected), status.Refusal}
	case same:
		return backupStatus("the backup was not made", errors.Join(errArchiveNotConnected, status.Err))
	}
	return nil
}

// openTarget opens the object store of a request.
func (s *Server) openTarget(target string) (objectstore.Store, error) {
	store, err := objectstore.Open(target, objectstore.Options{})
	if err != nil {
		return nil, invalid("target", err.Error())
	}
	dir, isDir := objectstore.DirectoryOf(store)
	if !isDir {
		return store, nil
	}
	if !filepath.IsAbs(strings.TrimPrefix(target, "file://")) {
		return nil, invalid("target", fmt.Sprintf("%q is not absolute; the server would take it as relative to its working directory", target))
	}
	data, err := filepath.Abs(s.config.DataDir)
	if err != nil {
		return nil, err
	}
	if rel, err := filepath.Rel(data, dir); err == nil && rel != ".." && !strings.HasPrefix(rel, "../") {
		return nil, invalid("target", fmt.Sprintf("%q is in the data directory; a backup belongs on another device", target))
	}
	return store, nil
}

// createBackup makes a backup, which ends with ctx.
func (s *Server) createBackup(ctx context.Context, req *pb.CreateBackupRequest, target objectstore.Store, stream grpc.ServerStreamingServer[pb.CreateBackupResponse]) (m *backup.Manifest, err error) {
	s.log.Info("backup started", "target", target.String(), "base", req.Base)
	err = withProgress(func() (err error) {
		m, err = backup.Create(ctx, s.store, target, backup.Options{
			Base: req.Base, Bandwidth: int64(min(req.Bandwidth, 1<<50)), KeepGoing: req.KeepGoing, ReadAll: req.ReadAll, Program: telemetry.Build().Version,
			Progress: s.snapshots.backups.report, Idle: newIdleness(s).idle,
		})
		err = s.drainError(err)
		s.snapshots.backups.end(m, err) // here, and not after the last message of progress
		return err
	}, func() {
		if p := s.snapshots.backups.progress(); p != nil { // else it has just ended
			_ = stream.Send(&pb.CreateBackupResponse{Event: &pb.CreateBackupResponse_Progress{Progress: p}})
		}
	})
	if err == nil {
		s.log.Info("backup made", "target", target.String(), "id", m.ID, "kind", m.Kind, "epoch", m.State.Epoch, "bytes", m.Bytes(), "damaged_pages", len(m.Damaged))
	} else {
		s.log.Warn("backup failed", "target", target.String(), "error", err)
	}
	return m, backupStatus("the backup was not made", err)
}

// withProgress runs work in a goroutine of its own, and calls tell several times a second until it has ended. A client that takes no
// progress keeps its handler in tell, and the work from nothing. The work ends with the context of its stream, also if tell fails.
func withProgress(work func() error, tell func()) error {
	ended := make(chan error, 1)
	go func() { ended <- work() }()
	ticker := time.NewTicker(progressEvery)
	defer ticker.Stop()
	for {
		select {
		case err := <-ended:
			return err
		case <-ticker.C:
			tell()
		}
	}
}

// backupStatus gives an error that has no class of its own that of failed work on backups.
func backupStatus(what string, err error) error {
	damaged, refused := (*backup.DamagedPageError)(nil), (*argumentError)(nil)
	if err == nil || contextStatus(err) != nil || errors.Is(err, errShuttingDown) || errors.As(err, &damaged) || errors.As(err, &refused) || errors.Is(err, mvcc.ErrClosed) {
		return err
	}
	return &backupError{what, err}
}

// GetBackupStatus implements BackupService.
func (s *backupService) GetBackupStatus(ctx context.Context, _ *pb.GetBackupStatusRequest) (*pb.GetBackupStatusResponse, error) {
	out := new(pb.GetBackupStatusResponse)
	return out, s.serveRead(ctx, telemetry.MethodGetBackupStatus, func() error {
		pinned := pinnedBytes(s.store)
		b := &s.snapshots.backups
		b.mu.Lock()
		defer b.mu.Unlock()
		if r := b.running; r != nil {
			out.Running = &pb.RunningBackup{Target: r.target, StartTime: timestamppb.New(r.started), Progress: progressMessage(&r.progress), PinnedBytes: pinned}
		}
		out.Last = b.last
		return nil
	})
}

func progressMessage(p *backup.Progress) *pb.BackupProgress {
	return &pb.BackupProgress{
		Id: p.ID, Epoch: p.Epoch, Pages: p.Pages, PagesTotal: p.PagesTotal, DamagedPages: p.Damaged,
		PartsSent: p.PartsSent, PartsKept: p.PartsKept, BytesSent: p.BytesSent,
	}
}

func backupMessage(m *backup.Manifest) *pb.BackupInfo {
	out := &pb.BackupInfo{
		Id: m.ID, Kind: string(m.Kind), CreateTime: timestamppb.New(m.Created), Epoch: m.State.Epoch, Checkpoint: m.State.Checkpoint,
		Pages: m.Pages, LivePages: m.LivePages, Parts: m.PartCount(), Bytes: uint64(m.Bytes()), DamagedPages: uint64(len(m.Damaged)),
		Lineage: m.State.Lineage,
	}
	if at := m.CommitTime(); !at.IsZero() {
		out.CommitTime = timestamppb.New(at)
	}
	if m.Base != nil {
		out.Base = m.Base.ID
	}
	return out
}
