package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/restore"
)

const (
	// drillDelay is the time from a start, or from a drill that failed, to the next one, if that is less than --restore-drill.
	drillDelay = time.Hour
)

// runDrills restores the newest state of the archive into a scratch directory, again and again, until ctx ends.
func (s *Server) runDrills(ctx context.Context) {
	every := s.config.Archive.Drill
	if every == 0 || s.feed.archive == nil {
		return
	}
	s.snapshots.backups.drillsOn(s.config.Archive.DrillDir, s.config.DataDir)
	s.removeLeftovers()
	for pause := min(every, drillDelay); ; {
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		began := time.Now()
		r, err := s.drill(ctx)
		if ctx.Err() != nil {
			return
		}
		s.snapshots.backups.drilled(r, err)
		if pause = every; err != nil {
			pause = min(every, drillDelay)
			s.log.Warn("the drill of a restore failed", "error", err, "took", time.Since(began), "next_attempt_in", pause)
			continue
		}
		s.log.Info("the newest state of the archive was restored, verified, and compared with the store", "epoch", uint64(r.Reached.Epoch), "time", r.Reached.Time, "backup", r.Base.ID,
			"files", r.Files, "records", r.Records, "took", r.Took)
	}
}

// removeLeftovers removes the copies of the store that drills have left when the server was killed.
func (s *Server) removeLeftovers() {
	removed, err := restore.RemoveLeftovers(s.config.Archive.DrillDir)
	if len(removed) > 0 {
		s.log.Info("what killed drills of a restore have left was removed", "directories", removed)
	}
	if err != nil {
		s.log.Warn("what killed drills of a restore have left was not removed", "error", err)
	}
}

// drillsOn notes whether drills are made on the device of the data.
func (b *backupState) drillsOn(scratch, data string) {
	if same, err := sameDevice(scratch, data); err != nil || !same {
		return // a directory that is missing is an error of the drill
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.drillBeside = fmt.Sprintf("%s is on the device of the data directory %s", scratch, data)
}

// sameDevice reports whether two directories are on one file system.
func sameDevice(a, b string) (bool, error) {
	var devices [2]uint64
	for i, dir := range []string{a, b} {
		info, err := os.Stat(dir)
		if err != nil {
			return false, err
		}
		devices[i] = restore.DeviceOf(info)
	}
	return devices[0] == devices[1], nil
}

// archivedWithin is how long a drill waits until the archive has the state with which it is compared.
const archivedWithin = 2 * time.Minute

// drill restores what the store has now from the archive, and compares the two. It ends when the disk is full: the snapshot that it reads keeps
// versions that deletions free, and what it restores may be on the same device.
func (s *Server) drill(ctx context.Context) (_ *restore.Report, err error) {
	ctx, stop := s.untilDiskFull(ctx)
	defer stop()
	defer func() {
		if cause := context.Cause(ctx); err != nil && cause != nil {
			err = cause
		}
	}()
	if err := s.feed.archiveConnected(); err != nil {
		return nil, err
	}
	target, err := objectstore.Open(s.config.Archive.URL, objectstore.Options{})
	if err != nil {
		return nil, err
	}
	contents, err := restore.ContentsOf(ctx, s.store)
	if err != nil {
		return nil, fmt.Errorf("read the store, to compare it with what is restored: %w", err)
	}
	if err := s.awaitArchived(ctx, contents.Epoch); err != nil {
		return nil, err
	}
	return restore.Drill(ctx, restore.Options{
		Store: target, Lineage: s.store.History().Lineage, Dir: s.config.Archive.DrillDir, Memory: int64(config.DrillMemory), PageSize: int(s.config.PageSize),
		Target: archive.Target{Epoch: contents.Epoch}, Contents: &contents,
	})
}

// awaitArchived waits until the archive has everything up to an epoch that it will ever have.
func (s *Server) awaitArchived(ctx context.Context, epoch keys.Epoch) error {
	within := archivedWithin + archiveLagFactor*s.config.Archive.Interval
	for began := time.Now(); ; {
		status := s.feed.archive.Status()
		switch {
		case status.Through >= epoch:
			return nil
		case status.Refused():
			return errors.Join(errArchiveNotConnected, status.Err)
		case time.Since(began) > within:
			return errors.Join(fmt.Errorf("epoch %d was not archived within %v; the archive ends at epoch %d", epoch, within, status.Archived), status.Err)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(min(s.config.Archive.Interval, time.Second)):
		}
	}
}

// drilled notes what became of a drill.
func (b *backupState) drilled(r *restore.Report, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.drillFailed = err; err != nil {
		b.metrics.Drills.Failures++
		return
	}
	b.metrics.Drills.Success, b.metrics.Drills.Duration = time.Now(), r.Took
}
