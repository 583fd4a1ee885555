package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/health"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/wal"
)

// archiveHold is the holder of the log that the store has from its opening on, none without an archive.
func archiveHold(c *config.Config) wal.HolderOptions {
	if c.Archive.URL == "" {
		return wal.HolderOptions{}
	}
	return archive.Hold(c.Archive.URL, c.Archive.OnLowDisk == config.ArchiveGap)
}

// openArchive makes the archiver, nil without an archive. It does not access the archive: a target that does not answer keeps no server
// from starting.
func openArchive(c *config.Config, store *mvcc.Store, backups *automaticBackups) (*archive.Archiver, error) {
	if c.Archive.URL == "" {
		return nil, nil
	}
	target, err := objectstore.Open(c.Archive.URL, objectstore.Options{})
	if err != nil {
		return nil, fmt.Errorf("--archive: %w", err)
	}
	backups.init(target)
	store.HoldBulkLoads(true)
	return archive.New(store.Changes(), archive.Options{
		Lock: archive.LockID(storage.LockFile(c.DataDir)), RequestBackup: backups.request, Target: target, Interval: c.Archive.Interval, FileBytes: int64(c.Archive.FileSize), Yields: c.Archive.OnLowDisk == config.ArchiveGap,
		Merge: archive.MergeOptions{Off: !c.Archive.Merge},
		HasBase: func(ctx context.Context, lineage keys.Lineage, epoch keys.Epoch) (bool, error) {
			all, err := backupsOf(ctx, target, lineage, store)
			return hasBase(all, epoch), err
		},
		Identity: func() archive.Identity {
			h := store.History()
			return archive.Identity{Lineage: h.Lineage, StoreID: store.ID(), Level: store.FeatureLevel(), Parent: h.Parent, PageSize: int(c.PageSize)}
		},
	}), nil
}

// startArchive archives until stopArchive is called, after the last request has ended.
func (s *Server) startArchive() {
	if s.feed.archive == nil {
		return
	}
	ctx, stop := context.WithCancel(context.Background())
	s.feed.stopArchive = stop
	s.drain.background.Go(func() { s.feed.archive.Run(ctx) })
}

func (f *feedState) archiveStats(now time.Time) telemetry.ArchiveStats {
	if f.archive == nil {
		return telemetry.ArchiveStats{}
	}
	s := f.archive.Status()
	return telemetry.ArchiveStats{Enabled: true, Lag: s.Lag(now), Status: s}
}

// archiveLagFactor is how many intervals late the archive is when that becomes a condition; at least archiveLagMin.
const (
	archiveLagFactor = 4
	archiveLagMin    = 30 * time.Second
)

// archiveConditions are the conditions of the log archive.
func (f *feedState) archiveConditions(now time.Time) (found []health.Condition) {
	if f.archive == nil {
		return nil
	}
	s := f.archive.Status()
	lag := s.Lag(now)
	late := lag
	if !s.Connected { // it has this time to answer after a start, however old the log is
		late = min(lag, now.Sub(s.Started))
	}
	add := func(name, message, cause string) {
		found = append(found, health.Condition{Name: name, Severity: health.Warning, Message: message, Cause: cause})
	}
	inUse := new(archive.InUseError)
	switch {
	case errors.As(s.Err, &inUse):
		add("archive-in-use", "the log is not archived: another process archives a copy of this store to the same place", s.Err.Error())
	case s.Refused():
		cause := s.Err
		if s.Refusal != nil { // the last error may be another one
			cause = s.Refusal
		}
		add("archive-refused", "the log is not archived: the archive does not fit this store; an operator has to decide", cause.Error())
	case s.Err != nil && late > archiveLagFactor*s.Interval:
		add("archive-failing", "the log cannot be archived and is kept meanwhile; the archiver tries again", fmt.Sprintf("known to be complete as of %v ago: %v", lag.Round(time.Second), s.Err))
	case late > max(archiveLagMin, archiveLagFactor*s.Interval):
		add("archive-lagging", "the archive is slower than the writers: a loss of this machine would lose more than --archive-interval", fmt.Sprintf("known to be complete as of %v ago", lag.Round(time.Second)))
	}
	if s.Break != nil {
		add("archive-without-base", "the archive has begun anew: states since then can be restored only from a full backup that was made after it",
			fmt.Sprintf("%s, at epoch %d, %v", s.Break.Reason, s.Break.First, s.Break.Since.UTC().Format(time.RFC3339)))
	}
	return found
}

// ArchiveStatus implements AdminService.
func (s *adminService) ArchiveStatus(ctx context.Context, _ *pb.ArchiveStatusRequest) (*pb.ArchiveStatusResponse, error) {
	out := new(pb.ArchiveStatusResponse)
	return out, s.serveRead(ctx, telemetry.MethodArchiveStatus, func() error {
		if s.feed.archive == nil {
			return nil
		}
		look := s.look()
		status := &look.status
		out.Enabled, out.Target, out.Lineage = true, status.Target, s.store.History().Lineage.String()
		out.ArchivedEpoch, out.Lag, out.PendingBytes = uint64(status.Archived), durationpb.New(status.Lag(time.Now())), uint64(status.Pending)
		out.Files, out.FileBytes, out.Records, out.Refused = status.Files, status.Bytes, status.Records, status.Refused()
		if status.Err != nil {
			out.Error = status.Err.Error()
		}
		out.BulkLoads, out.MergedFiles = status.Loads.Archived, status.Merges.Merged
		if status.Merges.Err != nil {
			out.MergeError = status.Merges.Err.Error()
		}
		out.Owner = ownerMessage(status.Owner)
		if b := status.Break; b != nil {
			out.BreakReason, out.BreakEpoch = b.Reason, uint64(b.First)
		}
		for _, h := range s.store.Stats().Storage.Log.Holders {
			if h.Name == archive.HolderName {
				out.HeldLogBytes = uint64(h.Bytes)
			}
		}
		intervals, err := look.wait(ctx)
		if err != nil && out.GetError() == "" {
			out.Error = err.Error()
		}
		out.Intervals = intervals
		return nil
	})
}

func ownerMessage(o *archive.Owner) *pb.ArchiveOwner {
	if o == nil {
		return nil
	}
	out := &pb.ArchiveOwner{Host: o.Host, Process: int64(o.Process), Self: o.Self}
	if !o.Since.IsZero() {
		out.Since = timestamppb.New(o.Since)
	}
	return out
}

func micros(t time.Time) uint64 {
	if t.IsZero() {
		return 0
	}
	return uint64(t.UnixMicro())
}
