package restore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
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
	missing, base, forked, other, overlap := new(archive.MissingError), new(NoBaseError), new(archive.ForkError), new(archive.BaseError), new(archive.OverlapError)
	return errors.As(err, &overlap) || errors.As(err, &missing) || errors.As(err, &base) || errors.As(err, &forked) || errors.As(err, &other) || errors.Is(err, archive.ErrNotReached)
}

// choose finds the newest base of a history from which the target can be reached, and the files that lead there.
func choose(ctx context.Context, o *Options) (base Base, plan *archive.Plan, err error) {
	bases, err := Bases(ctx, o.Store, o.Lineage)
	if err != nil {
		return base, nil, fmt.Errorf("list the backups: %w", err)
	}
	for {
		base, plan, err = planFrom(ctx, o, bases)
		other := new(archive.BaseError)
		if o.History == "" || !errors.As(err, &other) {
			return base, plan, err
		}
		bases = slices.DeleteFunc(bases, func(b Base) bool { return b.ID == base.ID })
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

// chooseLineage is the lineage that was named, or the only one.
func chooseLineage(ctx context.Context, o *Options) (keys.Lineage, error) {
	if o.Lineage != (keys.Lineage{}) {
		return o.Lineage, nil
	}
	all, err := archive.Lineages(ctx, o.Store)
	switch {
	case err != nil:
		return keys.Lineage{}, err
	case len(all) == 0:
		return keys.Lineage{}, fmt.Errorf("restore: %s has neither backups nor a log archive", o.Store)
	case len(all) > 1:
		names := make([]string, 0, len(all))
		for _, l := range all {
			names = append(names, l.String())
		}
		return keys.Lineage{}, fmt.Errorf("restore: %s has the histories of several stores; name one with --lineage: %s", o.Store, strings.Join(names, ", "))
	}
	return all[0], nil
}
