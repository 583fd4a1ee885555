package storage

import (
	"errors"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/wal"
)

// commitLogBytesMax bounds what one ReadCommits reads.
const commitLogBytesMax = 128 << 20

// errEnough ends the reading of a segment.
var errEnough = errors.New("storage: enough was read")

// ReadCommits calls visit with what the log says of the commits after one epoch and up to another, in their order, as far as
// they are in the files: the caller waits until the last one is durable. It reports false if the log does not have all of them
// any more, or they are too many: more than 128 MiB.
func (e *Engine) ReadCommits(after, through keys.Epoch, visit func(epoch keys.Epoch, h batch.Header)) (complete bool) {
	if through <= after {
		return true
	}
	segments, err := wal.Segments(e.fs, e.options.Dir)
	if err != nil || len(segments) == 0 || segments[0].First > after+1 {
		return false
	}
	bytes, last := int64(0), after
	for i := range segments {
		if segments[i].First > through || i+1 < len(segments) && segments[i+1].First <= after+1 {
			continue
		}
		if bytes += segments[i].Bytes; bytes > commitLogBytesMax {
			return false
		}
		err := wal.ReadSegment(e.fs, segments[i], func(r wal.Record) error {
			if !r.HoldsEpoch() || r.Epoch <= after {
				return nil
			}
			if last = r.Epoch; r.Epoch > through {
				return errEnough
			}
			if len(r.Body) == 0 {
				return nil
			}
			h, err := batch.HeaderOf(r.Body)
			visit(r.Epoch, h)
			return err
		})
		if err != nil && !errors.Is(err, errEnough) {
			return false
		}
	}
	return last >= through
}

// CommitTime is the latest time of a commit that is installed, in microseconds since 1970; zero if none is known.
func (e *Engine) CommitTime() uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	v := e.view.Load()
	state := e.pager.State()
	at := max(v.active.commitTime.Load(), commitTime(&state))
	for _, g := range v.immutables {
		at = max(at, g.commitTime.Load())
	}
	return at
}

// LoggedBytes is how many bytes of log records were made durable since Open.
func (e *Engine) LoggedBytes() uint64 { return e.log.Stats().Bytes }
