package storage

import (
	"sync"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/wal"
)

// ChangeLog is what is kept of the log, although the tree has its commits, for readers that come back: the segments that
// were completed within Age, as many of the newest as have Bytes together. A full disk takes them first.
type ChangeLog struct {
	Age   time.Duration // 0: nothing is kept
	Bytes int64
	// Archive is a holder that keeps the whole log from the start on, so that no checkpoint removes what is not archived before
	// the archiver has found out what that is. Without a name there is none.
	Archive wal.HolderOptions
}

// holdChangeLog keeps the log as Options.ChangeLog says.
func (e *Engine) holdChangeLog() {
	c := &e.options.ChangeLog
	if c.Age > 0 {
		e.log.Hold(wal.HolderOptions{Name: "feed", Owner: "change log", Age: c.Age, BytesMax: c.Bytes, Yields: true})
	}
	if c.Archive.Name != "" {
		e.log.Hold(c.Archive)
	}
}

// TruncateLog gives back segments whose time in the change log is over. Checkpoints do so as well, but a store without
// writes makes none.
func (e *Engine) TruncateLog() error {
	if c := &e.options.ChangeLog; c.Age == 0 && c.Archive.Name == "" || !e.mayTruncate() {
		return nil
	}
	return e.log.Truncate()
}

// mayTruncate reports whether the log may give up what the newest superblock does not need: a crash must not bring back the one
// before it. Checkpoints, which truncate the log, have made sure of that.
func (e *Engine) mayTruncate() bool { return e.pager.Certain() || e.pager.MakeCertain() == nil }

// HoldLog keeps the log for a reader.
func (e *Engine) HoldLog(o wal.HolderOptions) *wal.Holder { return e.log.Hold(o) }

// LogHolder is the holder with a name, or nil.
func (e *Engine) LogHolder(name string) *wal.Holder { return e.log.Holder(name) }

// EndedLogHolders are the holders of the log that ended after the first n did; see wal.Log.EndedHolders.
func (e *Engine) EndedLogHolders(n uint64) (list []wal.EndedHolder, total uint64) {
	return e.log.EndedHolders(n)
}

// ReadLog reads the log from an epoch on.
func (e *Engine) ReadLog(next keys.Epoch, mark wal.TailMark) *wal.TailReader {
	return e.log.ReadFrom(next, mark)
}

// OldestLogEpoch is the first epoch that the log has.
func (e *Engine) OldestLogEpoch() keys.Epoch { return e.log.OldestEpoch() }

// TermOf is the term of an epoch that the log has, or of the one before them.
func (e *Engine) TermOf(epoch keys.Epoch) keys.Term { return e.log.TermOf(epoch) }

// TreeEpoch is the newest epoch of the tree: every commit up to it is there, and durable.
func (e *Engine) TreeEpoch() keys.Epoch { return e.pager.State().Epoch }

// LogSegmentAfter is the first epoch of the log segment after the one that has an epoch; false if there is none yet.
func (e *Engine) LogSegmentAfter(at keys.Epoch) (keys.Epoch, bool) { return e.log.SegmentAfter(at) }

// loadedRangesMax bounds the bulk loads that are remembered.
const loadedRangesMax = 64

// loadedRanges are the last bulk loads of this run. A bulk load has no record in the log, only a gap.
type loadedRanges struct {
	mu   sync.Mutex
	from keys.Epoch // every bulk load of a later epoch is in the list
	list []keys.LoadedRange
}

// open begins the list, at the newest epoch of the store.
func (r *loadedRanges) open(newest keys.Epoch) {
	r.mu.Lock()
	r.from = newest
	r.mu.Unlock()
}

func (r *loadedRanges) add(one keys.LoadedRange) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.list) == loadedRangesMax {
		r.from, r.list = r.list[0].Epoch, r.list[1:]
	}
	r.list = append(r.list, one)
}

// LoadedRanges are the bulk loads with epochs after the first and up to the second argument. It reports false if it does
// not know all of them.
func (e *Engine) LoadedRanges(after, through keys.Epoch) (list []keys.LoadedRange, complete bool) {
	r := &e.bulkLoads.loaded
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, one := range r.list {
		if one.Epoch > after && one.Epoch <= through {
			list = append(list, one)
		}
	}
	return list, after >= r.from
}
