package storage

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

var lostBlobSeeds = flag.Int("lostblobs.seeds", 33, "how many stores TestBlobsOfARebuiltTableCostNoOtherBlob damages")

// lostBlobs is a store whose indirection table and some blob pages are damaged.
type lostBlobs struct {
	*quarantineBench
	rng  *rand.Rand
	lost map[string]bool
}

func (l *lostBlobs) key() string { return fmt.Sprintf("key-%05d", l.rng.IntN(80)) }

func (l *lostBlobs) value() string {
	length := l.rng.IntN(1200)
	if l.rng.IntN(3) == 0 {
		length = 1400 * (1 + l.rng.IntN(3)) // the same lengths again and again
	}
	return strings.Repeat(fmt.Sprintf("%08d", l.rng.IntN(1e8)), 1+length/8)
}

// work overwrites and deletes keys, and checkpoints now and then.
func (l *lostBlobs) work(rounds int) {
	l.t.Helper()
	for range rounds {
		for range 1 + l.rng.IntN(30) {
			key, value := l.key(), l.value()
			if l.rng.IntN(3) == 0 {
				value = ""
			}
			l.set(key, value)
			delete(l.lost, key)
		}
		if err := l.checkpointAt(); err != nil {
			l.t.Fatalf("checkpoint: %v", err)
		}
		l.checkSound()
	}
}

// damagePages destroys every page of the indirection table, and of the allocation map if that is wanted, and one of so
// many blob pages.
func (l *lostBlobs) damagePages(share int, allocations bool) {
	l.t.Helper()
	f, err := l.fs.Open("db/"+dataName, vfs.ReadWrite)
	if err != nil {
		l.t.Fatal(err)
	}
	size, _ := f.Size()
	buf := make([]byte, l.options.PageSize)
	for id := range size / int64(len(buf)) {
		if _, err := f.ReadAt(buf, id*int64(len(buf))); err != nil {
			l.t.Fatal(err)
		}
		array := page.ReadHeader(buf).Type == page.TypeArray
		table := array && (allocations || buf[page.HeaderSize] == byte(pager.ArrayIndirectionTable))
		blob := page.ReadHeader(buf).Type == page.TypeBlobs && l.rng.IntN(share) == 0
		if !table && !blob {
			continue
		}
		if _, err := f.WriteAt([]byte("damage"), id*int64(len(buf))+100); err != nil {
			l.t.Fatal(err)
		}
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		l.t.Fatal(err)
	}
}

// checkSound reads everything: no answer is wrong, and only values that were lost already may be damaged.
func (l *lostBlobs) checkSound() {
	l.t.Helper()
	l.slot.Enter()
	defer l.slot.Leave()
	r := l.engine.NewReader()
	for _, key := range slices.Sorted(maps.Keys(l.want)) {
		v, ok, err := r.Get(keys.Append(nil, keys.SpaceUser, []byte(key)), keys.Epoch(l.visible.Load()))
		if err != nil || !ok {
			l.t.Fatalf("%s: %v, %v", key, ok, err)
		}
		got, err := r.AppendValue(nil, v)
		if err != nil && (!l.lost[key] || !errors.Is(err, ErrDamaged) && !IsDamage(err)) {
			l.t.Fatalf("%s, lost before %v: %v", key, l.lost[key], err)
		}
		if err == nil && string(got) != l.want[key] {
			l.t.Fatalf("%s is %.20q of %d bytes, want %.20q", key, got, len(got), l.want[key])
		}
	}
}

// findLost notes which values cannot be read.
func (l *lostBlobs) findLost() {
	l.t.Helper()
	l.slot.Enter()
	defer l.slot.Leave()
	r := l.engine.NewReader()
	for key := range l.want {
		v, _, err := r.Get(keys.Append(nil, keys.SpaceUser, []byte(key)), keys.Epoch(l.visible.Load()))
		if err == nil {
			_, err = r.AppendValue(nil, v)
		}
		if err != nil {
			l.lost[key] = true
		}
	}
}

// TestBlobsOfARebuiltTableCostNoOtherBlob: the indirection table is made anew, and of some blobs it finds an older copy or
// none. Overwriting, deleting and moving them afterwards costs no other value, and no checkpoint.
func TestBlobsOfARebuiltTableCostNoOtherBlob(t *testing.T) {
	for seed := range uint64(max(*lostBlobSeeds/exhaustiveStep, 6)) { // 6 have every kind of damage
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			l := lostBlobs{newQuarantineBench(t, vfs.NewMem()), rand.New(rand.NewPCG(seed, 1)), map[string]bool{}}
			l.t, l.options.disturb = t, nil
			l.mustOpen()
			l.work(12)
			l.mustClose()
			l.damagePages(2+int(seed%4), seed%5 == 4)
			l.mustOpen()
			l.findLost()
			l.work(12)
			l.mustClose()
			l.mustOpen()
			l.work(4)
			for key := range maps.Clone(l.want) {
				l.set(key, "")
			}
			l.work(10) // the file shrinks
			l.mustClose()
		})
	}
}

