package archive

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/wal"
)

// Status is how far an archiver is.
type Status struct {
	Target   string
	Interval time.Duration

	Started   time.Time
	Connected bool       // the archive takes the log; not before it has answered once
	Archived  keys.Epoch // the last epoch of the archive
	Through   keys.Epoch // at least Archived; what is between the two will never be archived: bulk loads, and what the log gave up
	AsOf      time.Time  // every commit that was acknowledged as durable by then is in the archive, as far as is known: see beginsAt
	Pending   int64      // bytes that were read and are not in the archive

	Files, Bytes, Records, RawBytes uint64 // that were uploaded since the start
	Loads                           LoadStats
	Merges                          MergeStats
	Breaks                          uint64 // chains that had to begin anew since the start
	Break                           *Break // the last one, or nil
	Failures                        uint64
	Err                             error // why nothing can be archived now; nil if it can
	// Refusal is why the archive does not fit this store; nil if it is not known to be so. It stays when another error comes after it.
	Refusal *RefusedError
	// Owner is the process that archives the store: this one, or the one that keeps this one from it or has to answer first; nil while
	// it is not known. It is never changed.
	Owner *Owner
}

// LoadStats count what was uploaded of bulk loads since the start.
type LoadStats struct{ Archived, Objects, Bytes uint64 }

// Break is where a chain of files begins anew: only a full backup that has its first epoch makes what follows restorable.
type Break struct {
	Reason string
	First  keys.Epoch
	Since  time.Time
}

// oldestCommit is the time of the oldest commit in the log; zero without any.
func (a *Archiver) oldestCommit(ctx context.Context) time.Time {
	log := a.source.ReadLog(a.source.OldestInLog(), wal.TailMark{})
	defer func() { _ = log.Close() }() // it was only read
	for through := a.source.Stable(); ctx.Err() == nil; {
		rec, ok, err := log.Next(through)
		if err != nil || !ok {
			break // of what is damaged nothing is known: the archiver says so when it reads it
		}
		r := Record{Body: rec.Body}
		if at, err := r.CommitTime(); err == nil && at != 0 {
			return fromMicroseconds(at)
		}
	}
	return time.Time{}
}

// beginsAt notes of which time it is known that the archive is complete before it has answered: the log has all that is not archived.
func (a *Archiver) beginsAt(oldest time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !oldest.IsZero() && oldest.Before(a.status.AsOf) {
		a.status.AsOf = oldest
	}
}

// Lag is how old the newest commit may be that is not in the archive.
func (s *Status) Lag(now time.Time) time.Duration { return max(0, now.Sub(s.AsOf)) }

// Refused reports whether an operator has to decide.
func (s *Status) Refused() bool {
	return s.Refusal != nil || errors.As(s.Err, new(*InUseError)) || errors.Is(s.Err, ErrFeatureLevel)
}

// Status returns how far the archiver is.
func (a *Archiver) Status() Status {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.status
}

// archived notes what the archive had at the start.
func (a *Archiver) archived(info *Info) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.status.Archived, a.status.Through = info.Last.Epoch, info.Last.Epoch
	if !info.Newest.IsZero() {
		a.status.AsOf = info.Newest
	}
}

// uploaded notes a file.
func (a *Archiver) uploaded(s *sealed) {
	a.mu.Lock()
	defer a.mu.Unlock()
	t := &a.status
	t.Archived, t.Err, t.Refusal, t.Connected = s.info.Last.Epoch, nil, nil, true
	t.Through = max(t.Through, t.Archived)
	if !s.asOf.IsZero() {
		t.AsOf = s.asOf
	} else if !s.info.Newest.IsZero() {
		t.AsOf = s.info.Newest
	}
	t.Files, t.Bytes = t.Files+1, t.Bytes+uint64(s.info.Bytes)
	t.Loads.Archived += uint64(s.info.Loads)
	t.Records, t.RawBytes = t.Records+s.info.Count, t.RawBytes+uint64(s.info.RawBytes)
}

// uploadedObject notes a part of a bulk load.
func (a *Archiver) uploadedObject(o *RunObject) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.status.Loads.Objects++
	a.status.Loads.Bytes += uint64(o.Bytes)
}

// progress notes that a step has ended without an error.
func (a *Archiver) progress() {
	a.mu.Lock()
	defer a.mu.Unlock()
	t := &a.status
	t.Err, t.Refusal, t.Connected, t.Pending = nil, nil, true, 0
	if !a.opened.IsZero() {
		t.Pending = a.writer.Bytes()
	} else if a.sealed == nil && !a.asOf.IsZero() { // all that is stable was read, and nothing waits for the next file
		t.AsOf, t.Through = a.asOf, max(t.Archived, a.next-1)
	}
}

