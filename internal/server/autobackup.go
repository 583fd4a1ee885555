package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/health"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// automaticBackups are the full backups that the server makes by itself, to the target of the log archive: after a bulk load or
// lost log, what follows in the archive can be restored only from a backup that is made after it.
type automaticBackups struct {
	target   objectstore.Store // nil without an archive; constant after Open
	requests chan string       // reasons; one that waits stands for all that come meanwhile
}

func (a *automaticBackups) init(target objectstore.Store) {
	a.target, a.requests = target, make(chan string, 1)
}

// request asks for a full backup that is made from now on. It never waits.
func (a *automaticBackups) request(reason string) {
	select {
	case a.requests <- reason:
	default:
	}
}

// The pauses between two attempts to make a backup.
const (
	automaticPauseMin = 250 * time.Millisecond
	automaticPauseMax = 10 * time.Minute
)

// runAutomaticBackups makes the backups that the archive needs, until ctx ends.
func (s *Server) runAutomaticBackups(ctx context.Context) {
	a := &s.snapshots.backups.automatic
	if a.target == nil {
		return
	}
	s.untilDone(ctx, "the backups of the archive cannot be listed", s.lookAtBackups)
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case reason := <-a.requests:
			s.untilDone(ctx, "the automatic backup was not made", func(ctx context.Context) error { return s.backUpForArchive(ctx, reason) })
		}
	}
}

// untilDone repeats what fails, with growing pauses, until ctx ends.
func (s *Server) untilDone(ctx context.Context, failed string, do func(context.Context) error) {
	for pause := automaticPauseMin; ; pause = min(2*pause, automaticPauseMax) {
		err := do(ctx)
		if err == nil || ctx.Err() != nil {
			return
		}
		s.log.Warn(failed, "error", err, "next_attempt_in", pause)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// archivedBackups are the backups of this store's history in the archive.
func (s *Server) archivedBackups(ctx context.Context) ([]*backup.Manifest, error) {
	return backupsOf(ctx, s.snapshots.backups.automatic.target, s.store.History().Lineage, s.store)
}

// backupsOf are the backups of a history of a store in a target.
func backupsOf(ctx context.Context, target objectstore.Store, lineage keys.Lineage, store *mvcc.Store) ([]*backup.Manifest, error) {
	all, _, err := backup.List(ctx, target, backup.Dir(lineage, store.ID()))
	return all, err
}

// lookAtBackups carries over what the server before has known: when the last backup was made, and that one is needed.
func (s *Server) lookAtBackups(ctx context.Context) error {
	all, err := s.archivedBackups(ctx)
	if err != nil {
		return err
	}
	s.snapshots.backups.carryOver(all)
	needed, err := s.neededBase(ctx)
	if err == nil && !hasBase(all, needed) {
		s.snapshots.backups.automatic.request(fmt.Sprintf("the archive has no backup of epoch %d or a later one", needed))
	}
	return err
}

// neededBase is the epoch of which, or of a later one, the newest part of the archive needs a backup; zero if it needs none.
func (s *Server) neededBase(ctx context.Context) (keys.Epoch, error) {
	if b := s.feed.archive.Status().Break; b != nil {
		return b.First - 1, nil
	}
	if s.store.History().Lineage == (keys.Lineage{}) {
		return 0, nil // no lineage yet, and no archive
	}
	intervals, err := s.feed.archive.Intervals(ctx)
	if err != nil || len(intervals) == 0 {
		return 0, err
	}
	return intervals[len(intervals)-1].First - 1, nil
}

// hasBase reports whether a state of the epoch or a later one can be restored from a backup.
func hasBase(all []*backup.Manifest, epoch keys.Epoch) bool {
	return epoch == 0 || slices.ContainsFunc(all, func(m *backup.Manifest) bool { return m.Epoch() >= epoch && len(m.Damaged) == 0 })
}

// errArchiveNotConnected means that it is not known yet whether the archive is one of this store.
var errArchiveNotConnected = errors.New("the log archive is not connected")

// archiveConnected is nil if the archive takes the log of this store.
func (f *feedState) archiveConnected() error {
	if status := f.archive.Status(); status.Refused() || !status.Connected {
		return errors.Join(errArchiveNotConnected, status.Err)
	}
	return nil
}

// backUpForArchive makes a full backup, unless one that was made meanwhile will do. An archive that refuses this store gets it when it takes the
// store again. On a full disk, which gives up log and so needs a backup, it is made when there is space again: see untilDiskFull.
func (s *Server) backUpForArchive(ctx context.Context, reason string) error {
	if err := s.store.DiskFull(); err != nil {
		return err
	}
	if err := s.feed.archiveConnected(); err != nil {
		return err
	}
	needed, err := s.neededBase(ctx)
	if err != nil {
		return err
	}
	all, err := s.archivedBackups(ctx)
	if err != nil || hasBase(all, needed) {
		return err
	}
	b := &s.snapshots.backups
	if err := b.begin(b.automatic.target.String()); err != nil {
		return err
	}
	s.log.Info("automatic backup started", "target", b.automatic.target.String(), "reason", reason, "needed_epoch", uint64(needed))
	m, err := s.backUpSince(ctx, needed)
	b.end(m, err)
	if err == nil {
		s.log.Info("automatic backup made", "id", m.ID, "epoch", m.State.Epoch, "bytes", m.Bytes())
	}
	return err
}

// backUpSince makes a full backup of an epoch or a later one. The newest state may be of a minute ago: a checkpoint comes first.
func (s *Server) backUpSince(ctx context.Context, needed keys.Epoch) (*backup.Manifest, error) {
	ctx, stop := s.untilDiskFull(ctx)
	defer stop()
	if err := s.store.Checkpoint(ctx); err != nil {
		return nil, err
	}
	b := &s.snapshots.backups
	m, err := backup.Create(ctx, s.store, b.automatic.target, backup.Options{Program: telemetry.Build().Version, Progress: b.report, Idle: newIdleness(s).idle})
	if err == nil && m.Epoch() < needed {
		err = fmt.Errorf("the backup %s has epoch %d, epoch %d is needed", m.ID, m.Epoch(), needed)
	}
	return m, err
}

// diskFullEvery is how often a backup or a drill that was not asked for looks whether the disk is full.
const diskFullEvery = time.Second

// untilDiskFull is a context that ends, with the reason, when the disk is full. A backup keeps all pages of the state that it copies, and
// these are the pages that deletions free: no write would be accepted again before it ends.
func (s *Server) untilDiskFull(ctx context.Context) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	look := func() {
		if err := s.store.DiskFull(); err != nil {
			cancel(err)
		}
	}
	look()
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		ticker := time.NewTicker(diskFullEvery)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				look()
			case <-ctx.Done():
				return
			}
		}
	}()
	return ctx, func() {
		cancel(nil)
		<-watched
	}
}

