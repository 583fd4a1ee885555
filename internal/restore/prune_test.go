package restore

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// prune keeps the newest full backup, and the log from it on.
func (b *bench) prune(dryRun bool) (log archive.Pruned, r *backup.PruneReport) {
	b.t.Helper()
	r, err := backup.Prune(b.t.Context(), b.target, b.lineage().String(), backup.PruneOptions{KeepFull: 1, DryRun: dryRun, Log: func(ctx context.Context, oldest keys.Epoch) (err error) {
		log, err = archive.Prune(ctx, b.target, b.lineage(), oldest, dryRun)
		return err
	}})
	check(b.t, err)
	return log, r
}

// TestPruneKeepsWhatTheOldestBackupNeeds: after a prune, and when it ends at any of its calls, every state from the oldest backup on can be
// restored, the plan of the prune is what it does, and the archiver goes on.
func TestPruneKeepsWhatTheOldestBackupNeeds(t *testing.T) {
	b := newBench(t)
	write := func() {
		for range 4 {
			b.commits(8)
			b.archived()
		}
	}
	write()
	if log, r := b.prune(false); log.Files > 0 || r.Oldest != 0 {
		t.Fatalf("without a backup, the log is all that there is: %+v", log)
	}
	for range 2 {
		check(t, b.store.Checkpoint(t.Context()))
		_, err := backup.Create(t.Context(), b.store, b.target, backup.Options{})
		check(t, err)
		write()
	}
	before := b.objects()
	plan, r := b.prune(true)
	oldest := r.Oldest // of the one that stays; which one that is, is random if both are of the same second
	if !slices.Equal(b.objects(), before) || plan.Files == 0 || plan.Through >= oldest || len(r.Backups) != 1 || len(r.Kept) != 1 {
		t.Fatalf("the plan %+v, %+v", plan, r)
	}
	lease, err := archive.TakeLease(t.Context(), b.target, b.lineage().String())
	check(t, err)
	if log, r := b.prune(false); log.Files > 0 || r.Postponed == "" || !slices.Equal(b.objects(), before) {
		t.Fatalf("beside a restore: %+v", log)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	lease.Keep(ended, func(error) {})
	b.target.Inject(objectstore.Fault{Op: objectstore.OpDelete, Prefix: b.lineage().String() + "/log/", Nth: 2, Kind: objectstore.FailForGood})
	_, err = archive.Prune(t.Context(), b.target, b.lineage(), oldest, false)
	if err == nil || len(b.objects()) != len(before)-1 {
		t.Fatalf("the second deletion fails: %v", err)
	}
	b.target.Heal()
	if log, _ := b.prune(false); log.Files != plan.Files-1 || log.Through != plan.Through || len(b.objects()) != len(before)-plan.Files {
		t.Fatalf("%+v after the plan %+v", log, plan)
	}
	last := b.arch.Status().Archived
	for _, e := range []keys.Epoch{oldest, oldest + 1, oldest + 9, last} {
		if r, got, err := b.restore(archive.Target{Epoch: e}); err != nil || got != b.state(e) || r.Base.Epoch != oldest {
			t.Fatalf("epoch %d: %v; from %+v", e, err, r)
		}
	}
	if _, _, err := b.restore(archive.Target{Epoch: oldest - 1}); !Unreachable(err) {
		t.Fatalf("before the oldest backup: %v", err)
	}
	b.close()
	b.open()
	b.commits(5)
	b.archived()
	if _, got, err := b.restore(archive.Target{}); err != nil || got != hash(b.now) || b.arch.Status().Breaks != 0 {
		t.Fatal(err)
	}
}

// TestPruneKeepsTheNewestFile: a backup that is newer than the archive takes nothing from the archiver that it needs to go on.
func TestPruneKeepsTheNewestFile(t *testing.T) {
	b := newBench(t)
	for range 3 {
		b.commits(8)
		b.archived()
	}
	newest := slices.Max(b.objects())
	if log, err := archive.Prune(t.Context(), b.target, b.lineage(), keys.MaxEpoch, false); err != nil || log.Files == 0 || !slices.Equal(b.objects(), []string{newest}) {
		t.Fatalf("%v: %+v, %v", b.objects(), log, err)
	}
	b.stop()
	b.commits(3)
	b.archive()
	b.archived()
	if s := b.arch.Status(); s.Breaks != 0 || time.Since(s.AsOf) > time.Hour {
		t.Fatalf("%+v", s)
	}
}

// TestOfBackupsOfOneEpochTheNewestIsTaken: backups of a store without commits have one epoch. The newest one stays longest.
func TestOfBackupsOfOneEpochTheNewestIsTaken(t *testing.T) {
	b := newBench(t)
	b.commits(5)
	for range 2 {
		check(t, b.store.Checkpoint(t.Context()))
		_, err := backup.Create(t.Context(), b.store, b.target, backup.Options{})
		check(t, err)
	}
	bases, _, err := basesOf(t.Context(), b.target, backup.Dir(b.lineage(), [16]byte{}), false)
	check(t, err)
	if len(bases) != 2 || bases[0].Epoch != bases[1].Epoch {
		t.Fatalf("%+v", bases)
	}
	for _, target := range []archive.Target{{}, {Epoch: bases[0].Epoch}} {
		if best, _ := newest(bases, &target); best.ID != bases[1].ID {
			t.Errorf("%v: from %s instead of %s", &target, best.ID, bases[1].ID)
		}
	}
}
