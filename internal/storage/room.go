package storage

import (
	"context"
	"errors"

	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/memtable"
)

// AwaitRoom waits until a record with body and some more bytes would find memory and a log segment at once, and reserves neither: other records may
// take them. A caller for which others will wait while it waits calls it before that. The errors are those of AdvanceGeneration.
//
// For a part of StallMax it waits until the record leaves memory for those of others: otherwise the next of them would wait until it is merged.
func (e *Engine) AwaitRoom(ctx context.Context, body *batch.Body, more int) error {
	if e.fits(body, more) {
		return nil
	}
	soon, cancel := context.WithTimeoutCause(ctx, e.options.StallMax/4, errNoRoomBeside)
	err := e.awaitRoom(soon, func() (obstacle, error) { return e.obstacleOf(body, more, true) })
	cancel()
	if err != errNoRoomBeside { //nolint:errorlint // made here
		return err
	}
	return e.awaitRoom(ctx, func() (obstacle, error) { return e.obstacleOf(body, more, false) })
}

var errNoRoomBeside = errors.New("storage: there is no memory for a large record beside others")

// HasRoom reports whether AwaitRoom would not wait.
func (e *Engine) HasRoom(body *batch.Body, more int) bool {
	if e.fits(body, more) {
		return true
	}
	o, err := e.obstacleOf(body, more, false)
	return o.ready == nil || err != nil
}

// fits reports whether the active generation has room for a record.
func (e *Engine) fits(body *batch.Body, more int) bool {
	g := e.view.Load().active
	return int64(body.Size()+more) <= e.options.SegmentBytes/2 && !g.sealed() && g.segment != nil && g.segment.Fits(body.Size()+more) &&
		int64(g.mem.Bytes())+int64(memtable.MaxSize(body)+more) <= e.memory.memtableBytes
}

// obstacleOf is what a rotation for a record would have to wait for; with beside also the merges without which it would fill memory.
func (e *Engine) obstacleOf(body *batch.Body, more int, beside bool) (obstacle, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	v := e.view.Load()
	if o, err := e.memoryObstacleLocked(v); o.ready != nil || err != nil {
		return o, err
	}
	if beside && e.merges(v) && e.immutableBytesOf(v)+int64(memtable.MaxSize(body)+more) > e.memory.immutableBytes.Load() {
		e.checkpoints.request()
		return obstacle{ready: e.memory.room}, nil
	}
	size := body.Size() + more
	if attempt := e.log.Prepare(size, e.oversized(body) && body.OnlyDeletes()); attempt != nil {
		return obstacle{attempt.Done(), attempt, e.log.Oversized(size)}, nil
	}
	return obstacle{}, nil
}
