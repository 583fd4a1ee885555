package storage

import (
	"bytes"
	"context"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestLongestKeysOfLargePagesAreMerged: a log may hold keys of 16,384 bytes, a quarter of a page of 64 KiB, which earlier builds acknowledged. They
// do not block checkpoints, also when they come from replay, and are read, overwritten and deleted like others.
func TestLongestKeysOfLargePagesAreMerged(t *testing.T) {
	fs := vfs.NewMem()
	open := func(visible *atomic.Uint64) *bench {
		b := &bench{t: t, visible: visible, fs: fs}
		registry := pin.NewRegistry(b.visible)
		b.slot = registry.Slot()
		var recovery Recovery
		var err error
		b.engine, recovery, err = Open(t.Context(), Options{
			Dir: "db", FS: fs, PageSize: 64 << 10, MemoryBytes: 64 << 20, CacheBytes: 4 << 20, MemtableBytes: 1 << 20,
		}, registry)
		if err != nil {
			t.Fatal(err)
		}
		b.visible.Store(uint64(max(recovery.Epoch, recovery.Next-1)))
		return b
	}
	var all []string
	for n := 16_381; n <= 16_384; n++ {
		for _, first := range []string{"a", "m", "z"} {
			all = append(all, first+strings.Repeat("x", n-1))
		}
	}
	b := open(new(atomic.Uint64))
	b.put(0, 100, 100)
	commit := func(value string) {
		for _, key := range all {
			var w batch.Builder
			if value == "" {
				w.Delete(keys.SpaceUser, []byte(key))
			} else {
				w.Set(keys.SpaceUser, []byte(key), []byte(value))
			}
			b.commit(&w)
		}
	}
	check := func(want string) {
		t.Helper()
		r := b.engine.NewReader()
		b.slot.Enter()
		defer b.slot.Leave()
		for _, key := range append([]string{"key-00000"}, all...) {
			internal := keys.Append(nil, keys.SpaceUser, []byte(key))
			v, ok, err := r.Get(internal, keys.MaxEpoch)
			if err != nil {
				t.Fatal(err)
			}
			if key == "key-00000" {
				if !ok {
					t.Fatal("another key is gone")
				}
				continue
			}
			if set := ok && v.Kind == keys.KindSet; set != (want != "") || set && !bytes.Equal(v.Inline(), []byte(want)) {
				t.Fatalf("a key of %d bytes: found %v, %.20q, want %.20q", len(key), ok, v.Inline(), want)
			}
		}
	}
	commit("one")
	if err := b.engine.Close(); err != nil { // without a checkpoint: the next start replays them
		t.Fatal(err)
	}
	b = open(new(atomic.Uint64))
	check("one")
	b.checkpoint()
	check("one")
	commit("two")
	b.checkpoint()
	check("two")
	report, err := Inspect.Engine(context.Background(), b.engine)
	if err != nil || len(report.Damages) > 0 {
		t.Fatalf("verify: %v, %+v", err, report)
	}
	if err := b.engine.Close(); err != nil {
		t.Fatal(err)
	}
	b = open(new(atomic.Uint64))
	check("two")
	commit("")
	b.checkpoint()
	check("")
	if err := b.engine.Close(); err != nil {
		t.Fatal(err)
	}
}
