package mvcc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// requestWindow is how long the records of requests are kept: until the cut-off has passed their time. See Request.
type requestWindow struct {
	cutoff  atomic.Uint64  // the newest that is installed, in milliseconds since 1970
	durable durableCutoffs // which merges may use
	bytes   atomic.Uint64  // about how much was written in records since Open, and before it once counted

	opened keys.Epoch // visible when the store was opened

	// committed is the latest time of an id that was to be committed since Open, and inTree is not before that of any id in the
	// tree. See Session.newestRecord.
	committed, inTree atomic.Uint64
	immutable         atomic.Pointer[immutableRecords]

	// Owned by the goroutine that moves the cut-off.
	samples []requestSample // oldest first
	newest  uint64          // no record is newer than this time; zero if there are none
}

// requestSample says how many bytes of records had been written at a time.
type requestSample struct{ at, bytes uint64 }

// cutoffID is the id in the key of the cut-off's record. No request has it: its version is not 7.
var cutoffID RequestID

// cutoffKey is that key. All records of requests are in [recordsLower, recordsUpper).
var (
	cutoffKey    = keys.Append(nil, keys.SpaceSystem, requestUser(nil, &cutoffID))
	recordsLower = append(bytes.Clone(cutoffKey), 0)
	recordsUpper = keys.Append(nil, keys.SpaceSystem, []byte{keys.SystemRequest + 1})
)

// cutoffEvery is how often the cut-off moves, for a window of fifteen times that and more.
const cutoffEvery = time.Minute

// unreadCutoff is the cut-off while it cannot be read and nothing bounds it.
const unreadCutoff = math.MaxUint64

// open reads the cut-off, and looks whether there are records. A damaged page on the way must not keep the store from
// starting: the cut-off was then before this start, so that older ids without a record count as expired, and merges drop
// no records before the next cut-off. If commits have no times, the clock may have been set back since: then all ids without a
// record count as expired until the page can be read.
func (r *requestWindow) open(x *Session) error {
	x.slot.Enter()
	defer x.slot.Leave()
	now := x.store.now()
	r.opened = x.store.Visible()
	err := r.readCutoff(x)
	if errors.Is(err, storage.ErrDamaged) {
		r.expectUnread(now, x.store.recovery.CommitTime)
		if x.store.recovery.CommitTime == 0 {
			now = unreadCutoff
		}
		r.cutoff.Store(now)
		return nil
	}
	if err != nil {
		return err
	}
	var c storage.Cursor
	x.reader.OpenCursor(&c, x.store.Visible(), recordsLower, recordsUpper, 1)
	defer c.Close()
	c.SeekLT(recordsUpper)
	switch {
	case c.Valid():
		r.expectRecords(max(now+requestAheadMillis, newestIn(c.Key())))
	case c.Paused() || errors.Is(c.Err(), storage.ErrDamaged):
		r.expectUnread(now, x.store.recovery.CommitTime)
	default:
		return c.Err()
	}
	return nil
}

// readCutoff reads the cut-off. The caller is in the guard of its slot.
func (r *requestWindow) readCutoff(x *Session) error {
	v, ok, err := x.reader.Newest(cutoffKey)
	if err != nil {
		return fmt.Errorf("the cut-off of request ids: %w", err)
	}
	cutoff := uint64(0)
	if ok && len(v.Inline()) == 8 {
		cutoff = binary.LittleEndian.Uint64(v.Inline())
		r.durable.add(cutoff, v.Epoch)
	}
	r.cutoff.Store(cutoff)
	return nil
}

// readAgain reads the cut-off if the start could not.
func (r *requestWindow) readAgain(x *Session) {
	if r.cutoff.Load() == unreadCutoff {
		x.slot.Enter()
		defer x.slot.Leave()
		_ = r.readCutoff(x) // the next tick tries again
	}
}

// requestAheadMillis is RequestAheadMax in the unit of ids.
const requestAheadMillis = uint64(RequestAheadMax / time.Millisecond)

// newestIn is the time of the id in the key of a record.
func newestIn(internal []byte) uint64 {
	var id RequestID
	copy(id[:], keys.User(internal)[1:])
	return id.Time()
}

// expectRecords says that there may be records, and the latest time of their ids.
func (r *requestWindow) expectRecords(newest uint64) {
	r.newest = newest
	r.inTree.Store(newest)
}

// expectUnread says that there may be records that cannot be read. The clock is not before the time of the newest commit, if
// commits have times: no id of before the start is further ahead of the clock than ids may be. Else that is not known.
func (r *requestWindow) expectUnread(now, commitTime uint64) {
	r.expectRecords(now + requestAheadMillis)
	if commitTime == 0 {
		r.inTree.Store(math.MaxUint64)
	}
}

// immutableRecords says that the times of the records of all epochs before first are at most latest. It is constant.
type immutableRecords struct {
	first  keys.Epoch
	latest uint64
}

// note raises committed for an id whose epoch is about to be reserved. What is in an immutable memtable was reserved before
// that was sealed, so it is noted before a reader can see it there.
func (r *requestWindow) note(id *RequestID) { raise(&r.committed, id.Time()) }

