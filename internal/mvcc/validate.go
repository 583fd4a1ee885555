package mvcc

import (
	"context"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
)

// A commit with a read set is validated in three parts, each of which looks only at what was committed after the part
// before:
//
//	walk      before the latches are taken: the versions of everything that was read, in memtables and tree
//	catch up  in rounds that get shorter: the keys of the commits since, which the log has one after the other
//	window    between the reservation and the installation, while every later commit waits: the commits since the last
//	          round, a few hundred keys
//
// The walk of a range of two million keys takes 200 ms. Without the rounds, the window had all keys to look at that were
// committed meanwhile, 70,000 to 196,000, and took up to 31 ms (docs/adr/0034).
const (
	// windowBytesMax is how much of the log may be left for the window: some hundred small records.
	windowBytesMax = 16 << 10
	// validationRoundsMax bounds the rounds. A round reads the log several times as fast as it is written.
	validationRoundsMax = 16
)

// prevalidate is the walk of a commit with a read set, and the first rounds, and checkFirst of many keys, while no latch is held. Holding
// latches for that time would make other writers wait, also those of other keys in the same stripes.
func (x *Session) prevalidate(ctx context.Context, w *Write) error {
	if err := x.checkFirstBefore(ctx, w); err != nil || w.reads == nil {
		return err
	}
	x.slot.Enter()
	defer x.slot.Leave()
	return x.validate(ctx, w.reads)
}

// pauseIn leaves the guard for a moment, so that a walk over many keys, which may read a page for each, keeps no memory
// from reclamation.
func (x *Session) pauseIn(ctx context.Context) func() error {
	windows := 0
	return func() error {
		x.slot.Leave()
		if windows++; windows%windowsPerTurn == 0 {
			letOthersRun()
		}
		x.slot.Enter()
		return endOf(ctx)
	}
}

// endOf is why a context has ended, or nil.
func endOf(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	return context.Cause(ctx)
}

// validate checks that nothing in the read set has changed after the snapshot, and remembers up to
// where it has looked. It may read pages. The caller has entered the guard, and stays in it until validateWindow.
func (x *Session) validate(ctx context.Context, r *readSet) error {
	if err := x.walked(ctx, r); err != nil {
		return err
	}
	x.reached(stepWalked)
	for range validationRoundsMax {
		end, left := r.validation.LogEnd()
		if left <= windowBytesMax {
			return nil
		}
		if err := x.catchUp(ctx, r, end); err != nil {
			return err
		}
	}
	return nil
}

// walked walks until the validation can go on in the active generation, which the next rotation may overtake. The last walk has no pauses, so that
// rotations do not matter.
func (x *Session) walked(ctx context.Context, r *readSet) error {
	for tries := 0; !x.store.engine.ResumeValidation(&r.validation); tries++ {
		if tries == validationRoundsMax {
			return x.walk(ctx, r, nil)
		}
		if err := x.walk(ctx, r, x.pauseIn(ctx)); err != nil {
			return err
		}
	}
	return nil
}

// validateHere is validate for a write that only checks: it has no window, and nothing may be left to one.
func (x *Session) validateHere(ctx context.Context, r *readSet) error {
	if err := x.validate(ctx, r); err != nil {
		return err
	}
	end, _ := r.validation.LogEnd()
	return x.catchUp(ctx, r, end)
}

// catchUp is one round: it looks at the commits up to the end of the log, or, if a rotation has taken the buffer of the
// segment, at what was read.
func (x *Session) catchUp(ctx context.Context, r *readSet, end storage.LogPosition) error {
	if err := x.store.watermark.wait(ctx, end.Epoch-1, x.parker); err != nil {
		return err
	}
	var conflict error
	if !x.store.engine.VisitWritten(&r.validation, end, func(key []byte, newer keys.Epoch) bool {
		conflict = x.notRead(r, key, newer)
		return conflict == nil
	}) {
		r.validation = storage.Validation{}
		return x.walked(ctx, r)
	}
	if conflict == nil {
		r.checked = end.Epoch - 1
	}
	return conflict
}

// walk looks for versions of what was read that are newer than what was checked before. It calls pause, if there is one, after every few
// keys; then the validation has to be resumed (Engine.ResumeValidation).
func (x *Session) walk(ctx context.Context, r *readSet, pause func() error) error {
	r.sort()
	seen, next := x.store.engine.BeginValidation()
	r.validation = seen
	if err := x.store.watermark.wait(ctx, next-1, x.parker); err != nil {
		return err
	}
	if pause == nil {
		pause = func() error { return endOf(ctx) }
	}
	if err := x.rangesUnchanged(r, keys.MaxEpoch, pause); err != nil {
		return err
	}
	if err := x.pointsNotNewer(r, pause); err != nil {
		return err
	}
	r.checked = next - 1
	return nil
}

