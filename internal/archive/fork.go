package archive

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// An archive is *forked* at an epoch if two of its files have different records for it: two copies of the store were archived to one
// place. Links alone do not lead out of that, because both ways are chains, and a file may overlap one of the other way. So all files
// that overlap are compared before a plan is made: none do, but for the few that a process wrote again after a lost answer.

// Branch is one of the histories of a forked archive.
type Branch struct {
	File string // its newest file, without the directory
	Last keys.Epoch
	Time time.Time // of its newest commit
}

func (b *Branch) String() string {
	return fmt.Sprintf("%s (up to epoch %d, %s)", b.File, b.Last, b.Time.UTC().Format(time.RFC3339Nano))
}

// ForkError means that the archive has two histories, and that the target does not say which of them is meant.
type ForkError struct {
	Target Target
	Epoch  keys.Epoch // the first one that they do not have in common
	Ways   [2]Branch
}

func (e *ForkError) Error() string {
	return fmt.Sprintf("%s is not one state: two copies of the store were archived here, and from epoch %d on they have different commits. The history of one ends with %v, that of the other one with %v. "+
		"Name the file that the wanted history ends with (--history FILE), or take a state before (--to-epoch %d)", &e.Target, e.Epoch, &e.Ways[0], &e.Ways[1], e.Epoch-1)
}

// fork is where the records of two files differ.
type fork struct {
	epoch keys.Epoch
	files [2]file
	time  uint64 // the earliest commit from there on; zero if no commit is known
}

// overlapsMax is how many pairs of files with epochs in common are compared: a process writes a few again after lost answers, and each
// pair is read whole. So it also bounds how many files a plan tries in the place of others.
const overlapsMax = 1000

// OverlapError means that more files have the same epochs than processes that archive a store can leave.
type OverlapError struct {
	File string // the one with which there are too many, without the directory
}

func (e *OverlapError) Error() string {
	return fmt.Sprintf("too many files of the archive have the same epochs, among them %s; expected a few that a process wrote again after a lost answer. "+
		"Name the file that the wanted history ends with (--history FILE), or remove what is none of this archive", e.File)
}

// distinctFiles are the files without the parts of merged ones, as far as they are after the base and not after the target.
func (p *Plan) distinctFiles(ctx context.Context, all []file) ([]file, error) {
	var wanted, others []file
	for _, f := range all {
		if f.last <= p.Base.Epoch || p.Target.Epoch != 0 && f.first > p.Target.Epoch {
			others = append(others, f)
		} else {
			wanted = append(wanted, f)
		}
	}
	rest, err := p.place.distinct(ctx, wanted)
	if err != nil {
		return nil, err
	}
	rest = append(rest, others...)
	slices.SortFunc(rest, func(a, b file) int { return cmp.Compare(a.name, b.name) })
	return rest, nil
}

// findFork returns the first epoch after the base and up to the target of which two files have different records; nil without any.
func (p *Plan) findFork(ctx context.Context, all []file) (first *fork, err error) {
	through := keys.MaxEpoch
	if p.Target.Epoch != 0 {
		through = p.Target.Epoch
	}
	var before []file // that may overlap what follows
	pairs := 0
	for _, f := range all {
		if first != nil && f.first >= first.epoch || f.first > through {
			break
		}
		if f.last <= p.Base.Epoch {
			continue
		}
		before = slices.DeleteFunc(before, func(b file) bool { return b.last < f.first })
		if pairs += len(before); pairs > overlapsMax {
			return nil, &OverlapError{path.Base(f.name)}
		}
		for _, b := range before {
			found, err := p.compare(ctx, b, f, through)
			if err != nil {
				return nil, err
			}
			if found != nil && (first == nil || found.epoch < first.epoch) {
				first = found
			}
		}
		before = append(before, f)
	}
	if first == nil || !p.Target.Time.IsZero() && first.time > microseconds(p.Target.Time) {
		return nil, nil
	}
	return first, nil
}