// failed notes why the archiver cannot go on now.
func (a *Archiver) failed(err error) {
	if err == nil || errors.Is(err, context.Canceled) {
		return
	}
	refusal, inUse := new(RefusedError), new(InUseError)
	a.mu.Lock()
	defer a.mu.Unlock()
	t := &a.status
	switch {
	case errors.As(err, &inUse):
		t.Owner = &inUse.Owner
	case errors.Is(err, errNotOwner):
		t.Owner = nil
	}
	if errors.As(err, &refusal) {
		t.Refusal = refusal
	}
	t.Err, t.Failures = err, t.Failures+1
	if a.sealed != nil {
		t.Pending = a.sealed.info.Bytes
	}
}

// owns notes that this process is the owner.
func (a *Archiver) owns() {
	owner := a.owners.self.owner()
	owner.Self = true
	a.mu.Lock()
	defer a.mu.Unlock()
	a.status.Owner = &owner
	if a.merging == nil || *a.merging.place != a.place {
		where := a.place
		a.merging = newMerger(&where, a.owners.confirmSurely, a.countMerges)
	}
}

// waits notes that the owner before has to answer first.
func (a *Archiver) waits(before ownerRecord) {
	a.mu.Lock()
	defer a.mu.Unlock()
	owner := before.owner()
	a.status.Owner = &owner
	a.status.Err = fmt.Errorf("archive: process %d on host %q has not ended its work on this archive; it has %v to answer before this process takes over", before.Process, before.Host, a.owners.within)
}

// Interval is a part of the archive without a hole.
type Interval struct {
	First, Last    keys.Epoch
	Oldest, Newest time.Time // of its commits; zero without any
}

// knownEnds are what Intervals has read of files, which are never changed.
type knownEnds struct {
	mu    sync.Mutex
	infos map[string]Info // by the name of the file
}

// of is place.infos for at most filesMax files of which most are known. Those of the first ones of a list are remembered.
func (k *knownEnds) of(ctx context.Context, p *place, all []file, first bool) ([]Info, []error, error) {
	found, errs := make([]Info, len(all)), make([]error, len(all))
	var unknown []file
	var at []int
	k.mu.Lock()
	for i := range all {
		var known bool
		if found[i], known = k.infos[all[i].name]; !known {
			unknown, at = append(unknown, all[i]), append(at, i)
		}
	}
	k.mu.Unlock()
	infos, failed, err := p.infos(ctx, unknown)
	known := map[string]Info{}
	for i := range unknown {
		found[at[i]], errs[at[i]] = infos[i], failed[i]
	}
	for i := range all {
		if errs[i] == nil {
			known[all[i].name] = found[i]
		}
	}
	if err == nil && first {
		k.mu.Lock()
		k.infos = known
		k.mu.Unlock()
	}
	return found, errs, err
}

// Intervals are the parts of the archive of a lineage. Between two of them, nothing can be restored. It reads one end of each file, once: a
// file that begins anew after the last epoch of the one before begins an interval, and its name does not say so. A damaged file is none.
func (a *Archiver) Intervals(ctx context.Context) (list []Interval, err error) {
	p := place{a.options.Target, a.options.Identity().Lineage}
	var some []file
	first := true
	read := func() error {
		infos, errs, err := a.ends.of(ctx, &p, some, first)
		if err != nil {
			return err
		}
		for i := range some {
			if errs[i] == nil {
				list = extend(list, &some[i], &infos[i])
			}
		}
		some, first = some[:0], false
		return nil
	}
	err = p.eachFile(ctx, func(f file) error {
		if some = append(some, f); len(some) < filesMax {
			return nil
		}
		return read()
	})
	if err == nil {
		err = read()
	}
	if err != nil {
		return nil, err
	}
	return list, nil
}

// extend adds a file to the last interval, or begins a new one.
func extend(list []Interval, f *file, info *Info) []Interval {
	if n := len(list); n > 0 {
		last := &list[n-1]
		if f.first <= last.Last || f.first == last.Last+1 && info.Begin == Linked {
			if f.last > last.Last {
				last.Last, last.Newest = f.last, info.Newest
			}
			return list
		}
	}
	return append(list, Interval{f.first, f.last, info.Oldest, info.Newest})
}
