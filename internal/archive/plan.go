package archive

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// Target is the state that a restore wants. Without an epoch and a time it is the latest one.
type Target struct {
	Epoch keys.Epoch // the state after the last epoch that is not later
	Time  time.Time  // the state after the last epoch whose time is not later; the time of an epoch is the latest of all up to it
}

func (t *Target) String() string {
	switch {
	case t.Epoch != 0:
		return fmt.Sprintf("epoch %d", t.Epoch)
	case !t.Time.IsZero():
		return "time " + t.Time.UTC().Format(time.RFC3339Nano)
	}
	return "the latest state"
}

// Point is a state of a store, after an epoch. The zero point is a store without a commit.
type Point struct {
	Epoch keys.Epoch
	Term  keys.Term
	Time  time.Time // the latest of all commits up to it
}

// Before reports whether a restore of the target may begin at the point.
func (p *Point) Before(t *Target) bool {
	return (t.Epoch == 0 || p.Epoch <= t.Epoch) && (t.Time.IsZero() || !p.Time.After(t.Time))
}

// Plan is how a state is made of a base and of archive files.
type Plan struct {
	Base      Point
	Target    Target
	Files     []Info
	Loads     int   // bulk loads, of which the entries are in objects of their own
	LoadBytes int64 // of these
	Last      Point // after all records of the files; the target is not later, or it is the latest state

	place place
	files []file

	damage         error      // of files in the place of which others were tried; nil if there are none
	damagedThrough keys.Epoch // the last epoch of them
	unfit          unfit      // files that try does not choose again
}

// MissingError means that the archive does not lead to the target. Nothing was written.
type MissingError struct {
	Target  Target
	From    keys.Epoch // the first epoch that is missing
	Through keys.Epoch // the last one; zero if the archive ends there
	Reason  string
	Latest  Point // the latest state that can be restored from the base
}

func (e *MissingError) Error() string {
	missing := fmt.Sprintf("the archive ends before epoch %d", e.From)
	if e.Through != 0 {
		missing = fmt.Sprintf("epochs %d to %d are missing", e.From, e.Through)
	}
	if e.Reason != "" {
		missing += " (" + e.Reason + ")"
	}
	latest := fmt.Sprintf("--to-epoch %d", e.Latest.Epoch)
	if !e.Latest.Time.IsZero() {
		latest += " of " + e.Latest.Time.UTC().Format(time.RFC3339Nano)
	}
	return fmt.Sprintf("%s cannot be restored: %s; the latest state that can be is %s", &e.Target, missing, latest)
}

// NewPlan finds the files that lead from a base to a target, and checks that each follows the one before. It reads one end of each
// file, and those that overlap. Of an archive with two histories, it takes the one that ends with a file; without the name of one, such
// an archive is refused. A base that is the target is compared with the archive, too, and needs no file. Errors: *MissingError, *ForkError, *BaseError,
// *OverlapError, *UnknownFileError, *DamageError, *LineageError, ErrNewerFormat, and those of the store.
func NewPlan(ctx context.Context, store objectstore.Store, lineage keys.Lineage, base Point, target Target, history string) (*Plan, error) {
	p := &Plan{Base: base, Target: target, Last: base, place: place{store, lineage}, unfit: unfit{}}
	all, err := p.place.files(ctx)
	if err != nil {
		return nil, err
	}
	if history != "" {
		if all, err = p.history(ctx, all, history); err != nil {
			return nil, err
		}
	} else {
		if all, err = p.distinctFiles(ctx, all); err != nil {
			return nil, err
		}
		found, err := p.findFork(ctx, all)
		if err != nil {
			return nil, err
		}
		if found != nil {
			return nil, p.describe(ctx, all, found)
		}
	}
	if err := p.checkBase(ctx, all); err != nil {
		return nil, err
	}
	if target.Epoch == base.Epoch && target.Epoch != 0 {
		return p, p.leadsToBase(all, history)
	}
	for {
		again, err := p.try(ctx, all)
		switch {
		case err != nil:
			return p, errors.Join(err, p.damage)
		case again:
			continue
		case target == (Target{}) && p.Last.Epoch < p.damagedThrough: // the latest state is in a file that is damaged
			return p, p.damage
		}
		return p, errors.Join(p.checkTarget(ctx), p.checkLoads(ctx))
	}
}

// unfit has, by the name of a file, the epochs that it does not follow: MaxEpoch, if it is damaged and follows none. A file that does not follow the end of
// one file may follow that of the next, which overlaps it.
type unfit map[string][]keys.Epoch

