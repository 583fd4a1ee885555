package tree

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// merges is the origin's parallel checkpoint: dirty pages of several key spaces, serialized by one worker or by two. It runs in
// memory, where the processors are the bound.
type merges struct {
	workers int
	digests *digests
}

const (
	mergeRounds = 3 // the same merge again, so that a run lasts long enough to be timed
	// A checkpoint takes such a sample of its input, and cuts leaves that have so many of it.
	sampleEvery, cutsMin = 1024, 3
)

func sample(fresh []btree.Entry) (cuts [][]byte) {
	for i := sampleEvery; i < len(fresh); i += sampleEvery {
		cuts = append(cuts, fresh[i].Key)
	}
	return cuts
}

// run merges r.Size random keys into a tree of r.Point key spaces. With one space the keys fall on a tenth of the tree, as a hot
// one's do.
func (m merges) run(r *harness.Run) (err error) {
	batch := max(r.Size/mergeRounds, 1)
	store, err := openMemory(page.SizeDefault, (r.Load+8*batch)/16+4096)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.close()) }()
	base := entries(r.Seed, r.Load, 8, 100, 256, 1)
	root, err := store.put(btree.Root{}, base)
	if err != nil {
		return err
	}
	hot := 256
	if r.Point == 1 {
		hot = 26
	}
	fresh := entries(r.Seed+1, batch, r.Point, 100, hot, 2)
	cuts := sample(fresh)
	var merged btree.Root
	end, free := store.end, slices.Clone(store.free)
	err = r.Time(batch*mergeRounds, func() error {
		for range mergeRounds {
			store.end, store.free = end, append(store.free[:0], free...)
			var result *btree.Result
			in := store.input(root, m.workers)
			in.Cuts = btree.Cuts{Keys: cuts, Least: cutsMin}
			result, err := putAll(r, in, fresh)
			if err != nil {
				return err
			}
			merged, store.taken = result.Root, store.taken[:0]
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := m.compare(r, store, merged); err != nil {
		return err
	}
	right, err := store.holds(merged, fresh)
	if err != nil {
		return err
	}
	return r.Verified(right, len(fresh))
}

// compare holds the pages against those that the other arm made of the same input.
func (m merges) compare(r *harness.Run, store *memory, root btree.Root) error {
	sum, err := store.digest(root)
	if err != nil {
		return err
	}
	if first := m.digests.first(fmt.Sprint(r.Seed, r.Point, r.Size), sum); first != sum {
		return fmt.Errorf("one worker made other pages than several: %08x and %08x", first, sum)
	}
	return nil
}

// digests remembers what the first arm made of an input.
type digests struct {
	mu   sync.Mutex
	sums map[string]uint32
}

func (d *digests) first(input string, sum uint32) uint32 {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, known := d.sums[input]; !known {
		d.sums[input] = sum
	}
	return d.sums[input]
}

// entries are count versions of random 16-byte keys in so many key spaces, sorted. The keys' first random byte is below hot.
func entries(seed uint64, count, spaces, valueBytes, hot int, epoch keys.Epoch) []btree.Entry {
	random := rand.New(rand.NewPCG(seed, 1))
	const keyBytes = 18 // the internal key space, the key space of the scenario, and 16 random bytes
	buffer, value := make([]byte, count*keyBytes), make([]byte, valueBytes)
	for i := range value {
		value[i] = byte(random.Uint32())
	}
	out := make([]btree.Entry, count)
	for i := range out {
		k := buffer[i*keyBytes : (i+1)*keyBytes : (i+1)*keyBytes]
		k[0], k[1], k[2] = byte(keys.SpaceUser), byte(random.IntN(spaces)), byte(random.IntN(hot))
		for j := 3; j < keyBytes; j++ {
			k[j] = byte(random.Uint32())
		}
		out[i] = btree.Entry{Key: k, Value: value, Trailer: keys.MakeTrailer(epoch, keys.KindSet)}
	}
	slices.SortFunc(out, func(a, b btree.Entry) int { return bytes.Compare(a.Key, b.Key) })
	return slices.CompactFunc(out, func(a, b btree.Entry) bool { return bytes.Equal(a.Key, b.Key) })
}
