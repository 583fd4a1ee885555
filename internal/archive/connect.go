package archive

import (
	"context"
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/wal"
)

// ErrFeatureLevel means that the store has no lineage yet, by which an archive names its history.
var ErrFeatureLevel = errors.New("archive: the store is at feature level 1, which has no lineage; raise it with kvctl upgrade finalize")

// connect finds out where the archive ends, and whether this store may go on there.
func (a *Archiver) connect(ctx context.Context) error {
	if a.identity = a.options.Identity(); a.identity.Lineage == (keys.Lineage{}) {
		return ErrFeatureLevel
	}
	a.place = place{a.options.Target, a.identity.Lineage}
	if err := a.place.claim(ctx, a.origin()); err != nil {
		return refused(err)
	}
	list, err := a.place.files(ctx)
	if err != nil {
		return err
	}
	if len(list) == 0 {
		a.restart(BeginsFirst, a.source.OldestInLog(), "the archive begins")
		return nil
	}
	newest := list[0]
	for _, f := range list {
		if f.last > newest.last || f.last == newest.last && f.first < newest.first {
			newest = f
		}
	}
	info, err := a.place.info(ctx, &newest)
	if err != nil {
		return refused(err)
	}
	return a.resume(&newest, &info)
}

// refused makes an error about another history a refusal.
func refused(err error) error {
	foreign, store := new(LineageError), new(StoreError)
	if errors.As(err, &foreign) || errors.As(err, &store) {
		return &RefusedError{err.Error()}
	}
	return err
}

// resume goes on after the newest file, if its last record is that of the log.
func (a *Archiver) resume(newest *file, info *Info) error {
	e := info.Last.Epoch
	if stable := a.source.Stable(); e > stable {
		return ahead(newest, e, fmt.Sprintf("this store ends at epoch %d", stable))
	}
	log := a.source.ReadLog(e, wal.TailMark{})
	defer func() { _ = log.Close() }()
	rec, ok, err := log.Next(a.source.Stable())
	if truncated, is := errors.AsType[*wal.TruncatedError](err); is {
		a.archived(info)
		a.restart(BeginsGap, truncated.Oldest, fmt.Sprintf("the log begins at epoch %d and does not have the last record of the archive, epoch %d", truncated.Oldest, e))
		return nil
	}
	if err != nil || !ok {
		return errors.Join(err, fmt.Errorf("archive: the log has no record of epoch %d", e))
	}
	found := Record{Epoch: rec.Epoch, Term: rec.Term, Skipped: rec.Skipped, Body: rec.Body}
	switch {
	case found.Link() == info.Last:
	case rec.Skipped:
		return ahead(newest, e, fmt.Sprintf("a restart of this store has skipped the epochs from %d to %d", rec.First, rec.Epoch))
	default:
		return &RefusedError{fmt.Sprintf(
			"%s ends with %v, and this store has %v: the store is a copy of another one that has gone on by itself. Restore it, or archive it to another place", newest.name, info.Last, found.Link())}
	}
	a.begin, a.next, a.last = Linked, e+1, info.Last
	if h := a.currentHolder(); h != nil {
		h.Advance(e)
	}
	a.archived(info)
	return nil
}

func ahead(newest *file, e keys.Epoch, why string) error {
	return &RefusedError{fmt.Sprintf(
		"%s ends at epoch %d, and %s: the store has lost commits that were durable, was repaired, or is an old copy. Restore the lost commits from the archive, or archive this store to another place", newest.name, e, why)}
}
