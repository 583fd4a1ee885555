package wal

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// HolderOptions describe a reader of the log for which records are kept although the tree has their commits.
type HolderOptions struct {
	Name     string        // what it is for: verify, and so on
	Owner    string        // the client that must end or renew it
	From     keys.Epoch    // the first epoch that it needs
	BytesMax int64         // of segments that are kept for it; 0: no bound
	Lifetime time.Duration // it ends so long after the last Renew
	Yields   bool          // it ends when the disk is full
	// Age is not zero for a holder without an end: it keeps what was written within this time. BytesMax and a full disk make
	// it keep less instead of ending it.
	Age time.Duration
}

// Holder keeps the records from an epoch on. The owner renews it: without that it ends, so that an abandoned one does not
// keep the log for ever.
type Holder struct {
	log *Log
	HolderOptions

	// Guarded by holders.mu.
	deadline time.Time
	ended    error // why it holds nothing any more; nil while it does
}

// HolderEndedError says that the log does not keep records for a holder any more.
type HolderEndedError struct {
	Name, Owner, Reason string
}

func (e *HolderEndedError) Error() string {
	return fmt.Sprintf("wal: the log is not kept any more for %s of %s: %s", e.Name, e.Owner, e.Reason)
}

// HolderEnd is why a holder ended without its owner.
type HolderEnd int

// Ends of holders.
const (
	HolderExpired   HolderEnd = iota // its owner did not renew it
	HolderTooLarge                   // it kept more than its BytesMax
	HolderYielded                    // the disk was full
	HolderEndsCount                  // their number
)

var holderEndReasons = [HolderEndsCount]string{"its owner did not renew it in time", "it kept more than its bound", "the disk is full"}

var holderEndNames = [HolderEndsCount]string{"expired", "too_large", "disk_full"}

// Reason says it in a sentence.
func (e HolderEnd) Reason() string { return holderEndReasons[e] }

// String is the name in metrics.
func (e HolderEnd) String() string { return holderEndNames[e] }

// HolderInfo describes a holder.
type HolderInfo struct {
	HolderOptions
	Bytes    int64     // of complete segments that are kept for it, and perhaps for others
	Deadline time.Time // zero for a holder that never ends: the checkpoint, or one with an Age
}

// EndedHolder is a holder that ended without its owner, or of which less is kept because the disk was full.
type EndedHolder struct {
	HolderOptions
	Why HolderEnd
}

// endedHoldersMax is how many of the holders that ended are remembered, for the server's log.
const endedHoldersMax = 32

// checkpointHolder is the name of the holder that every log has: commits that the tree lacks. It never ends.
const checkpointHolder = "checkpoint"

// holders are the readers for which the log is kept. mu is taken before completed.mu.
type holders struct {
	mu    sync.Mutex
	list  []*Holder
	ended [HolderEndsCount]uint64
	last  []EndedHolder // the last ones that ended, at most endedHoldersMax
}

// Hold keeps the records from o.From on, as far as the log still has them.
func (l *Log) Hold(o HolderOptions) *Holder {
	h := &Holder{log: l, HolderOptions: o}
	if o.Age == 0 {
		h.deadline = time.Now().Add(o.Lifetime)
	}
	l.completed.holders.mu.Lock()
	defer l.completed.holders.mu.Unlock()
	l.completed.holders.list = append(l.completed.holders.list, h)
	return h
}

// Holder is the first holder with a name, or nil.
func (l *Log) Holder(name string) *Holder {
	r := &l.completed.holders
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, h := range r.list {
		if h.Name == name {
			return h
		}
	}
	return nil
}

// Renew puts the deadline off. The error, of type *HolderEndedError, says that the holder has ended.
func (h *Holder) Renew() error {
	r := &h.log.completed.holders
	r.mu.Lock()
	defer r.mu.Unlock()
	h.deadline = time.Now().Add(h.Lifetime)
	return h.ended
}

// Advance says that the holder does not need the epochs before from any more. The next truncation recycles them.
func (h *Holder) Advance(from keys.Epoch) {
	r := &h.log.completed.holders
	r.mu.Lock()
	defer r.mu.Unlock()
	h.From = max(h.From, from)
}

// Release ends the holder. Calling it again has no effect.
func (h *Holder) Release() {
	r := &h.log.completed.holders
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = slices.DeleteFunc(r.list, func(other *Holder) bool { return other == h })
}

// endLocked ends a holder against its owner.
func (r *holders) endLocked(h *Holder, why HolderEnd) {
	h.ended = &HolderEndedError{h.Name, h.Owner, holderEndReasons[why]}
	r.countLocked(h, why)
	r.list = slices.DeleteFunc(r.list, func(other *Holder) bool { return other == h })
}

