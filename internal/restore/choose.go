package restore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
)

// NoBaseError means that no base is at the target or before it.
type NoBaseError struct {
	Target archive.Target
	Oldest archive.Point // of all bases; zero if there are none
	First  time.Time     // of the archive, if the target is before it
}

func (e *NoBaseError) Error() string {
	if !e.First.IsZero() {
		return fmt.Sprintf("%s cannot be restored: the first commit of the archive is of %s, which is later", &e.Target, e.First.UTC().Format(time.RFC3339Nano))
	}
	if e.Oldest == (archive.Point{}) {
		return fmt.Sprintf("%s cannot be restored: there is no full backup, and the archive does not begin at the first epoch", &e.Target)
	}
	return fmt.Sprintf("%s cannot be restored: the oldest full backup is of epoch %d, which is later", &e.Target, e.Oldest.Epoch)
}

// Unreachable reports whether an error means that the archive does not have the target, or more than one state for it, and not that
// something failed.
func Unreachable(err error) bool {
	damaged, left := new(baseError), new(LeftOutError)
	if errors.As(err, &left) || errors.As(err, &damaged) && damaged.damaged() {
		return true
	}
	missing, base, forked, other, overlap := new(archive.MissingError), new(NoBaseError), new(archive.ForkError), new(archive.BaseError), new(archive.OverlapError)
	return errors.As(err, &overlap) || errors.As(err, &missing) || errors.As(err, &base) || errors.As(err, &forked) || errors.As(err, &other) || errors.Is(err, archive.ErrNotReached)
}

// choose finds the newest base of a history from which the target can be reached, and the files that lead there.
func choose(ctx context.Context, o *Options) (c choice, err error) {
	var bases []Base
	if bases, c.out, err = basesOf(ctx, o.Store, o.backups(), o.AllowDamaged); err != nil {
		return c, fmt.Errorf("list the backups: %w", err)
	}
	bases = slices.DeleteFunc(bases, func(b Base) bool {
		why := o.damaged[b.ID]
		if why != nil {
			c.out = append(c.out, leftOut{id: b.ID, epoch: b.Epoch, why: why})
		}
		return why != nil
	})
	for {
		c.base, c.plan, err = planFrom(ctx, o, bases)
		other := new(archive.BaseError)
		if o.History == "" || !errors.As(err, &other) {
			return c, c.withUnreadable(err)
		}
		bases = slices.DeleteFunc(bases, func(b Base) bool { return b.ID == c.base.ID })
	}
}

// planFrom plans from the newest base.
func planFrom(ctx context.Context, o *Options, bases []Base) (base Base, plan *archive.Plan, err error) {
	base, found := newest(bases, &o.Target)
	if !found {
		whole, err := archive.BeginsAtFirstEpoch(ctx, o.Store, o.Lineage)
		if err != nil {
			return base, nil, err
		}
		if !whole {
			return base, nil, noBase(bases, o.Target)
		}
		if base, err = emptyBase(ctx, o, bases); err != nil {
			return base, nil, err
		}
	}
	plan, err = archive.NewPlan(ctx, o.Store, o.Lineage, base.Point, o.Target, o.History)
	if err == nil && !found && len(plan.Files) > 0 && !o.Target.Time.IsZero() && plan.Files[0].Oldest.After(o.Target.Time) {
		err = &NoBaseError{Target: o.Target, First: plan.Files[0].Oldest} // an empty store would be taken for the state of then
	}
	if err != nil && found {
		err = fmt.Errorf("from backup %s: %w", base.ID, err)
	}
	return base, plan, err
}

// newest is the newest base at a target or before it. Of several with one epoch it is the last one, which a prune keeps longest. A base of
// which the time is not known may be after any time.
func newest(bases []Base, t *archive.Target) (best Base, found bool) {
	for _, b := range bases {
		if (t.Time.IsZero() || !b.Time.IsZero()) && b.Before(t) && (!found || b.Epoch >= best.Epoch) {
			best, found = b, true
		}
	}
	return best, found
}

func noBase(bases []Base, t archive.Target) error {
	e := &NoBaseError{Target: t}
	for _, b := range bases {
		if e.Oldest == (archive.Point{}) || b.Epoch < e.Oldest.Epoch {
			e.Oldest = b.Point
		}
	}
	return e
}

// chooseHistory sets the history that is restored, unless it was named: the only one of the target. A store that was finalized has a lineage, and
// perhaps backups from before.
func chooseHistory(ctx context.Context, o *Options) error {
	if o.Lineage != (keys.Lineage{}) || o.Oldest != "" {
		return nil
	}
	lineages, err := archive.Lineages(ctx, o.Store)
	if err != nil {
		return err
	}
	dirs, err := backup.Dirs(ctx, o.Store)
	if err != nil {
		return err
	}
	dirs = slices.DeleteFunc(dirs, func(dir string) bool { return !backup.IsOldest(dir) })
	names := make([]string, 0, len(lineages))
	for _, l := range lineages {
		names = append(names, l.String())
	}
	switch {
	case len(lineages) == 1:
		o.Lineage = lineages[0]
	case len(lineages) == 0 && len(dirs) == 1:
		o.Oldest = dirs[0]
	case len(lineages)+len(dirs) == 0:
		return fmt.Errorf("restore: %s has neither backups nor a log archive", o.Store)
	default:
		return fmt.Errorf("restore: %s has the histories of several stores; name one with --lineage: %s", o.Store, strings.Join(append(names, dirs...), ", "))
	}
	return nil
}

// backups is the directory of the history's backups.
func (o *Options) backups() string { return cmp.Or(o.Oldest, backup.Dir(o.Lineage, [16]byte{})) }
