package storage

import (
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/wal"
)

// ReadCommits calls visit with what the log says of the commits after one epoch and up to another, in their order, and where the
// next record begins, until visit returns false, as far as they are in the files: the caller waits until the last one is durable. A mark at or before the first
// of them saves reading their segment from its beginning. It reports false if the log does not have all of them any more, or
// more than bytesMax would have to be read. admit, unless it is nil, is asked before memory is taken for a large record; its error ends the reading.
func (e *Engine) ReadCommits(after, through keys.Epoch, mark wal.TailMark, bytesMax int64, admit func(bytes int) error, visit func(epoch keys.Epoch, next wal.TailMark, h batch.Header) bool) (read int64, complete bool) {
	r := e.log.ReadFrom(after+1, mark)
	r.Admit(admit)
	defer func() { _ = r.Close() }() // it was only read
	for r.Position() <= through {
		rec, ok, err := r.Next(through)
		if err != nil || !ok || r.BytesRead() > bytesMax {
			return r.BytesRead(), false
		}
		if len(rec.Body) == 0 {
			continue
		}
		h, err := batch.HeaderOf(rec.Body)
		if err != nil {
			return r.BytesRead(), false
		}
		if !visit(rec.Epoch, r.Mark(), h) {
			break
		}
	}
	return r.BytesRead(), true
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
