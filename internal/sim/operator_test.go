package sim

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// operate does what an operator does, and reports whether to go on.
func (w *actor) operate() bool {
	if w.over() {
		return false
	}
	if w.open(); w.x == nil {
		return false
	}
	ctx, cancel := w.limited()
	defer cancel()
	switch n := w.rng.IntN(100); {
	case n < 40:
		if err := w.s.Checkpoint(ctx); err != nil {
			w.refused("checkpoint", err)
		} else {
			w.total.add("checkpoint")
		}
	case n < 65:
		w.bulkLoad(ctx)
	case n < 72:
		if _, err := w.s.ResizeCache(int64(16*w.o.Storage.PageSize + w.rng.IntN(1500<<10))); err != nil {
			w.refused("resize", err)
		}
	case n < 78:
		if err := w.s.Probe(ctx); err != nil {
			w.refused("probe", err)
		}
	case n < 80:
		if _, err := w.s.FinalizeUpgrade(ctx); err != nil {
			w.refused("upgrade", err)
		}
	case n < 84 && w.jumps:
		w.wall.Add(int64([]time.Duration{time.Minute, -time.Minute, time.Hour, -time.Hour}[w.rng.IntN(4)]))
		if w.rng.IntN(3) == 0 {
			_, _ = w.s.Clock().Accept() // the wall clock may be slow
		}
	}
	return true
}

// bulkLoad loads keys, with a context that may end at an operation of the file system.
func (w *actor) bulkLoad(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if w.rng.IntN(3) == 0 {
		var left atomic.Int64
		left.Store(1 + w.rng.Int64N(80))
		w.mem.SetHook(func(_ vfs.Op, name string) {
			if strings.HasSuffix(name, ".ekv") || strings.Contains(name, "bulk-") {
				if left.Add(-1) == 0 {
					cancel()
				}
			}
		})
		defer w.mem.SetHook(nil)
	}
	l, err := w.s.BeginBulkLoad()
	if err != nil {
		w.refused("bulk load", err)
		return
	}
	c := w.begun(mvcc.DurabilitySync)
	for range 1 + w.rng.IntN(1+w.rng.IntN(60)) {
		key, v := w.key(), w.value()
		if w.rng.IntN(10) == 0 {
			key = fmt.Sprintf("x%02d", w.rng.IntN(12))
		}
		c.writes[key] = written{value: v}
		if err = l.Add([]byte(key), []byte(v)); err != nil {
			break
		}
	}
	floor, loaded := w.ledger.floor(), mvcc.BulkLoaded{}
	if err == nil {
		loaded, err = l.Commit(ctx)
	}
	if err != nil && loaded.Epoch != 0 && errors.Is(err, mvcc.ErrFailed) {
		w.total.add("bulk load in doubt")
		c.epoch = loaded.Epoch
		w.ledger.add(c) // the next start decides
	} else if err != nil {
		w.refused("bulk load", err)
	} else {
		w.committed(w.ctx, c, loaded.Epoch, floor, "bulk load")
	}
	if err := l.Close(); err != nil && !w.over() && w.rule == nil {
		w.ledger.fail("the bulk load does not close: %v", err)
	}
}
