package origin

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/maypok86/otter/v2"

	"github.com/epochkv/epochkv/bench/baseline"
	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/internal/cache"
	"github.com/epochkv/epochkv/internal/pin"
)

const (
	policyPage   = 8192
	policyFrames = 16 << 20 / policyPage
	pageIns      = "page-ins"
)

// pages is a page cache under comparison, over pages that begin with their number.
type pages interface {
	reader() pageReader
	loaded() int64 // pages, so far
	Close() error
}

// pageReader visits pages for one goroutine.
type pageReader interface {
	visit(id uint64) error
	close()
}

// numbered loads pages, and counts them.
type numbered struct{ loads atomic.Int64 }

func (n *numbered) load(id uint64, page []byte) {
	n.loads.Add(1)
	binary.LittleEndian.PutUint64(page, id)
}

func (n *numbered) loaded() int64 { return n.loads.Load() }

// check makes sure that a page is the right one.
func check(id uint64, page []byte) error {
	if got := binary.LittleEndian.Uint64(page); got != id {
		return fmt.Errorf("page %d holds number %d", id, got)
	}
	return nil
}

// pageCache is the cache of production.
type pageCache struct {
	*cache.Cache
	numbered
	registry *pin.Registry
}

func openCache(frames int) (pages, error) {
	c := &pageCache{registry: pin.NewRegistry(new(atomic.Uint64))}
	var err error
	c.Cache, err = cache.New(cache.Config{
		Bytes: int64(frames) * policyPage, PageSize: policyPage, Registry: c.registry,
		Read: func(id cache.ID, page []byte) error { c.load(uint64(id), page); return nil },
		ReadBatch: func(reads []cache.Read) {
			for i := range reads {
				c.load(uint64(reads[i].ID), reads[i].Buf)
			}
		},
	})
	return c, err
}

func (c *pageCache) reader() pageReader { return &slotReader{c, c.registry.Slot()} }

type slotReader struct {
	cache *pageCache
	slot  *pin.Slot
}

// visit reads a page, hot or scanned with the same hint.
func (r *slotReader) visit(id uint64) error {
	r.slot.Enter()
	defer r.slot.Leave()
	page, err := r.cache.Page(cache.ID(id), cache.Default)
	if err != nil {
		return err
	}
	return check(id, page)
}

func (r *slotReader) close() { r.slot.Free() }

// plainCache is a baseline.
type plainCache struct {
	*baseline.PageCache
	numbered
}

func openPlain(policy baseline.Policy, frames int) (pages, error) {
	c := &plainCache{}
	c.PageCache = baseline.NewPageCache(policy, frames, policyPage, c.load)
	return c, nil
}

func openLRU(frames int) (pages, error)   { return openPlain(baseline.LRU, frames) }
func openClock(frames int) (pages, error) { return openPlain(baseline.Clock, frames) }

func (c *plainCache) reader() pageReader    { return c }
func (c *plainCache) visit(id uint64) error { return check(id, c.Visit(id)) }
func (*plainCache) close()                  {}
func (*plainCache) Close() error            { return nil }

// resistance warms a hot set, scans twice the cache, and reads the hot set again.
type resistance struct {
	open func(frames int) (pages, error)
}

func (o resistance) run(r *harness.Run) (err error) {
	c, err := o.open(policyFrames)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	reader := c.reader()
	defer reader.close()
	hot := policyFrames * r.Point / 100
	random := rand.New(rand.NewPCG(r.Seed, 1))
	warm := max(r.Size, 20*hot) // a smoke run warms as much: what is counted is exact
	again := int64(0)
	err = r.Time(warm+2*policyFrames+hot, func() error {
		for range warm {
			if err := reader.visit(uint64(1 + random.IntN(hot))); err != nil {
				return err
			}
		}
		for i := range 2 * policyFrames {
			if err := reader.visit(uint64(1 + hot + i)); err != nil {
				return err
			}
		}
		before := c.loaded()
		for i := range hot {
			if err := reader.visit(uint64(1 + i)); err != nil {
				return err
			}
		}
		again = c.loaded() - before
		return nil
	})
	if err != nil {
		return err
	}
	r.Count(pageIns, float64(again))
	return errors.Join(r.Prove("pages scanned", float64(c.loaded()-again), float64(2*policyFrames), float64(2*policyFrames+2*hot)), r.Verified(hot, hot))
}

// resident has r.Point readers visit pages that are all in memory.
type resident struct {
	open func(frames int) (pages, error)
}

// residentFrames fit the processor's caches as little as a real cache's do.
const residentFrames = 20_000

func (o resident) run(r *harness.Run) (err error) {
	c, err := o.open(max(r.Load*11/10, r.Load+100))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	reader := c.reader()
	for range 3 { // admitted, and as warm as they get
		for id := range uint64(r.Load) {
			if err := reader.visit(id + 1); err != nil {
				return err
			}
		}
	}
	reader.close()
	before := c.loaded()
	if err := readEach(r, func(reader, share int) error { return reads(r, c, reader, share) }); err != nil {
		return err
	}
	return errors.Join(r.Prove("misses", float64(c.loaded()-before), 0, 0), r.Verified(1, 1))
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

func reads(r *harness.Run, c pages, reader, count int) error {
	own := c.reader()
	defer own.close()
	random := rand.New(rand.NewPCG(r.Seed, uint64(reader)))
	for range count {
		if err := own.visit(uint64(1 + random.IntN(r.Load))); err != nil {
			return err
		}
	}
	return nil
}
