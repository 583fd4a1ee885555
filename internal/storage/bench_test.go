package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
)

// bench is an engine with one writer, which is all that these tests need of the layer above.
type bench struct {
	t       testing.TB
	engine  *Engine
	visible *atomic.Uint64
	writer  Writer
	slot    *pin.Slot
	fs      *vfs.Mem
	faults  *vfs.Faulty // over fs
}

func newBench(t *testing.T) *bench {
	t.Helper()
	return openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10})
}

// openBench is newBench with sizes of its own.
func openBench(t testing.TB, o Options) *bench {
	t.Helper()
	b := &bench{t: t, visible: new(atomic.Uint64), fs: vfs.NewMem()}
	b.faults = vfs.NewFaulty(b.fs)
	o.Dir = "db"
	b.open(o)
	return b
}

// open opens the engine over b.faults.
func (b *bench) open(o Options) (found Recovery) {
	b.t.Helper()
	registry := pin.NewRegistry(b.visible)
	b.slot = registry.Slot()
	o.FS, o.DataFS = b.faults, nil
	var err error
	if b.engine, found, err = Open(b.t.Context(), o, registry); err != nil {
		b.t.Fatal(err)
	}
	return found
}

// put commits keys [from, to) with values of a size.
func (b *bench) put(from, to, size int) {
	b.t.Helper()
	for i := from; i < to; i++ {
		var w batch.Builder
		w.Set(keys.SpaceUser, fmt.Appendf(nil, "key-%05d", i), []byte(strings.Repeat("v", size)))
		b.commit(&w)
	}
}

// delete commits the deletion of keys [from, to).
func (b *bench) commit(w *batch.Builder) {
	b.t.Helper()
	body, err := w.Finish()
	if err != nil {
		b.t.Fatal(err)
	}
	for {
		b.slot.Enter()
		epoch, err := b.engine.Reserve(&b.writer, body)
		b.slot.Leave() // there are no other sessions
		if errors.Is(err, ErrRotating) {
			var reserved bool
			if reserved, err = b.engine.AdvanceGeneration(context.Background(), &b.writer, body, keys.MaxEpoch); err == nil && !reserved {
				continue
			}
			epoch = b.writer.Epoch()
		}
		if err != nil {
			b.t.Fatal(err)
		}
		b.engine.Record(&b.writer, body)
		if err := b.engine.Install(&b.writer, body, true); err != nil {
			b.t.Fatal(err)
		}
		b.visible.Store(uint64(epoch))
		return
	}
}

func (b *bench) checkpoint() {
	b.t.Helper()
	at := keys.Epoch(b.visible.Load())
	if err := b.engine.Rotate(context.Background()); err != nil {
		b.t.Fatal(err)
	}
	if err := b.engine.Checkpoint(context.Background(), GCWatermarks{Visible: at, Snapshots: []keys.Epoch{at}}); err != nil {
		b.t.Fatal(err)
	}
}

// found verifies online and offline and returns the kinds of damage, which must be the same. It closes the engine.
func (b *bench) found() []string {
	b.t.Helper()
	online, err := Inspect.Engine(context.Background(), b.engine)
	if err != nil {
		b.t.Fatal(err)
	}
	if err := b.engine.Close(); err != nil {
		b.t.Fatal(err)
	}
	offline, err := Inspect.Files(context.Background(), b.fs, "db")
	if err != nil {
		b.t.Fatal(err)
	}
	if !slices.Equal(online.Damages, offline.Damages) {
		b.t.Errorf("online: %+v\noffline: %+v", online.Damages, offline.Damages)
	}
	return offline.Kinds
}
