package storage

import (
	"context"

	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/memtable"
)

// AwaitRoom waits until a record with body and some more bytes would find memory and a log segment at once, and reserves neither: other records may
// take them. A caller for which others will wait while it waits calls it before that. The errors are those of AdvanceGeneration.
func (e *Engine) AwaitRoom(ctx context.Context, body *batch.Body, more int) error {
	if e.fits(body, more) {
		return nil
	}
	return e.awaitRoom(ctx, func() (obstacle, error) { return e.obstacleOf(body, more) })
}

// HasRoom reports whether AwaitRoom would not wait.
func (e *Engine) HasRoom(body *batch.Body, more int) bool {
	if e.fits(body, more) {
		return true
	}
	o, err := e.obstacleOf(body, more)
	return o.ready == nil || err != nil
}

// fits reports whether the active generation has room for a record.
func (e *Engine) fits(body *batch.Body, more int) bool {
	g := e.view.Load().active
	return int64(body.Size()+more) <= e.options.SegmentBytes/2 && !g.sealed() && g.segment != nil && g.segment.Fits(body.Size()+more) &&
		int64(g.mem.Bytes())+int64(memtable.MaxSize(body)+more) <= e.memory.memtableBytes
}

// obstacleOf is what a rotation for a record would have to wait for.
func (e *Engine) obstacleOf(body *batch.Body, more int) (obstacle, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if o, err := e.memoryObstacleLocked(e.view.Load()); o.ready != nil || err != nil {
		return o, err
	}
	size := body.Size() + more
	if attempt := e.log.Prepare(size, e.oversized(body) && body.OnlyDeletes()); attempt != nil {
		return obstacle{attempt.Done(), attempt, e.log.Oversized(size)}, nil
	}
	return obstacle{}, nil
}
