package inspect

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
)

// store is an engine with one writer, which is all that these tests need of the layer above.
type store struct {
	t       *testing.T
	engine  *storage.Engine
	visible *atomic.Uint64
	writer  storage.Writer
	slot    *pin.Slot
	fs      *vfs.Mem
}

func newStore(t *testing.T) *store {
	t.Helper()
	s := &store{t: t, fs: vfs.NewMem()}
	s.open()
	return s
}

func (s *store) open() {
	s.t.Helper()
	s.visible, s.writer = new(atomic.Uint64), storage.Writer{}
	registry := pin.NewRegistry(s.visible)
	s.slot = registry.Slot()
	engine, recovery, err := storage.Open(s.t.Context(), storage.Options{
		Dir: "db", FS: s.fs, PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10,
	}, registry)
	if err != nil {
		s.t.Fatal(err)
	}
	s.engine = engine
	s.visible.Store(uint64(recovery.Epoch))
}

func (s *store) close() {
	s.t.Helper()
	if err := s.engine.Close(); err != nil {
		s.t.Fatal(err)
	}
}

// put commits keys [from, to) with values of a size.
func (s *store) put(from, to, size int) {
	s.t.Helper()
	for i := from; i < to; i++ {
		var w batch.Builder
		w.Set(keys.SpaceUser, fmt.Appendf(nil, "key-%05d", i), []byte(strings.Repeat("v", size)))
		s.commit(&w)
	}
}

func (s *store) commit(w *batch.Builder) {
	s.t.Helper()
	body, err := w.Finish()
	if err != nil {
		s.t.Fatal(err)
	}
	for {
		s.slot.Enter()
		epoch, err := s.engine.Reserve(&s.writer, body)
		s.slot.Leave()
		if errors.Is(err, storage.ErrRotating) {
			var reserved bool
			if reserved, err = s.engine.AdvanceGeneration(context.Background(), &s.writer, body, keys.MaxEpoch); err == nil && !reserved {
				continue
			}
			epoch = s.writer.Epoch()
		}
		if err != nil {
			s.t.Fatal(err)
		}
		s.engine.Record(&s.writer, body)
		if err := s.engine.Install(&s.writer, body, true); err != nil {
			s.t.Fatal(err)
		}
		s.visible.Store(uint64(epoch))
		return
	}
}

func (s *store) checkpoint() {
	s.t.Helper()
	at := keys.Epoch(s.visible.Load())
	if err := s.engine.Rotate(context.Background()); err != nil {
		s.t.Fatal(err)
	}
	if err := s.engine.Checkpoint(context.Background(), storage.GCWatermarks{Visible: at, Snapshots: []keys.Epoch{at}}); err != nil {
		s.t.Fatal(err)
	}
}

// verify verifies online and offline and returns the kinds of damage, which must be the same. It
// closes the engine.
func (s *store) verify() []DamageKind {
	s.t.Helper()
	online, err := Verify(context.Background(), s.engine, VerifyOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	s.close()
	offline, err := VerifyDir(context.Background(), s.fs, "db", VerifyOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	if fmt.Sprint(online.Damages) != fmt.Sprint(offline.Damages) {
		s.t.Errorf("online: %+v\noffline: %+v", online.Damages, offline.Damages)
	}
	var kinds []DamageKind
	for _, d := range offline.Damages {
		kinds = append(kinds, d.Kind)
	}
	return kinds
}