func (u unfit) add(f *file, after keys.Epoch) { u[f.name] = append(u[f.name], after) }

func (u unfit) has(f *file, after keys.Epoch) bool {
	return slices.Contains(u[f.name], after) || slices.Contains(u[f.name], keys.MaxEpoch)
}

// try chooses files by their names, and compares their links. It reports true if it has to be called again: a file does not follow the one before, or is
// damaged, and another one may follow in its place.
func (p *Plan) try(ctx context.Context, all []file) (again bool, err error) {
	chosen := chain(all, p.unfit, p.Base.Epoch, p.Target.Epoch)
	infos, errs, err := p.place.infos(ctx, chosen)
	if err != nil {
		return false, err
	}
	p.files, p.Files, p.Last = nil, nil, p.Base
	reason, last := "", Link{}
	for i := range infos {
		if errs[i] != nil {
			if !p.others(all, &chosen[i]) {
				return false, errs[i]
			}
			p.damage, p.damagedThrough = errors.Join(p.damage, errs[i]), max(p.damagedThrough, chosen[i].last)
			p.unfit.add(&chosen[i], keys.MaxEpoch)
			return true, nil
		}
		if reason = follows(&infos[i], &p.Base, last, i == 0); reason != "" {
			if p.others(all, &chosen[i]) {
				p.unfit.add(&chosen[i], p.Last.Epoch)
				return true, nil
			}
			break
		}
		p.add(&chosen[i], &infos[i])
		if last = infos[i].Last; p.reached() {
			return false, nil
		}
	}
	if p.Target == (Target{}) && reason == "" && !p.later(all) {
		return false, nil
	}
	return false, p.missing(ctx, all, reason)
}

func (p *Plan) add(f *file, i *Info) {
	p.files, p.Files = append(p.files, *f), append(p.Files, *i)
	p.Last.Epoch, p.Last.Term = i.Last.Epoch, i.Last.Term
	if i.Newest.After(p.Last.Time) {
		p.Last.Time = i.Newest
	}
}

// reached reports whether no later file is needed.
func (p *Plan) reached() bool {
	return p.Target.Epoch != 0 && p.Last.Epoch >= p.Target.Epoch || !p.Target.Time.IsZero() && p.Last.Time.After(p.Target.Time)
}

// missing is the error about the first epoch that the plan does not lead to.
func (p *Plan) missing(ctx context.Context, all []file, reason string) error {
	e := &MissingError{Target: p.Target, From: p.Last.Epoch + 1, Reason: reason, Latest: p.Last}
	var next *file
	for i, f := range all {
		if f.first > e.From && (e.Through == 0 || f.first-1 < e.Through) && !p.unfit.has(&f, keys.MaxEpoch) {
			e.Through, next = f.first-1, &all[i]
		}
	}
	if next != nil && reason == "" { // the next file may say why, such as a bulk load
		if i, err := p.place.info(ctx, next); err == nil && i.Begin != Linked {
			e.Reason = fmt.Sprintf("%s begins anew: %v", FileName(i.First, i.Last.Epoch), i.Begin)
		}
	}
	if reason != "" && e.Through == 0 {
		e.Through = e.From
	}
	return e
}

// chain are files that cover the epochs after one, up to another unless that is zero, as far as their names tell: of those that are not unfit, always the
// one that goes farthest.
func chain(all []file, not unfit, after, through keys.Epoch) (chosen []file) {
	for from := 0; through == 0 || after < through; {
		for from < len(all) && all[from].last <= after {
			from++
		}
		best := -1
		for i := from; i < len(all) && all[i].first <= after+1; i++ {
			if all[i].last > after && (best < 0 || all[i].last > all[best].last) && !not.has(&all[i], after) {
				best = i
			}
		}
		if best < 0 {
			return chosen
		}
		chosen, after = append(chosen, all[best]), all[best].last
	}
	return chosen
}

// others reports whether another file has the epoch after the last one, and may follow it.
func (p *Plan) others(all []file, but *file) bool {
	after := p.Last.Epoch
	return slices.ContainsFunc(all, func(f file) bool {
		return f.name != but.name && f.first <= after+1 && f.last > after && !p.unfit.has(&f, after)
	})
}

// later reports whether a file that is not damaged has epochs after the last one.
func (p *Plan) later(all []file) bool {
	return slices.ContainsFunc(all, func(f file) bool { return f.last > p.Last.Epoch && !p.unfit.has(&f, keys.MaxEpoch) })
}

