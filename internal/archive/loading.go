package archive

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// A bulk load is read from the store and uploaded before the records after it. Its record is added to the next file when all of its run
// objects are there, and what the store keeps of it is released when that file is. After a crash between, everything is read again: objects
// that exist are not sent again.

// loadState is the archiver's part of bulk loads.
type loadState struct {
	now     *loading   // is read; nil without one
	release keys.Epoch // up to which nothing needs to be kept any more; zero if that was done
	renewAt time.Time  // when what is kept is looked at
	oldest  keys.Epoch // in the log, when it was looked at
}

// renewLoadsEvery is how often what keeps bulk loads is looked at.
const renewLoadsEvery = 10 * time.Minute

// keepLoads keeps bulk loads that are not in the archive yet, and ends keeping the others. What fails is tried again.
func (a *Archiver) keepLoads(ctx context.Context) {
	s := &a.loads
	if now := time.Now(); !now.Before(s.renewAt) {
		s.renewAt = now.Add(renewLoadsEvery)
		_ = a.source.RenewLoads(ctx) // the next time comes long before they end
	}
	// A full disk takes log. A bulk load through epoch e can be archived only while the log has the record of e+1.
	if oldest := a.source.OldestInLog(); oldest != s.oldest {
		s.oldest, s.release = oldest, max(s.release, max(oldest, 2)-2)
	}
	if s.release != 0 && a.source.ReleaseLoads(ctx, s.release) == nil {
		s.release = 0
	}
}

// loading is a bulk load that is being read.
type loading struct {
	after, through keys.Epoch // the epochs that it has taken
	failures       int        // of reads, in a row

	load   keys.HeldLoad
	run    *runWriter // nil before anything was read
	from   []byte     // the first key that is in no object yet; nil: all
	last   bool       // no entries are left
	object *RunObject // is complete, and not in the archive yet; nil without one
	data   []byte     // of object
}

// errObjectFull ends a walk over entries.
var errObjectFull = errors.New("archive: an object with entries of a bulk load is full")

// readLoad goes on with the bulk load. It reports false if it has to wait.
func (a *Archiver) readLoad(ctx context.Context) (more bool, err error) {
	l := a.loads.now
	if l.run == nil {
		load, held, pending := a.source.HeldLoad(l.after, l.through)
		switch {
		case pending:
			return false, nil
		case !held:
			a.giveUpLoad("it was not kept until it was archived")
			return true, nil
		}
		l.load, l.run = load, newRunWriter(a.identity.Lineage, l.through, load.Time)
	}
	if l.object == nil && !l.last {
		if err := a.readObject(ctx, l); err != nil {
			return false, a.unreadableLoad(ctx, err)
		}
	}
	if l.object != nil {
		return true, a.uploadObject(ctx, l)
	}
	described := l.run.finish()
	err = a.add(&Record{Epoch: l.through, Term: l.load.Term, Load: true, Body: described.append(nil)})
	a.loads.now = nil
	return true, err
}

// readObject reads entries until an object is full, or none are left.
func (a *Archiver) readObject(ctx context.Context, l *loading) error {
	l.run.begin()
	err := a.source.ReadLoad(ctx, l.through, l.from, func(key, value []byte) error {
		if l.run.size() >= a.options.FileBytes {
			l.from = bytes.Clone(key)
			return errObjectFull
		}
		return l.run.append(key, value)
	})
	if err != nil && !errors.Is(err, errObjectFull) {
		return err
	}
	if l.last = err == nil; l.last && l.run.empty() {
		return nil
	}
	object, data, err := l.run.object()
	l.object, l.data = &object, data
	return err
}

// unreadableLoad handles a bulk load that cannot be read: it is read again from its beginning, but not for ever.
func (a *Archiver) unreadableLoad(ctx context.Context, err error) error {
	l := a.loads.now
	if ctx.Err() != nil { // the last flush has another context, and must not go on with half an object
		a.loads.now = &loading{after: l.after, through: l.through, failures: l.failures}
		return err
	}
	if _, held, _ := a.source.HeldLoad(l.after, l.through); held && l.failures+1 < damagesMax {
		a.loads.now = &loading{after: l.after, through: l.through, failures: l.failures + 1}
		return err
	}
	a.giveUpLoad(err.Error())
	return nil
}

// giveUpLoad begins a new chain after a bulk load that is not in the archive.
func (a *Archiver) giveUpLoad(why string) {
	through := a.loads.now.through
	a.loads.now = nil
	a.restart(BeginsLoad, through+1, fmt.Sprintf("the bulk load at epoch %d is not in the archive: %s", through, why))
}

// uploadObject creates the complete object in the archive.
func (a *Archiver) uploadObject(ctx context.Context, l *loading) error {
	name := a.place.name(logDir, runName(l.through, l.object.SHA256))
	err := a.create(ctx, name, l.data)
	if err != nil && !errors.Is(err, objectstore.ErrExists) {
		return err
	}
	if err := a.checkObject(ctx, name, l.object); err != nil {
		return err
	}
	a.uploadedObject(l.object)
	l.run.load.Objects = append(l.run.load.Objects, *l.object)
	l.object, l.data = nil, nil
	return nil
}

// checkObject returns nil if the object that exists has its size. One that is shorter was written by a target that breaks its promises: it
// is deleted, and the next attempt creates it.
func (a *Archiver) checkObject(ctx context.Context, name string, o *RunObject) error {
	r, err := a.place.store.Read(ctx, name, o.Bytes, 0)
	if errors.Is(err, objectstore.ErrShort) {
		return errors.Join(err, a.place.store.Delete(ctx, name))
	}
	if err != nil {
		return err
	}
	return r.Close()
}
