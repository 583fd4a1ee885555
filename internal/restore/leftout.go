package restore

import (
	"errors"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
)

// Backups may be left out: damaged ones, and those whose manifest cannot be read. Whichever base is taken, the state of an epoch is the same, and that of
// a time: the plan proves that the archive leads there. The latest state is only what the plan reaches. So it is refused if a backup that was left out may have a
// later one.

// leftOut is a backup that is not taken.
type leftOut struct {
	id     string
	epoch  keys.Epoch // zero if it is not known
	why    error
	broken *backup.ManifestError // nil if the manifest can be read
}

func (l *leftOut) known() bool { return l.broken == nil || l.broken.Known }

// LeftOutError means that a backup which cannot be taken has a later state than what can be restored, or may have one.
type LeftOutError struct {
	Backup string
	Epoch  keys.Epoch // zero if it is not known
	Why    error
	Latest archive.Point // that can be restored
}

func (e *LeftOutError) Error() string {
	has := "may have a later one"
	if e.Epoch != 0 {
		has = fmt.Sprintf("has epoch %d", e.Epoch)
	}
	latest := fmt.Sprintf("--to-epoch %d", e.Latest.Epoch)
	if !e.Latest.Time.IsZero() {
		latest += " of " + e.Latest.Time.UTC().Format(time.RFC3339Nano)
	}
	return fmt.Sprintf("the latest state cannot be restored: backup %s %s, and cannot be taken (%v); the latest state that can be is %s", e.Backup, has, e.Why, latest)
}

// Unwrap returns why the backup cannot be taken.
func (e *LeftOutError) Unwrap() error { return e.Why }

// choice is a base, the files that lead from it to the target, and what else there was.
type choice struct {
	base Base
	plan *archive.Plan
	out  []leftOut
}

// check refuses what was chosen for the latest state, if a backup that was left out may have a later one; and for a drill, if the newest backup cannot
// be read.
func (c *choice) check(o *Options) error {
	if later := c.later(); later != nil && o.Target == (archive.Target{}) {
		return &LeftOutError{Backup: later.id, Epoch: later.epoch, Why: later.why, Latest: c.plan.Last}
	}
	for i := range c.out {
		if l := &c.out[i]; o.NewestBase && l.broken != nil && l.broken.NewerThan(c.base.ID, c.base.Epoch) {
			return fmt.Errorf("restore: the newest backup, %s, cannot be read: %w", l.id, l.why)
		}
	}
	return nil
}

// later is the backup that was left out and has the latest state after that of the plan, or one that may have such a state, or nil.
func (c *choice) later() (latest *leftOut) {
	for i := range c.out {
		if l := &c.out[i]; !c.reaches(l) && (latest == nil || l.epoch > latest.epoch) {
			latest = l
		}
	}
	return latest
}

// reaches reports whether the plan leads to the state of a backup, or to a later one. If the epoch of that is not known, a commit proves it that
// is later than all of the backup's (see backup.Begun). The time of another backup's id does not: the wall clock may have been set back.
func (c *choice) reaches(l *leftOut) bool {
	reached := &c.plan.Last
	if l.known() {
		return l.epoch <= reached.Epoch
	}
	begun, ok := backup.Begun(l.id)
	if !ok {
		return false
	}
	return !reached.Time.Before(begun.Add(time.Second))
}

// withUnreadable adds to an error about a target the manifests that cannot be read: their backups may lead there.
func (c *choice) withUnreadable(err error) error {
	if !Unreachable(err) {
		return err
	}
	for i := range c.out {
		if c.out[i].broken != nil {
			err = errors.Join(err, c.out[i].why)
		}
	}
	return err
}

// report names the backups whose manifest cannot be read.
func (c *choice) report(progress func(Progress)) {
	for i := range c.out {
		if l := &c.out[i]; l.broken != nil {
			progress(Progress{Step: fmt.Sprintf("backup %s is left out, because its manifest cannot be read (%v)", l.id, l.why), Epoch: l.epoch})
		}
	}
}