func (l *lostBlobs) must(err error) {
	l.t.Helper()
	if err != nil {
		l.t.Fatal(err)
	}
}

// lose makes nodes of a page array older ones, as after writes that the device has lost. A root names a page that is a leaf of the tree by now,
// and an older node, whose page is free. The leaves of the indirection table name a free page in place of one with values, and those of the
// allocation map say that this one is free.
func (l *lostBlobs) lose(kind pager.ArrayKind, level byte) {
	l.t.Helper()
	state, err := pager.OpenSnapshot(l.fs, "db/"+dataName)
	l.must(err)
	l.must(state.ReadMap())
	var leaf, values, free page.ID
	nodes := map[page.ID][]byte{}
	for id := range state.PageCount() {
		p := make([]byte, l.options.PageSize)
		switch err := state.ReadPage(id, p); {
		case !state.IsLive(id):
			free = id
		case err != nil:
		case page.IsTree(p, 0):
			leaf = id
		case page.ReadHeader(p).Type == page.TypeBlobs && values == 0:
			values = id
		case page.ReadHeader(p).Type == page.TypeArray && p[page.HeaderSize] == byte(kind) && p[page.HeaderSize+1] == level:
			nodes[id] = p
		}
	}
	l.must(state.Close())
	if free == 0 || leaf == 0 || values == 0 || len(nodes) == 0 {
		l.t.Fatal("no page is free, or no leaf is there")
	}
	const pageMask = 1<<39 - 1
	for _, p := range nodes {
		entries := p[page.HeaderSize+8:]
		switch {
		case level > 0:
			binary.LittleEndian.PutUint64(entries, uint64(leaf))
			binary.LittleEndian.PutUint64(entries[8:], uint64(free))
		case kind == pager.ArrayAllocationMap && p[page.HeaderSize+4] == 0:
			entries[values/8] &^= 1 << (values % 8)
		case kind == pager.ArrayIndirectionTable:
			for ; len(entries) >= 8; entries = entries[8:] {
				if at := binary.LittleEndian.Uint64(entries); at&pageMask == uint64(values) {
					binary.LittleEndian.PutUint64(entries, at&^pageMask|uint64(free))
				}
			}
		}
	}
	if level > 0 {
		nodes[free] = make([]byte, l.options.PageSize)
		nodes[free][page.HeaderSize], nodes[free][page.HeaderSize+4] = byte(kind), 1
	}
	f, err := l.fs.Open("db/"+dataName, vfs.ReadWrite)
	l.must(err)
	for id, p := range nodes {
		page.PutHeader(p, page.Header{Type: page.TypeArray, ID: id, Checkpoint: page.ReadHeader(p).Checkpoint})
		page.Seal(p)
		_, err := f.WriteAt(p, int64(id)*int64(l.options.PageSize))
		l.must(err)
	}
	l.must(errors.Join(f.Sync(), f.Close()))
}

// TestAnOlderTableCostsNoOtherPage: the pages that it names may belong to others by now.
func TestAnOlderTableCostsNoOtherPage(t *testing.T) {
	testseed.SkipUnderRace(t)
	for _, lost := range []struct {
		kind     pager.ArrayKind
		level    byte
		repaired int
	}{{pager.ArrayAllocationMap, 1, 1}, {pager.ArrayAllocationMap, 0, 2}, {pager.ArrayIndirectionTable, 1, 2}, {pager.ArrayIndirectionTable, 0, 2}} {
		l := lostBlobs{newQuarantineBench(t, vfs.NewMem()), rand.New(rand.NewPCG(1, 1)), map[string]bool{}}
		l.options.disturb = nil
		l.mustOpen()
		for i := range 100 {
			l.set(fmt.Sprintf("large-%02d", i), strings.Repeat("large", 5000))
		}
		l.work(3)
		l.mustClose()
		l.lose(lost.kind, lost.level)
		l.mustOpen()
		if len(l.engine.repairs.made) != lost.repaired {
			t.Fatalf("repaired: %v", l.engine.repairs.made)
		}
		l.checkSound()
		l.work(6)
		l.mustClose()
		l.mustOpen()
		l.checkSound()
		l.mustClose()
	}
}
