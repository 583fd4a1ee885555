package server

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// targetWork bounds what requests do with the backups of targets: manifests and parts are in memory meanwhile.
type targetWork struct {
	lists   turnLine      // a target may not answer
	working chan struct{} // has room for the request that verifies or prunes
}

func (w *targetWork) init() {
	w.lists.init(inspectionsMax)
	w.working = make(chan struct{}, 1)
}

// work runs a verification or a prune, unless one is running.
func (w *targetWork) work(body func() error) error {
	select {
	case w.working <- struct{}{}:
		defer func() { <-w.working }()
		return body()
	default:
		return errTargetInUse
	}
}

// listTimeMax ends a list of a target that does not answer, counted from its turn on.
const listTimeMax = 30 * time.Second

// ListBackups implements BackupService.
func (s *backupService) ListBackups(ctx context.Context, req *pb.ListBackupsRequest) (*pb.ListBackupsResponse, error) {
	out := new(pb.ListBackupsResponse)
	return out, s.serveRead(ctx, telemetry.MethodListBackups, func() error {
		leave, err := s.inspect(ctx, &s.snapshots.backups.targets.lists)
		if err != nil {
			return err
		}
		defer leave()
		ctx, mended, stop := s.untilDenied(ctx)
		defer stop()
		ctx, end := context.WithTimeout(ctx, listTimeMax)
		defer end()
		return mended(backupStatus("the backups were not listed", s.drainError(s.listBackups(ctx, req, out))))
	})
}

func (s *Server) listBackups(ctx context.Context, req *pb.ListBackupsRequest, out *pb.ListBackupsResponse) error {
	target, err := s.openTarget(req.GetTarget())
	if err != nil {
		return err
	}
	if out.Lineages, err = backup.Dirs(ctx, target); err != nil {
		return err
	}
	dir, err := s.dirOfHistory(target, req.GetLineage(), out.Lineages)
	if err != nil {
		return err
	}
	all, broken, err := backup.List(ctx, target, dir)
	for _, m := range all {
		out.Backups = append(out.Backups, backupMessage(m))
	}
	for _, b := range broken {
		out.Broken = append(out.Broken, b.Error())
	}
	return err
}

// openHistory opens the object store of a request, and finds the directory of the history that it names.
func (s *Server) openHistory(ctx context.Context, target, lineage string) (store objectstore.Store, dir string, err error) {
	if store, err = s.openTarget(target); err != nil {
		return nil, "", err
	}
	var dirs []string
	if lineage != "" {
		if dirs, err = backup.Dirs(ctx, store); err != nil {
			return nil, "", err
		}
	}
	dir, err = s.dirOfHistory(store, lineage, dirs)
	return store, dir, err
}

// dirOfHistory is the directory of a history that is one of those of a target; without a name, of the server's own. A name is never a path.
func (s *Server) dirOfHistory(store objectstore.Store, lineage string, dirs []string) (string, error) {
	if lineage == "" {
		return backup.Dir(s.store.History().Lineage, s.store.ID()), nil
	}
	if !slices.Contains(dirs, lineage) {
		return "", invalid("lineage", fmt.Sprintf("%q is no history of %s, which has %d: %v", lineage, store, len(dirs), dirs))
	}
	return lineage, nil
}

// VerifyBackup implements BackupService. The verification ends like the making of a backup.
func (s *backupService) VerifyBackup(req *pb.VerifyBackupRequest, stream grpc.ServerStreamingServer[pb.VerifyBackupResponse]) error {
	return s.serveStream(stream.Context(), telemetry.MethodVerifyBackup, func(*connection) error {
		ctx, mended, stop := s.untilDenied(stream.Context())
		defer stop()
		var progress atomic.Pointer[pb.BackupVerification]
		err := withProgress(func() error {
			return s.snapshots.backups.targets.work(func() error { return s.verifyBackup(ctx, req, &progress) })
		}, func() {
			if p := progress.Load(); p != nil {
				_ = stream.Send(&pb.VerifyBackupResponse{Event: &pb.VerifyBackupResponse_Progress{Progress: p}})
			}
		})
		if err != nil {
			return mended(backupStatus("the backup was not verified", s.drainError(err)))
		}
		return stream.Send(&pb.VerifyBackupResponse{Event: &pb.VerifyBackupResponse_Report{Report: progress.Load()}})
	})
}

// verifyBackup says in progress how far it is, and at its end what it has read.
func (s *Server) verifyBackup(ctx context.Context, req *pb.VerifyBackupRequest, progress *atomic.Pointer[pb.BackupVerification]) error {
	target, dir, err := s.openHistory(ctx, req.GetTarget(), req.GetLineage())
	if err != nil {
		return err
	}
	var m *backup.Manifest
	if req.GetId() != "" {
		m, err = backup.Find(ctx, target, dir, req.GetId())
	} else {
		m, err = backup.Newest(ctx, target, dir)
	}
	if err != nil {
		return err
	}
	report := func(r backup.VerifyReport) {
		progress.Store(&pb.BackupVerification{Id: m.ID, Backups: r.Backups, Parts: r.Parts, Pages: r.Pages, Bytes: uint64(r.Bytes)})
	}
	r, err := backup.Verify(ctx, target, m, report)
	report(r)
	return err
}

// PruneBackups implements BackupService.
func (s *backupService) PruneBackups(ctx context.Context, req *pb.PruneBackupsRequest) (*pb.PruneBackupsResponse, error) {
	out := new(pb.PruneBackupsResponse)
	return out, s.serveAdmin(ctx, telemetry.MethodPruneBackups, func() error {
		ctx, mended, stop := s.untilDenied(ctx)
		defer stop()
		return s.snapshots.backups.targets.work(func() error {
			return mended(backupStatus("the backups were not pruned", s.drainError(s.pruneBackups(ctx, req, out))))
		})
	})
}

func (s *Server) pruneBackups(ctx context.Context, req *pb.PruneBackupsRequest, out *pb.PruneBackupsResponse) error {
	if err := req.GetKeepFor().CheckValid(); req.KeepFor != nil && (err != nil || req.KeepFor.AsDuration() < 0) {
		return invalid("keep_for", "must be a duration, and not negative")
	}
	target, dir, err := s.openHistory(ctx, req.GetTarget(), req.GetLineage())
	if err != nil {
		return err
	}
	var log archive.Pruned
	r, err := backup.Prune(ctx, target, dir, backup.PruneOptions{
		KeepFull: int(req.GetKeepFull()), KeepFor: req.GetKeepFor().AsDuration(), DryRun: req.GetDryRun(),
		Log: archive.PruneBefore(target, dir, req.GetDryRun(), &log),
	})
	if err != nil {
		return err
	}
	out.Removed, out.Kept, out.Parts, out.PartBytes = r.Backups, r.Kept, r.Parts, uint64(r.PartBytes)
	out.WaitingParts, out.Postponed, out.OldestEpoch = r.Waiting, r.Postponed, uint64(r.Oldest)
	out.LogFiles, out.LogBytes, out.LogThroughEpoch = uint64(log.Files), uint64(log.Bytes), uint64(log.Through)
	if !req.GetDryRun() {
		s.log.Info("backups pruned", "target", target.String(), "removed", len(r.Backups), "kept", len(r.Kept), "parts", r.Parts, "bytes", r.PartBytes,
			"log_files", log.Files, "postponed", r.Postponed)
	}
	return nil
}
