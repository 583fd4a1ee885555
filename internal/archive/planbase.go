package archive

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
)

// BaseError means that a base is not a state of the history that was archived.
type BaseError struct {
	Base Point
	File string // has another record of the base's epoch, or ends a history before it; without the directory
}

func (e *BaseError) Error() string {
	return fmt.Sprintf("the backup of epoch %d is not one of the history in %s: two copies of the store were archived or backed up here. "+
		"Name the file that the wanted history ends with (--history FILE): then a backup of that history is taken", e.Base.Epoch, e.File)
}

// leadsToBase returns an error if the files of a named history, all, do not lead back to the base: then nothing tells whether it has the base.
func (p *Plan) leadsToBase(all []file, history string) error {
	if history != "" && all[0].first > p.Base.Epoch+1 {
		return &BaseError{p.Base, history}
	}
	return nil
}

// checkBase compares the base with the record that the archive has of its epoch. Without one, as of a backup that is newer than the archive, it
// compares what the archive has directly before and after the base. That does not notice each base of another history.
func (p *Plan) checkBase(ctx context.Context, all []file) error {
	if p.Base.Epoch == 0 || p.Base.Time.IsZero() {
		return nil
	}
	compared := false
	for _, f := range all {
		if p.Base.Epoch < f.first || p.Base.Epoch > f.last {
			continue
		}
		same, err := p.isBase(ctx, all, f)
		if err != nil && !ofFile(err) {
			return err
		}
		if err == nil && !same {
			return &BaseError{p.Base, path.Base(f.name)}
		}
		compared = compared || err == nil
	}
	if compared {
		return nil
	}
	return p.checkBeside(ctx, all)
}

// checkBeside refuses a base that is of an earlier term or time than the newest record before it, or of another term than the file after it
// follows.
func (p *Plan) checkBeside(ctx context.Context, all []file) error {
	beside := slices.DeleteFunc(slices.Clone(all), func(f file) bool { return f.first != p.Base.Epoch+1 })
	before := slices.DeleteFunc(slices.Clone(all), func(f file) bool { return f.last >= p.Base.Epoch })
	if len(before) > 0 {
		beside = append(beside, slices.MaxFunc(before, func(a, b file) int { return cmp.Compare(a.last, b.last) }))
	}
	infos, errs, err := p.place.infos(ctx, beside)
	if err != nil {
		return err
	}
	for i := range infos {
		n := &infos[i]
		earlier := n.Last.Epoch < p.Base.Epoch && (n.Last.Term > p.Base.Term || n.Newest.After(p.Base.Time))
		if errs[i] == nil && (earlier || n.Begin == Linked && n.Link.Epoch == p.Base.Epoch && n.Link.Term != p.Base.Term) {
			return &BaseError{p.Base, path.Base(beside[i].name)}
		}
	}
	return nil
}

// isBase reports whether the state of the archive at the base's epoch, which is in a file, may be the base: by the term, and by the time
// of the latest commit, which is in this file unless commits have times in another order.
func (p *Plan) isBase(ctx context.Context, all []file, f file) (_ bool, err error) {
	r, err := p.place.open(ctx, f.name)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	rec := Record{}
	for rec.Epoch < p.Base.Epoch {
		if rec, err = r.Next(); err != nil {
			return false, err
		}
	}
	latest, base := r.newest, microseconds(p.Base.Time)
	switch {
	case rec.Epoch == p.Base.Epoch && (rec.Term != p.Base.Term || latest > base):
		return false, nil
	case rec.Epoch > p.Base.Epoch || latest == 0 || latest == base:
		return true, nil // a restart has skipped it, or it cannot be told
	}
	infos, _, err := p.place.infos(ctx, slices.DeleteFunc(slices.Clone(all), func(other file) bool { return other.last >= f.first }))
	for i := range infos {
		latest = max(latest, microseconds(infos[i].Newest))
	}
	return latest >= base, err
}
