package mvcc

import (
	"bytes"
	"context"
	"errors"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
)

// VisitRecord takes a record of the store: its key without the keyspace, its value, and the epoch that wrote it. It reports
// whether to go on. The slices are valid until it returns.
type VisitRecord func(key, value []byte, epoch keys.Epoch) (more bool)

// ScanSystem visits the records of the store with keys in [lower, upper), in key order, in a snapshot of its own. Keys are
// without their keyspace. A nil upper is the end of the keyspace. A value that is stored outside of its leaf is empty: no record
// is that long.
func (x *Session) ScanSystem(ctx context.Context, lower, upper []byte, visit VisitRecord) error {
	return x.ScanReadable(ctx, lower, upper, visit, nil)
}

// ScanReadable is ScanSystem that goes on after damaged pages: it calls hidden with each range of keys that one of them hides,
// whose records it visits only if they are not in the tree. So it is for records of which each can be handled without the
// others. A nil bound of the range is that of the keyspace.
func (x *Session) ScanReadable(ctx context.Context, lower, upper []byte, visit VisitRecord, hidden func(lower, upper []byte, err error)) error {
	at, err := x.OpenSnapshot(0)
	if err != nil {
		return err
	}
	defer x.CloseSnapshot()
	s := systemScan{at: at, from: keys.Append(nil, keys.SpaceSystem, lower), end: []byte{byte(keys.SpaceSystem) + 1}, visit: visit}
	if upper != nil {
		s.end = keys.Append(nil, keys.SpaceSystem, upper)
	}
	for end := s.end; ; {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		more, err := x.scanSystem(&s)
		damage, damaged := errors.AsType[*storage.CorruptionError](err)
		switch {
		case s.stopped:
			return nil
		case err == nil && more:
		case s.beside && damaged && !s.mirror:
			s.mirror = true
		case s.beside && (err == nil || damaged): // the readable part of a hidden range has ended
			s.from, s.end, s.beside, s.mirror = s.end, end, false, false
			if bytes.Equal(s.from, end) {
				return nil
			}
		case err == nil:
			return nil
		case !damaged || hidden == nil || !s.enterHidden(damage.Hides):
			return err
		default:
			hidden(keys.User(s.from), keys.User(s.end), err)
		}
	}
}

// systemScan is a ScanReadable under way.
type systemScan struct {
	at        keys.Epoch
	from, end []byte // internal keys
	beside    bool   // the range is hidden
	mirror    bool   // the repair tree is damaged in it, too
	stopped   bool   // by visit
	visit     VisitRecord
}

// enterHidden narrows the scan to a hidden range. It reports false if that would not advance it.
func (s *systemScan) enterHidden(hides *storage.HiddenRange) bool {
	if hides == nil || hides.Upper != nil && bytes.Compare(hides.Upper, s.from) <= 0 {
		return false
	}
	if s.beside = true; hides.Upper != nil && bytes.Compare(hides.Upper, s.end) < 0 {
		s.end = hides.Upper
	}
	return true
}

// scanSystem is one part of a scan: what is visited inside one guard. It moves s.from to where the next part begins, and reports
// whether there may be one. After an error s.from is after what was visited.
func (x *Session) scanSystem(s *systemScan) (more bool, err error) {
	x.slot.Enter()
	defer x.slot.Leave()
	c := &x.buffers.system
	if s.beside {
		x.reader.OpenCursorBeside(c, s.at, s.from, s.end, s.mirror)
	} else {
		x.reader.OpenCursor(c, s.at, s.from, s.end, 0)
	}
	defer c.Close()
	steps := 0
	last := x.buffers.last[:0]
	for c.SeekGE(s.from); c.Valid(); c.Next() {
		if v := c.Version(); v.Kind.HasValue() && !s.visit(keys.User(c.Key()), v.Inline(), v.Epoch) {
			s.stopped = true
			return false, nil
		}
		last = append(last[:0], c.Key()...)
		if steps++; steps == stepsPerGuard || c.Full() {
			s.from = append(append(s.from[:0], c.Key()...), 0)
			return true, nil
		}
	}
	x.buffers.last = last
	if c.Paused() {
		s.from = append(s.from[:0], c.Resume()...)
		return true, nil
	}
	if len(last) > 0 {
		s.from = append(append(s.from[:0], last...), 0)
	}
	return false, c.Err()
}

// ErrDamaged matches the errors of damaged pages.
var ErrDamaged = storage.ErrDamaged

// HidesOnlyBefore reports whether the damage of an error hides no version that is as new as an epoch.
func HidesOnlyBefore(err error, epoch keys.Epoch) bool {
	damage, ok := errors.AsType[*storage.CorruptionError](err)
	return ok && damage.Hides != nil && damage.Hides.Newest < epoch
}