// follows returns why a file does not continue a chain, or nothing. If the file overlaps what is before, that is found out when the
// records are read.
func follows(i *Info, base *Point, last Link, first bool) string {
	switch {
	case first && i.First == base.Epoch+1 && i.Begin == Linked && i.Link.Term != base.Term:
		return fmt.Sprintf("%s follows an epoch of term %d, and the base has term %d", FileName(i.First, i.Last.Epoch), i.Link.Term, base.Term)
	case first || i.First <= last.Epoch:
		return ""
	case i.Begin != Linked:
		return fmt.Sprintf("%s begins anew: %v", FileName(i.First, i.Last.Epoch), i.Begin)
	case i.Link != last:
		return fmt.Sprintf("%s follows %v, and the file before it ends with %v", FileName(i.First, i.Last.Epoch), i.Link, last)
	}
	return ""
}

// Bytes is the size of the files.
func (p *Plan) Bytes() (n int64) {
	for i := range p.Files {
		n += p.Files[i].Bytes
	}
	return n + p.LoadBytes
}

// isAfter reports whether a record is after the target; latest is the latest commit time up to it.
func (p *Plan) isAfter(e keys.Epoch, latest uint64) bool {
	t := &p.Target
	return t.Epoch != 0 && e > t.Epoch || !t.Time.IsZero() && latest > uint64(t.Time.UnixMicro())
}

// ErrNotReached means that the files do not have what the plan was made of.
var ErrNotReached = errors.New("archive: the target was not reached")

// Replay calls apply with the records of the plan up to the target, and returns the state after them. It reads and verifies every
// file to its end.
func (p *Plan) Replay(ctx context.Context, apply func(Record) error) (Point, error) {
	r := replay{plan: p, at: p.Base, running: microseconds(p.Base.Time), apply: apply}
	for i := range p.files {
		if err := r.file(ctx, i); err != nil {
			return r.at, err
		}
	}
	if p.Target.Epoch > r.covered && p.Target.Epoch > p.Base.Epoch || !p.Target.Time.IsZero() && !r.ended {
		return r.at, fmt.Errorf("%w: the files end at epoch %d", ErrNotReached, r.covered)
	}
	return r.at, nil
}

// replay is a Replay under way.
type replay struct {
	plan    *Plan
	at      Point // after what was applied
	last    Link  // of the newest record that was read; known if it is not zero
	covered keys.Epoch
	running uint64 // the latest commit time up to last
	ended   bool   // the rest is after the target
	apply   func(Record) error
}

// file applies the records of a file.
func (r *replay) file(ctx context.Context, n int) (err error) {
	f, info := &r.plan.files[n], &r.plan.Files[n]
	reader, err := r.plan.place.open(ctx, f.name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, reader.Close()) }()
	if reader.Header() != info.Header {
		return &DamageError{f.name, 0, "the header is not the one that the plan was made of"}
	}
	overlaps := r.last != (Link{}) && info.First <= r.last.Epoch
	joined := !overlaps
	for {
		rec, err := reader.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if overlaps && rec.Epoch == r.last.Epoch {
			if joined = rec.Link() == r.last; !joined {
				return &DamageError{f.name, 0, fmt.Sprintf("epoch %d has another record than in the file before", rec.Epoch)}
			}
		}
		if rec.Epoch <= max(r.at.Epoch, r.last.Epoch) {
			continue
		}
		if !joined {
			return &DamageError{f.name, 0, fmt.Sprintf("the file does not have epoch %d, with which the file before it ends", r.last.Epoch)}
		}
		if err := r.record(ctx, &rec); err != nil {
			return err
		}
	}
	if reader.Info() != *info {
		return &DamageError{f.name, f.size - trailerSize, "the file is not the one that the plan was made of"}
	}
	r.last = info.Last
	r.covered = max(r.covered, info.Last.Epoch)
	return nil
}

// record applies a record, unless it is after the target.
func (r *replay) record(ctx context.Context, rec *Record) error {
	at, err := rec.CommitTime()
	if err != nil {
		return err
	}
	r.running = max(r.running, at)
	if r.plan.isAfter(rec.Epoch, r.running) {
		r.ended = true
	}
	if r.ended {
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if rec.Load {
		err = r.load(ctx, rec)
	} else {
		err = r.apply(*rec)
	}
	if err != nil {
		return err
	}
	r.at = Point{rec.Epoch, rec.Term, fromMicroseconds(r.running)}
	return nil
}