// countLocked notes that a holder has ended, or keeps less.
func (r *holders) countLocked(h *Holder, why HolderEnd) {
	r.ended[why]++
	r.last = append(r.last, EndedHolder{h.HolderOptions, why})
	r.last = slices.Delete(r.last, 0, max(0, len(r.last)-endedHoldersMax))
}

// EndedHolders are the holders that ended after the first n did, as far as they are remembered, and how many ended in all.
func (l *Log) EndedHolders(n uint64) (list []EndedHolder, total uint64) {
	r := &l.completed.holders
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, ended := range r.ended {
		total += ended
	}
	return slices.Clone(r.last[max(0, len(r.last)-int(min(total-min(n, total), endedHoldersMax))):]), total
}

// takeUnneeded takes the segments that neither the checkpoint, which needs the epochs from needed on, nor a holder needs. A holder
// that is added meanwhile comes before it, or after it.
func (l *Log) takeUnneeded(needed keys.Epoch, take func(before keys.Epoch) []completedSegment) []completedSegment {
	r := &l.completed.holders
	r.mu.Lock()
	defer r.mu.Unlock()
	return take(l.keepLocked(needed, time.Now()))
}

// keepLocked ends the holders that are past their deadline or their bound, and returns the first epoch that another one, or the
// checkpoint, needs.
func (l *Log) keepLocked(needed keys.Epoch, now time.Time) keys.Epoch {
	r := &l.completed.holders
	for _, h := range slices.Clone(r.list) {
		switch {
		case h.Age > 0:
			h.From = max(h.From, l.completed.since(now.Add(-h.Age), h.BytesMax, needed))
		case now.After(h.deadline):
			r.endLocked(h, HolderExpired)
		case h.BytesMax > 0 && l.completed.bytesBetween(h.From, needed) > h.BytesMax:
			r.endLocked(h, HolderTooLarge)
		}
	}
	for _, h := range r.list {
		needed = min(needed, h.From)
	}
	return needed
}

// DropLargestHolder ends the holder that keeps the most bytes, of those that yield, and recycles its segments. It reports
// false if none keeps any.
func (l *Log) DropLargestHolder() (dropped HolderInfo, ok bool, err error) {
	r, needed := &l.completed.holders, l.completed.neededFrom()
	r.mu.Lock()
	var largest *Holder
	for _, h := range r.list {
		if bytes := l.completed.bytesBetween(h.From, needed); h.Yields && bytes > dropped.Bytes {
			largest, dropped = h, HolderInfo{h.HolderOptions, bytes, h.deadline}
		}
	}
	switch {
	case largest == nil:
	case largest.Age > 0:
		largest.From = needed
		r.countLocked(largest, HolderYielded)
	default:
		r.endLocked(largest, HolderYielded)
	}
	r.mu.Unlock()
	if largest == nil {
		return dropped, false, nil
	}
	return dropped, true, l.TruncateBefore(needed)
}

// Holders describes what keeps the log, the checkpoint first, and says how many holders ended without their owners.
func (l *Log) Holders() (list []HolderInfo, ended [HolderEndsCount]uint64) {
	needed := l.completed.neededFrom()
	list = []HolderInfo{{HolderOptions{Name: checkpointHolder, From: needed}, l.completed.bytesBetween(needed, keys.MaxEpoch+1), time.Time{}}}
	r := &l.completed.holders
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, h := range r.list {
		list = append(list, HolderInfo{h.HolderOptions, l.completed.bytesBetween(h.From, needed), h.deadline})
	}
	return list, r.ended
}

// bytesBetween is the size of the complete segments that end at or after from and before needed.
func (r *completed) bytesBetween(from, needed keys.Epoch) (bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.segments {
		if s.end >= from && s.end < needed {
			bytes += s.size
		}
	}
	return bytes
}

// since is the first epoch of the segments that were completed after a time, or of as many of them, the newest, as have
// bytesMax bytes together. The segments from needed on do not count.
func (r *completed) since(t time.Time, bytesMax int64, needed keys.Epoch) keys.Epoch {
	r.mu.Lock()
	defer r.mu.Unlock()
	first, bytes := needed, int64(0)
	if len(r.open) > 0 { // not complete yet, although the tree may have its commits
		first = min(first, r.open[0].header.first)
	}
	for i := len(r.segments) - 1; i >= 0; i-- {
		s := &r.segments[i]
		if s.end >= needed {
			continue
		}
		if bytes += s.size; s.completed.Before(t) || bytesMax > 0 && bytes > bytesMax {
			break
		}
		first = s.info.First
	}
	return first
}