// compare finds the first epoch after the base and up to another of which two files have different records. A file that cannot be read
// is passed over: if the plan needs it, that is an error of its own.
func (p *Plan) compare(ctx context.Context, a, b file, through keys.Epoch) (*fork, error) {
	found, err := p.difference(ctx, a, b, through)
	if err != nil && ofFile(err) {
		return nil, nil
	}
	return found, err
}

func (p *Plan) difference(ctx context.Context, a, b file, through keys.Epoch) (_ *fork, err error) {
	var readers [2]*Reader
	for i, f := range []file{a, b} {
		r, err := p.place.open(ctx, f.name)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, r.Close()) }()
		readers[i] = r.Reader
	}
	from := max(a.first, b.first, p.Base.Epoch+1)
	for ctx.Err() == nil {
		x, err := recordFrom(readers[0], from)
		if err != nil {
			return nil, atEnd(err)
		}
		y, err := recordFrom(readers[1], from)
		if err != nil {
			return nil, atEnd(err)
		}
		if x.Link() != y.Link() && min(x.Epoch, y.Epoch) <= through { // of records that skip epochs, the first epoch is from
			return &fork{epoch: from, files: [2]file{a, b}, time: earliest(readers, x, y)}, nil
		}
		if from = x.Epoch + 1; from > through {
			break
		}
	}
	return nil, context.Cause(ctx)
}

// recordFrom is the record of an epoch, or the first one after it.
func recordFrom(r *Reader, from keys.Epoch) (rec Record, err error) {
	for {
		if rec, err = r.Next(); err != nil || rec.Epoch >= from {
			return rec, err
		}
	}
}

// earliest is the time of the first commit of either history, from two records on that were read last.
func earliest(readers [2]*Reader, records ...Record) (first uint64) {
	for i, rec := range records {
		for at, err := rec.CommitTime(); err == nil; at, err = rec.CommitTime() {
			if at != 0 {
				if first == 0 || at < first {
					first = at
				}
				break
			}
			if rec, err = readers[i].Next(); err != nil {
				break
			}
		}
	}
	return first
}

func atEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// describe says where the two histories of a fork end.
func (p *Plan) describe(ctx context.Context, all []file, f *fork) error {
	infos, errs, err := p.place.infos(ctx, all)
	if err != nil {
		return err
	}
	e := &ForkError{Target: p.Target, Epoch: f.epoch}
	for i := range f.files {
		at := slices.IndexFunc(all, func(other file) bool { return other.name == f.files[i].name })
		for next := at; next >= 0; {
			at = next
			next = slices.IndexFunc(infos, func(n Info) bool { return n.Begin == Linked && n.Link == infos[at].Last && n.Link != (Link{}) })
			if next >= 0 && errs[next] != nil {
				break
			}
		}
		e.Ways[i] = Branch{path.Base(all[at].name), infos[at].Last.Epoch, infos[at].Newest}
	}
	return e
}

// UnknownFileError means that the file that a history should end with is not in the archive.
type UnknownFileError struct{ File string }

func (e *UnknownFileError) Error() string {
	return fmt.Sprintf("the archive has no file %q; expected the name of one, such as %s", e.File, FileName(1, 2))
}

// history returns the files that lead to one of them, each the one before by its link, back to the base or to where a chain begins.
func (p *Plan) history(ctx context.Context, all []file, name string) ([]file, error) {
	at := slices.IndexFunc(all, func(f file) bool { return path.Base(f.name) == name })
	if at < 0 {
		return nil, &UnknownFileError{name}
	}
	if all[at].last < p.Base.Epoch {
		return nil, &BaseError{p.Base, name}
	}
	infos, errs, err := p.place.infos(ctx, all)
	if err != nil {
		return nil, err
	}
	if errs[at] != nil {
		return nil, errs[at]
	}
	var chosen []file
	for at >= 0 {
		chosen = append(chosen, all[at])
		now := &infos[at]
		if now.Begin != Linked || now.First <= p.Base.Epoch {
			break
		}
		at = slices.IndexFunc(infos, func(i Info) bool { return i.Last == now.Link })
	}
	slices.Reverse(chosen)
	return chosen, nil
}
