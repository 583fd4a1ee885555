package origin

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/maypok86/otter/v2"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/internal/cache"
	"github.com/epochkv/epochkv/internal/pin"
)

const (
	policyPage   = 8192
	policyFrames = 16 << 20 / policyPage
	pageIns      = "page-ins"
)

// pageCache is a cache over pages that begin with their number.
type pageCache struct {
	*cache.Cache
	registry *pin.Registry
	loads    atomic.Int64
}

func openCache(frames int, policy cache.Policy) (*pageCache, error) {
	visible := new(atomic.Uint64)
	c := &pageCache{registry: pin.NewRegistry(visible)}
	load := func(id cache.ID, page []byte) {
		c.loads.Add(1)
		binary.LittleEndian.PutUint64(page, uint64(id))
	}
	var err error
	c.Cache, err = cache.New(cache.Config{
		Bytes: int64(frames) * policyPage, PageSize: policyPage, Registry: c.registry, Policy: policy,
		Load: func(id cache.ID, page []byte) error { load(id, page); return nil },
		LoadBatch: func(reads []cache.Read) {
			for i := range reads {
				load(reads[i].ID, reads[i].Buf)
			}
		},
	})
	return c, err
}

// visit reads a page, hot or scanned with the same hint, and makes sure that it is the right one.
func (c *pageCache) visit(slot *pin.Slot, id cache.ID) error {
	slot.Enter()
	defer slot.Leave()
	page, err := c.Page(id, cache.Default)
	if err == nil && binary.LittleEndian.Uint64(page) != uint64(id) {
		err = fmt.Errorf("page %d holds number %d", id, binary.LittleEndian.Uint64(page))
	}
	return err
}

// resistance warms a hot set, scans twice the cache, and reads the hot set again.
type resistance struct{ policy cache.Policy }

func (o resistance) run(r *harness.Run) (err error) {
	c, err := openCache(policyFrames, o.policy)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	slot := c.registry.Slot()
	defer slot.Free()
	hot := policyFrames * r.Point / 100
	random := rand.New(rand.NewPCG(r.Seed, 1))
	warm := max(r.Size, 20*hot) // a smoke run warms as much: what is counted is exact
	again := int64(0)
	err = r.Time(warm+2*policyFrames+hot, func() error {
		for range warm {
			if err := c.visit(slot, cache.ID(1+random.IntN(hot))); err != nil {
				return err
			}
		}
		for i := range 2 * policyFrames {
			if err := c.visit(slot, cache.ID(1+hot+i)); err != nil {
				return err
			}
		}
		before := c.loads.Load()
		for i := range hot {
			if err := c.visit(slot, cache.ID(1+i)); err != nil {
				return err
			}
		}
		again = c.loads.Load() - before
		return nil
	})
	if err != nil {
		return err
	}
	r.Count(pageIns, float64(again))
	return errors.Join(r.Prove("pages scanned", float64(c.loads.Load()-again), float64(2*policyFrames), float64(2*policyFrames+2*hot)), r.Verified(hot, hot))
}

// resident has r.Point readers visit pages that are all in memory.
type resident struct{ policy cache.Policy }

// residentFrames fit the processor's caches as little as a real cache's do.
const residentFrames = 20_000

func (o resident) run(r *harness.Run) (err error) {
	c, err := openCache(max(r.Load*11/10, r.Load+100), o.policy)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	slot := c.registry.Slot()
	for range 3 { // admitted, and as warm as they get
		for id := range cache.ID(r.Load) {
			if err := c.visit(slot, id+1); err != nil {
				return err
			}
		}
	}
	slot.Free()
	before := c.loads.Load()
	if err := readEach(r, func(reader, share int) error { return c.reads(r, reader, share) }); err != nil {
		return err
	}
	return errors.Join(r.Prove("misses", float64(c.loads.Load()-before), 0, 0), r.Verified(1, 1))
}

// readEach times r.Point readers at once.
func readEach(r *harness.Run, read func(reader, share int) error) error {
	share, errs := max(r.Size/r.Point, 1), make([]error, r.Point)
	return r.Time(share*r.Point, func() error {
		var wait sync.WaitGroup
		for reader := range r.Point {
			wait.Go(func() { errs[reader] = read(reader, share) })
		}
		wait.Wait()
		return errors.Join(errs...)
	})
}

// residentOtter reads as many entries of the same size from otter.
func residentOtter(r *harness.Run) error {
	c, err := otter.New(&otter.Options[uint64, []byte]{MaximumSize: 2 * r.Load})
	if err != nil {
		return err
	}
	for id := range uint64(r.Load) {
		c.Set(id, binary.LittleEndian.AppendUint64(make([]byte, 0, policyPage), id))
	}
	err = readEach(r, func(reader, share int) error {
		random := rand.New(rand.NewPCG(r.Seed, uint64(reader)))
		for range share {
			id := random.Uint64N(uint64(r.Load))
			if page, ok := c.GetIfPresent(id); !ok || binary.LittleEndian.Uint64(page) != id {
				return fmt.Errorf("entry %d is missing or wrong", id)
			}
		}
		return nil
	})
	return errors.Join(err, r.Verified(1, 1))
}

func (c *pageCache) reads(r *harness.Run, reader, count int) error {
	slot := c.registry.Slot()
	defer slot.Free()
	random := rand.New(rand.NewPCG(r.Seed, uint64(reader)))
	for range count {
		if err := c.visit(slot, cache.ID(1+random.IntN(r.Load))); err != nil {
			return err
		}
	}
	return nil
}
