package storage

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
)

// metadataBench has keys whose versions have metadata, with values around the length from which they are blobs.
type metadataBench struct {
	*bench
	lengths []int
}

func openMetadataBench(t *testing.T, fs *vfs.Mem) *metadataBench {
	t.Helper()
	b := &metadataBench{bench: &bench{t: t, visible: new(atomic.Uint64), fs: fs}}
	registry := pin.NewRegistry(b.visible)
	b.slot = registry.Slot()
	var recovery Recovery
	var err error
	b.engine, recovery, err = Open(t.Context(), Options{
		Dir: "db", FS: fs, PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10,
	}, registry)
	if err != nil {
		t.Fatal(err)
	}
	b.visible.Store(uint64(max(recovery.Epoch, recovery.Next-1)))
	section := len((&metadata.Fields{ExpiresAt: 1 << 40, Lease: 300}).Append(nil))
	b.lengths = []int{0, 1, 100, 128 - section - 1, 128 - section, 128 - section + 1, 127, 128, 129, 500, 5000}
	return b
}

func (b *metadataBench) version(i, round int) (metadata.Fields, []byte) {
	return metadata.Fields{ExpiresAt: 1<<40 + uint64(i), Lease: uint64(300 + round)},
		[]byte(strings.Repeat(string(rune('a'+round)), b.lengths[i%len(b.lengths)]))
}

func (b *metadataBench) write(round int) {
	for i := range 10 * len(b.lengths) {
		f, value := b.version(i, round)
		var w batch.Builder
		w.SetStored(keys.KindSetMetadata, keys.SpaceUser, metadataKey(i), append(f.Append(nil), value...))
		b.commit(&w)
	}
}

func metadataKey(i int) []byte { return fmt.Appendf(nil, "key %04d", i) }

func (b *metadataBench) compare(when string, round int) {
	b.t.Helper()
	b.slot.Enter()
	defer b.slot.Leave()
	r := b.engine.NewReader()
	var list [][]byte
	for i := range 10 * len(b.lengths) {
		list = append(list, keys.Append(nil, keys.SpaceUser, metadataKey(i)))
		v, ok, err := r.Get(list[i], keys.MaxEpoch)
		b.check(when, i, round, r, v, ok, err)
	}
	var f Finder
	err := r.GetAll(&f, list, keys.MaxEpoch, Visits{Each: func(i int, v Version, ok bool) error {
		b.check(when+", all", i, round, r, v, ok, nil)
		return nil
	}})
	if err != nil {
		b.t.Fatal(when, err)
	}
	var c Cursor
	n := 0
	lower, upper := []byte{byte(keys.SpaceUser)}, []byte{byte(keys.SpaceUser) + 1}
	for from := lower; ; from = bytes.Clone(c.Resume()) {
		r.OpenCursor(&c, keys.MaxEpoch, lower, upper, 0)
		for c.SeekGE(from); c.Valid(); c.Next() {
			b.check(when+", cursor", n, round, r, *c.Version(), true, nil)
			n++
		}
		if !c.Paused() {
			break
		}
	}
	if c.Err() != nil || n != len(list) {
		b.t.Fatalf("%s: the cursor shows %d of %d keys, %v", when, n, len(list), c.Err())
	}
}

func (b *metadataBench) check(when string, i, round int, r *Reader, v Version, ok bool, err error) {
	b.t.Helper()
	if err != nil || !ok {
		b.t.Fatalf("%s: key %d: found %v, %v", when, i, ok, err)
	}
	fields, value := b.version(i, round)
	got, err := v.Metadata()
	if err != nil || got != fields {
		b.t.Fatalf("%s: key %d has metadata %+v, %v; want %+v", when, i, got, err, fields)
	}
	var buf []byte
	data, err := r.Value(&buf, v)
	appended, err2 := r.AppendValue([]byte("x"), v)
	if err != nil || err2 != nil || !bytes.Equal(data, value) || string(appended) != "x"+string(value) || v.Size() != len(value) {
		b.t.Fatalf("%s: key %d has %d bytes, size %d, %v, %v; want %d", when, i, len(data), v.Size(), err, err2, len(value))
	}
}

// TestMetadataStaysWithItsVersion writes versions with metadata, and compares every way to read them: from memtables, from the
// log after a start, from leaves and blobs, after further merges, and in what salvage passes on.
func TestMetadataStaysWithItsVersion(t *testing.T) {
	fs := vfs.NewMem()
	b := openMetadataBench(t, fs)
	b.write(0)
	b.compare("memtable", 0)
	if err := b.engine.Close(); err != nil {
		t.Fatal(err)
	}
	b = openMetadataBench(t, fs)
	b.compare("replay", 0)
	b.checkpoint()
	b.compare("tree", 0)
	b.write(1)
	b.compare("memtable over tree", 1)
	b.checkpoint()
	b.compare("second merge", 1)
	b.put(0, 300, 50) // neighbours, so that leaves are copied and split
	b.checkpoint()
	for i := range 300 {
		var w batch.Builder
		w.Delete(keys.SpaceUser, fmt.Appendf(nil, "key-%05d", i))
		b.commit(&w)
	}
	b.checkpoint()
	b.compare("after merges around it", 1)
	if kinds := b.found(); len(kinds) > 0 {
		t.Fatalf("verify: %v", kinds)
	}
	b = openMetadataBench(t, fs)
	b.compare("second start", 1)
	report, err := Inspect.Engine(context.Background(), b.engine)
	if err != nil || len(report.Damages) > 0 {
		t.Fatalf("verify: %v, %+v", err, report)
	}
	if err := b.engine.Close(); err != nil {
		t.Fatal(err)
	}
}