// raise stores a value unless a greater one is there. Others may do so at the same time.
func raise(most *atomic.Uint64, to uint64) {
	for known := most.Load(); to > known && !most.CompareAndSwap(known, to); {
		known = most.Load()
	}
}

// count counts a record that is about to be installed.
func (r *requestWindow) count(record []byte) { r.bytes.Add(recordBytesAbout + uint64(len(record))) }

// latestBefore bounds the times of the ids that were committed since Open in epochs before first, the first of the active memtable.
// The first look-up after a rotation computes it.
func (r *requestWindow) latestBefore(first keys.Epoch) uint64 {
	known := r.immutable.Load()
	if known == nil || known.first != first {
		known = &immutableRecords{first: first, latest: r.committed.Load()}
		r.immutable.Store(known)
	}
	return known.latest
}

// merging raises the bound of what the tree may hold. It is called after the watermark of the merge was read: what the
// merge takes is visible, and was noted before. Several checkpoints may call it at once, before they wait for each other.
func (r *requestWindow) merging() { raise(&r.inTree, r.committed.Load()) }

// recordsFrom is the key before the records of all ids of a time and later.
func recordsFrom(at uint64) []byte {
	var id RequestID
	binary.BigEndian.PutUint64(id[:], at<<16)
	return keys.Append(nil, keys.SpaceSystem, requestUser(nil, &id))
}

// now is the time of the store's clock, in milliseconds since 1970. A wall clock that jumps moves it slowly, so a jump makes
// no id expire that is not old.
func (s *Store) now() uint64 { return s.clock.Now() / 1000 }

// RequestCutoff is the time up to which requests are forgotten, in milliseconds since 1970; zero if none was.
func (s *Store) RequestCutoff() uint64 { return s.requests.cutoff.Load() }

// runRequestWindow moves the cut-off until ctx ends.
func (s *Store) runRequestWindow(ctx context.Context, x *Session) {
	s.requests.countEarlier(ctx, x, s.options.RequestWindow)
	everyTick(ctx, min(cutoffEvery, max(s.options.RequestWindow/15, time.Millisecond)), func() {
		s.requests.readAgain(x)
		// The next tick tries again. Until then ids are kept longer.
		_ = s.advanceCutoff(ctx, x, s.requests.next(s.now(), s.options.RequestWindow, s.options.RequestBytes))
	})
}

// requestSamplesMax bounds the samples of records of before Open. A window has about twenty.
const requestSamplesMax = 1000

// countEarlier counts the records of before Open, in the order of their times, as if they had been written at these times. What
// cannot be read because of damage is not counted.
func (r *requestWindow) countEarlier(ctx context.Context, x *Session, window time.Duration) {
	step, total := max(uint64(window.Milliseconds())/15, 1), uint64(0)
	lower, upper := keys.User(recordsLower), keys.User(recordsUpper)
	_ = x.ScanSystem(ctx, lower, upper, func(key, value []byte, epoch keys.Epoch) bool {
		if len(key) != 1+len(RequestID{}) || epoch > r.opened { // note has counted it
			return true
		}
		id := RequestID(key[1:])
		if n := len(r.samples); n == 0 || id.Time() >= r.samples[n-1].at+step && n < requestSamplesMax {
			r.samples = append(r.samples, requestSample{at: id.Time() - 1, bytes: total})
		}
		total += recordBytesAbout + uint64(len(value))
		return true
	})
	r.bytes.Add(total)
}

// next is where the cut-off belongs at a time; zero if it stays.
func (r *requestWindow) next(now uint64, window time.Duration, bytesMax int64) uint64 {
	written := r.bytes.Load()
	if n := len(r.samples); n > 0 && r.samples[n-1].bytes != written || n == 0 && written > 0 {
		r.newest = max(r.newest, now+requestAheadMillis)
	}
	r.samples = append(r.samples, requestSample{at: now, bytes: written})
	to, keep := now-min(now, uint64(window.Milliseconds())), 0
	for keep+1 < len(r.samples) && (r.samples[keep+1].at <= to || written-r.samples[keep].bytes > uint64(bytesMax)) {
		keep++
		if written-r.samples[keep-1].bytes > uint64(bytesMax) {
			to = max(to, r.samples[keep].at)
		}
	}
	r.samples = append(r.samples[:0], r.samples[keep:]...)
	if cutoff := r.cutoff.Load(); to <= cutoff || cutoff >= r.newest {
		return 0
	}
	return to
}

// advanceCutoff commits a cut-off, and lets merges use it once it is durable.
func (s *Store) advanceCutoff(ctx context.Context, x *Session, to uint64) error {
	if to == 0 {
		return nil
	}
	w := &Write{Durability: DurabilitySync, Origin: batch.OriginCleanup}
	w.Batch.SetRecord(keys.SpaceSystem, requestUser(nil, &cutoffID), binary.LittleEndian.AppendUint64(nil, to))
	w.own = true
	epoch, err := x.Commit(ctx, w)
	if err != nil {
		return err
	}
	s.requests.cutoff.Store(to)
	if err := s.Wait(ctx, epoch, DurabilitySync); err != nil {
		return err
	}
	s.requests.durable.add(to, epoch)
	return nil
}