// carryOver makes the newest backups of the target those that the metrics show, unless newer ones were made since.
func (b *backupState) carryOver(all []*backup.Manifest) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, m := range all {
		if success := b.success(m.Kind); len(m.Damaged) == 0 && m.Created.After(success.Time) {
			*success = telemetry.BackupSuccess{Time: m.Created, Bytes: m.Bytes()}
		}
	}
}

// success is the last backup of a kind.
func (b *backupState) success(kind backup.Kind) *telemetry.BackupSuccess {
	if kind == backup.Incremental {
		return &b.metrics.Incremental
	}
	return &b.metrics.Full
}

// errDamagedBackup is what is wrong with a backup that has damaged pages.
var errDamagedBackup = errors.New("pages of the store are damaged and are missing in the backup")

// conditions are those of backups: that the last one failed, and that it is too old, if an age was given.
func (b *backupState) conditions(now time.Time, ageMax time.Duration) (found []health.Condition) {
	b.mu.Lock()
	defer b.mu.Unlock()
	add := func(name, message, cause string) {
		found = append(found, health.Condition{Name: name, Severity: health.Warning, Message: message, Cause: cause})
	}
	if b.failed != nil {
		add("backup-failing", "the last backup was not made, or not whole", b.failed.Error())
	}
	if b.drillFailed != nil {
		add("restore-drill-failing", "the newest state of the archive could not be restored", b.drillFailed.Error())
	}
	if b.drillBeside != "" {
		add("restore-drill-on-data-device", "drills of a restore take the room and the bandwidth of the device of the data: use a --restore-drill-dir on another one", b.drillBeside)
	}
	last := b.metrics.Full.Time
	if b.metrics.Incremental.Time.After(last) {
		last = b.metrics.Incremental.Time
	}
	switch {
	case ageMax == 0:
	case last.IsZero() && now.Sub(b.since) > ageMax:
		add("backup-old", "no backup is known", fmt.Sprintf("none since the start %v ago, and none in the archive", now.Sub(b.since).Round(time.Second)))
	case !last.IsZero() && now.Sub(last) > ageMax:
		add("backup-old", "the last backup is older than --backup-max-age", fmt.Sprintf("it was made %v ago", now.Sub(last).Round(time.Second)))
	}
	return found
}
