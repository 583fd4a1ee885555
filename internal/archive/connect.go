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
	if a.owners == nil {
		a.owners = newOwners(a.place, a.options.Lock, a.options.AnswerWithin)
	}
	fits := func(ctx context.Context) error {
		_, _, _, err := a.compare(ctx)
		return err
	}
	if err := a.owners.acquire(ctx, fits, a.waits); err != nil {
		return err
	}
	err := a.resume(ctx)
	if refusal := new(RefusedError); errors.As(err, &refusal) { // another process has created a file meanwhile
		a.owners.release(ctx)
		return err
	}
	a.owns()
	a.owners.answerUntil(ctx)
	return err
}

// newest is the archive file with the largest epoch; found is false without any. Damaged ones are passed over: what they have is archived
// again, as far as the log has it.
func (a *Archiver) newest(ctx context.Context) (newest file, info Info, found bool, err error) {
	for {
		var before *file
		if found {
			before = &newest
		}
		list, err := a.place.newestFiles(ctx, before)
		if err != nil || len(list) == 0 {
			return file{}, Info{}, false, err
		}
		for i := range list {
			newest, found = list[i], true
			info, err = a.place.info(ctx, &newest)
			if !errors.Is(err, ErrDamaged) {
				return newest, info, true, refused(err)
			}
			if stable := a.source.Stable(); newest.last > stable {
				return newest, info, true, ahead(&newest, newest.last, fmt.Sprintf("this store ends at epoch %d", stable))
			}
		}
	}
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
func (a *Archiver) resume(ctx context.Context) error {
	info, found, oldest, err := a.compare(ctx)
	switch {
	case err != nil:
		return err
	case !found:
		a.restart(BeginsFirst, a.source.OldestInLog(), "the archive begins")
		return nil
	}
	e := info.Last.Epoch
	a.archived(&info)
	a.loads.release = e // a crash may have come before
	if oldest != 0 {
		a.restart(BeginsGap, oldest, fmt.Sprintf("the log begins at epoch %d and does not have the last record of the archive, epoch %d", oldest, e))
		return nil
	}
	a.begin, a.next, a.last = Linked, e+1, info.Last
	if h := a.currentHolder(); h != nil {
		h.Advance(e)
	}
	return nil
}

// compare compares the last record of the archive with the log, and refuses another one. If the log has been given up to an epoch after
// it, or is damaged there, oldest is the first one that the log has. Without a file, found is false.
func (a *Archiver) compare(ctx context.Context) (info Info, found bool, oldest keys.Epoch, err error) {
	newest, info, found, err := a.newest(ctx)
	if err != nil || !found {
		return info, false, 0, err
	}
	e := info.Last.Epoch
	if stable := a.source.Stable(); e > stable {
		return info, true, 0, ahead(&newest, e, fmt.Sprintf("this store ends at epoch %d", stable))
	}
	log := a.source.ReadLog(e, wal.TailMark{})
	defer func() { _ = log.Close() }()
	rec, ok, err := log.Next(a.source.Stable())
	if truncated, is := errors.AsType[*wal.TruncatedError](err); is {
		return info, true, truncated.Oldest, nil
	}
	if a.tail.givesUp(err, 1) { // it can never be compared, and what is before the next segment is not in the log either
		if next, ok, failed := a.source.Secure(ctx, e); ok && failed == nil {
			return info, true, next, nil
		}
	}
	if err != nil || !ok {
		return info, true, 0, errors.Join(err, fmt.Errorf("archive: the log has no record of epoch %d", e))
	}
	ours := Record{Epoch: rec.Epoch, Term: rec.Term, Skipped: rec.Skipped, Body: rec.Body}
	switch {
	case ours.Link() == info.Last:
		return info, true, 0, nil
	case rec.Skipped:
		return info, true, 0, ahead(&newest, e, fmt.Sprintf("a restart of this store has skipped the epochs from %d to %d", rec.First, rec.Epoch))
	}
	return info, true, 0, &RefusedError{fmt.Sprintf(
		"%s ends with %v, and this store has %v: the store is a copy of another one that has gone on by itself. Restore it, or archive it to another place", newest.name, info.Last, ours.Link())}
}

func ahead(newest *file, e keys.Epoch, why string) error {
	return &RefusedError{fmt.Sprintf(
		"%s ends at epoch %d, and %s: the store has lost commits that were durable, was repaired, or is an old copy. Restore the lost commits from the archive, or archive this store to another place", newest.name, e, why)}
}
