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

// loseRoot makes the root of a page array an older one, as after a write that the device has lost: it names a page that is a leaf of the tree by
// now, and an older node, whose page is free.
func (l *lostBlobs) loseRoot(kind pager.ArrayKind) {
	l.t.Helper()
	state, err := pager.OpenSnapshot(l.fs, "db/"+dataName)
	l.must(err)
	l.must(state.ReadMap())
	var root, leaf, free page.ID
	p, size := make([]byte, l.options.PageSize), int64(l.options.PageSize)
	for id := range state.PageCount() {
		switch err := state.ReadPage(id, p); {
		case !state.IsLive(id):
			free = id
		case err != nil:
		case page.IsTree(p, 0):
			leaf = id
		case page.ReadHeader(p).Type == page.TypeArray && p[page.HeaderSize] == byte(kind) && p[page.HeaderSize+1] > 0:
			root = id
		}
	}
	l.must(state.ReadPage(root, p))
	children, older := p[page.HeaderSize+8:], make([]byte, size)
	l.must(errors.Join(state.ReadPage(page.ID(binary.LittleEndian.Uint64(children[8:])), older), state.Close()))
	page.PutHeader(older, page.Header{Type: page.TypeArray, ID: free})
	page.Seal(older)
	binary.LittleEndian.PutUint64(children, uint64(leaf))
	binary.LittleEndian.PutUint64(children[8:], uint64(free))
	page.Seal(p)
	f, err := l.fs.Open("db/"+dataName, vfs.ReadWrite)
	l.must(err)
	_, err = f.WriteAt(p, int64(root)*size)
	_, failed := f.WriteAt(older, int64(free)*size)
	l.must(errors.Join(err, failed, f.Sync(), f.Close()))
	if free == 0 || leaf == 0 {
		l.t.Fatal("no page is free, or no leaf is there")
	}
}

// TestAnOlderRootOfATableCostsNoOtherPage: the pages that it names may belong to others by now.
func TestAnOlderRootOfATableCostsNoOtherPage(t *testing.T) {
	for _, kind := range []pager.ArrayKind{pager.ArrayAllocationMap, pager.ArrayIndirectionTable} {
		l := lostBlobs{newQuarantineBench(t, vfs.NewMem()), rand.New(rand.NewPCG(1, 1)), map[string]bool{}}
		l.options.disturb = nil
		l.mustOpen()
		for i := range 100 {
			l.set(fmt.Sprintf("large-%02d", i), strings.Repeat("large", 5000))
		}
		l.work(3)
		l.mustClose()
		l.loseRoot(kind)
		l.mustOpen()
		if len(l.engine.repaired) != 1 {
			t.Fatalf("repaired: %v", l.engine.repaired)
		}
		l.work(6)
		l.mustClose()
		l.mustOpen()
		l.checkSound()
		l.mustClose()
	}
}
