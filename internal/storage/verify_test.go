package storage

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// bench is an engine with one writer, which is all that these tests need of the layer above.
type bench struct {
	t       *testing.T
	engine  *Engine
	visible *atomic.Uint64
	writer  Writer
	slot    *pin.Slot
	fs      *vfs.Mem
	faults  *vfs.Faulty // over fs
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := &bench{t: t, visible: new(atomic.Uint64), fs: vfs.NewMem()}
	b.faults = vfs.NewFaulty(b.fs)
	registry := pin.NewRegistry(b.visible)
	b.slot = registry.Slot()
	var err error
	b.engine, _, err = Open(t.Context(), Options{
		Dir: "db", FS: b.faults, PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10,
	}, registry)
	if err != nil {
		t.Fatal(err)
	}
	return b
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
		b.slot.Leave() // nobody else is there
		if errors.Is(err, ErrRotating) {
			var claimed bool
			if claimed, err = b.engine.AdvanceGeneration(context.Background(), &b.writer, body); err == nil && !claimed {
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

// found verifies online and offline and returns the kinds of damage, which must be the same.
func (b *bench) found() []DamageKind {
	b.t.Helper()
	online, err := b.engine.Verify(context.Background(), VerifyOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	if err := b.engine.Close(); err != nil {
		b.t.Fatal(err)
	}
	offline, err := VerifyDir(context.Background(), b.fs, "db", VerifyOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	if fmt.Sprint(online.Damages) != fmt.Sprint(offline.Damages) {
		b.t.Errorf("online: %+v\noffline: %+v", online.Damages, offline.Damages)
	}
	var kinds []DamageKind
	for _, d := range offline.Damages {
		kinds = append(kinds, d.Kind)
	}
	return kinds
}

// TestContextEndsTheWaitForACheckpoint: whatever takes the checkpointing mutex waits for a merge, or a bulk load, no longer than its context.
func TestContextEndsTheWaitForACheckpoint(t *testing.T) {
	b := newBench(t)
	b.put(0, 100, 50)
	b.checkpoint()
	load, err := b.engine.NewBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	if err := load.Add([]byte{byte(keys.SpaceUser), 'k'}, []byte("v")); err != nil {
		t.Fatal(err)
	}
	if _, err := load.Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	at := keys.Epoch(b.visible.Load())
	horizon := GCWatermarks{Visible: at, Snapshots: []keys.Epoch{at}}
	if err := b.engine.checkpoints.mu.Lock(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, wait := range map[string]func(ctx context.Context) error{
		"checkpoint": func(ctx context.Context) error { return b.engine.Checkpoint(ctx, horizon) },
		"verify":     func(ctx context.Context) error { _, err := b.engine.Verify(ctx, VerifyOptions{}); return err },
		"space":      func(ctx context.Context) error { _, err := b.engine.Space(ctx, SpaceOptions{}); return err },
		"bulk load":  func(ctx context.Context) error { return b.engine.BuildBulkLoad(ctx, load, horizon) },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		if err := wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
		cancel()
	}
	b.engine.checkpoints.mu.Unlock()
	if err := load.Close(); err != nil {
		t.Fatal(err)
	}
	if damages := b.found(); len(damages) != 0 {
		t.Errorf("damages: %v", damages)
	}
}

// TestVerifyFindsAccountsThatDoNotAddUp breaks one account at a time, as a defect of the engine would.
func TestVerifyFindsAccountsThatDoNotAddUp(t *testing.T) {
	for name, breakIt := range map[string]func(ck *pager.Checkpoint, state *pager.State) error{
		"nothing": func(*pager.Checkpoint, *pager.State) error { return nil },
		"keys": func(_ *pager.Checkpoint, s *pager.State) error {
			s.Entries++
			return nil
		},
		"bytes": func(_ *pager.Checkpoint, s *pager.State) error {
			s.EntryBytes--
			return nil
		},
		"a page that nothing reaches": func(ck *pager.Checkpoint, _ *pager.State) error {
			w := ck.Writer()
			_, err := w.Page(ck.AllocExtent(1).First)
			return errors.Join(err, w.Flush())
		},
		"a page in use that is free": func(ck *pager.Checkpoint, _ *pager.State) error {
			ck.Free(ck.LiveFrom(2)[0])
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.put(0, 300, 50)
			b.put(300, 320, 2000)
			b.checkpoint()
			ck, err := b.engine.pager.Begin()
			if err != nil {
				t.Fatal(err)
			}
			state := b.engine.pager.State()
			if err := breakIt(ck, &state); err != nil {
				t.Fatal(err)
			}
			if err := ck.Commit(context.Background(), state); err != nil {
				t.Fatal(err)
			}
			kinds := b.found()
			if sound := name == "nothing"; sound != (len(kinds) == 0) {
				t.Errorf("found %v", kinds)
			}
		})
	}
}

// TestVerifyHoldsNobodyUp stops a verification in the middle while writers and checkpoints go on: memtables are freed, checkpoints finish,
// and the state that it looks at stays as it was although all of it is overwritten.
func TestVerifyHoldsNobodyUp(t *testing.T) {
	b := newBench(t)
	b.put(0, 2000, 60)
	b.checkpoint()
	type outcome struct {
		report *VerifyReport
		err    error
	}
	reached, goOn := make(chan struct{}), make(chan struct{})
	done := make(chan outcome)
	go func() {
		var once sync.Once
		report, err := b.engine.Verify(context.Background(), VerifyOptions{Progress: func(VerifyProgress) {
			once.Do(func() {
				close(reached)
				<-goOn
			})
		}})
		done <- outcome{report, err}
	}()
	<-reached
	pinned := b.engine.pager.Checkpoint()
	for range 5 {
		b.put(0, 2000, 60)
		b.checkpoint()
	}
	b.engine.Reclaim()
	if n := b.engine.memory.retired.bytes.Load(); n != 0 {
		t.Errorf("%d bytes of memtables wait for a verification", n)
	}
	pending, live := b.engine.pager.Stats().Pending, b.engine.pager.Stats().Live
	if pending > live*5/2 { // the state's own pages, and what the last checkpoint freed
		t.Errorf("%d pages are kept for a state of about %d", pending, live)
	}
	close(goOn)
	out := <-done
	if out.err != nil || !out.report.OK() || !out.report.Accounted || out.report.Checkpoint != pinned {
		t.Fatalf("%+v, %v", out.report, out.err)
	}
	b.checkpoint()
	b.put(0, 1, 1)
	b.checkpoint()
	b.checkpoint()
	if after := b.engine.pager.Stats().Pending; after >= pending/2 {
		t.Errorf("%d pages were pending during the verification, %d are afterwards", pending, after)
	}
	if kinds := b.found(); len(kinds) > 0 {
		t.Error(kinds)
	}
}

// TestCanceledVerificationLetsGo also of the log and the pages.
func TestCanceledVerificationLetsGo(t *testing.T) {
	b := newBench(t)
	b.put(0, 1000, 60)
	b.checkpoint()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if _, err := b.engine.Verify(ctx, VerifyOptions{PagesPerSecond: 10}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	if len(b.engine.checkpoints.pins.pinned) > 0 || b.engine.checkpoints.pins.logPinned.Load() != 0 {
		t.Errorf("still held: %v, %d", b.engine.checkpoints.pins.pinned, b.engine.checkpoints.pins.logPinned.Load())
	}
	if kinds := b.found(); len(kinds) > 0 {
		t.Error(kinds)
	}
}