// pointsNotNewer looks for versions of the keys in the read set with an epoch after r.checked.
func (x *Session) pointsNotNewer(r *readSet, pause func() error) error {
	for i, p := range r.points {
		if i%checkContextEvery == checkContextEvery-1 {
			if err := pause(); err != nil {
				return err
			}
		}
		if err := x.notNewer(r, r.key(p), r.checked); err != nil {
			return err
		}
	}
	return nil
}

// notNewer is nil, or the conflict with a version of a key that is newer than since.
func (x *Session) notNewer(r *readSet, key []byte, since keys.Epoch) error {
	newest, err := x.reader.NewestSince(key, since)
	if err != nil || newest == 0 {
		return err
	}
	v, _, err := x.reader.Newest(key)
	if err != nil {
		return err
	}
	return x.conflict(r, key, v.Sync, v.Epoch)
}

// validateWindow checks what was committed between validate and the reservation of epoch. It waits for every smaller
// epoch, which cannot deadlock: their commits hold all their latches already. If the context ends the wait, the commit
// cannot happen, and its epoch becomes a no-op record.
func (x *Session) validateWindow(ctx context.Context, r *readSet, epoch keys.Epoch) error {
	if err := x.store.watermark.wait(ctx, epoch-1, x.parker); err != nil {
		return err
	}
	if r.validation == (storage.Validation{}) {
		// The record was so large that it was reserved in a new generation before validation.
		r.validation, _ = x.store.engine.BeginValidation()
		return x.unchanged(ctx, r, epoch)
	}
	var conflict error
	x.store.engine.WrittenSince(&r.validation, &x.committing.writer, func(key []byte, newer keys.Epoch) bool {
		r.windowKeys++
		conflict = x.notRead(r, key, newer)
		return conflict == nil
	})
	return conflict
}

// notRead is nil, or the conflict with a commit that wrote a key which was read.
func (x *Session) notRead(r *readSet, key []byte, newer keys.Epoch) error {
	if !r.has(key) {
		return nil
	}
	v := x.store.engine.Pin().Find(key, newer)
	return x.conflict(r, key, !v.Found() || v.Epoch() != newer || v.Sync(), newer)
}

// unchanged looks for a version of something in the read set with an epoch after r.checked and before the given one, which is reserved: later
// commits may be installed already. It looks at what was written since r.checked, and not at all that was read, unless a merge has taken it.
func (x *Session) unchanged(ctx context.Context, r *readSet, before keys.Epoch) error {
	var conflict error
	if x.store.engine.Pin().VisitChanged(r.checked, before, func(key []byte, newer keys.Epoch) bool {
		conflict = x.notRead(r, key, newer)
		return conflict == nil
	}) {
		return conflict
	}
	pause := func() error { return endOf(ctx) }
	for i, p := range r.points {
		if i%checkContextEvery == checkContextEvery-1 {
			if err := pause(); err != nil {
				return err
			}
		}
		key := r.key(p)
		newest, err := x.reader.NewestSince(key, r.checked)
		if err != nil {
			return err
		}
		if newest == 0 {
			continue
		}
		v, _, err := x.reader.Get(key, before-1)
		if err != nil {
			return err
		}
		if v.Epoch > r.checked {
			return x.conflict(r, key, v.Sync, v.Epoch)
		}
	}
	return x.rangesUnchanged(r, before, pause)
}

// rangesUnchanged is unchanged for the ranges. It calls pause after every few ranges, and takes the state
// anew for each, because the guard may have been left.
func (x *Session) rangesUnchanged(r *readSet, before keys.Epoch, pause func() error) error {
	for i, b := range r.ranges {
		if i%checkContextEvery == checkContextEvery-1 {
			if err := pause(); err != nil {
				return err
			}
		}
		epoch, changed, err := x.reader.ChangedSince(x.store.engine.Pin(), r.key(b.lower), r.key(b.upper), r.checked, before)
		if err != nil {
			return err
		}
		if changed {
			return x.conflict(r, r.key(b.lower), true, epoch) // perhaps not a SYNC commit: the tree does not tell
		}
	}
	return nil
}

// conflict is the error of a commit that must not happen because the key, or the range that begins there, has changed at
// an epoch. It reveals that commit.
func (x *Session) conflict(r *readSet, key []byte, sync bool, newer keys.Epoch) error {
	x.reveals(sync, newer)
	x.store.counters.conflicts.Add(1)
	return r.conflict(key, newer)
}
