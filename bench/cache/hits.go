package cache

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

// hitPage is the size of entries. They are small, so that the caches are told apart and not memory.
const hitPage = 64

// hitCost is what finding an entry costs, and nothing else: neither does the reader look at what it found, nor choose where to go next. w3-hits has
// both.
func hitCost() harness.Scenario {
	return harness.Scenario{
		Name: "w3-hit-cost", About: "Visits to entries that are all in memory, in an order that was drawn before: look-up, usage count and slot.",
		Origin: "Prototype: 8.5 ns on one processor and 4.2 over two; otter 108 and 44.",
		Unit:   "visits", Axis: harness.Axis{Name: "readers", Points: []int{1, 2, 8, 24}}, Size: 6_000_000, Load: 100_000, Fixed: true, Weight: 1.5,
		Arms: []harness.Arm{
			{Name: usageCountArm, Run: hitOurs},
			{Name: lruArm, Run: hitLRU},
			{Name: otterArm, Run: hitOtter},
		},
		Figures: []harness.Figure{
			{Arm: usageCountArm, Against: otterArm, AtLeast: 4, Source: "a hit costs at most a quarter of otter v2's [108 ns on 1 processor, 44 ns over 2]"},
			{Arm: usageCountArm, Against: lruArm, AtLeast: 1, Source: "no loss for reads in cache against LRU"},
		},
	}
}

// visitOrder is which of n entries are visited, again and again.
func visitOrder(n int, seed uint64) []uint64 {
	order := make([]uint64, 1<<16)
	random := rand.New(rand.NewPCG(seed, 1))
	for i := range order {
		order[i] = random.Uint64N(uint64(n))
	}
	return order
}

// visits times r.Point readers, each of which goes its own way through the order.
func visits(r *harness.Run, n int, read func(order []uint64, from, count int) error) error {
	order, errs := visitOrder(n, r.Seed), make([]error, r.Point)
	share := max(r.Size/r.Point, 1)
	return r.Time(share*r.Point, func() error {
		var wait sync.WaitGroup
		for reader := range r.Point {
			wait.Go(func() { errs[reader] = read(order, reader*7919, share) })
		}
		wait.Wait()
		return errors.Join(errs...)
	})
}

func hitOtter(r *harness.Run) error {
	n := r.Load
	c, err := otter.New(&otter.Options[uint64, []byte]{MaximumSize: 2 * n})
	if err != nil {
		return err
	}
	for id := range uint64(n) {
		c.Set(id, binary.LittleEndian.AppendUint64(make([]byte, 0, hitPage), id))
	}
	err = visits(r, n, func(order []uint64, from, count int) error {
		for i := range count {
			if _, ok := c.GetIfPresent(order[(from+i)%len(order)]); !ok {
				return errors.New("an entry is missing")
			}
		}
		return nil
	})
	right := 0
	for id := range uint64(n) {
		if page, ok := c.GetIfPresent(id); ok && binary.LittleEndian.Uint64(page) == id {
			right++
		}
	}
	return errors.Join(err, r.Verified(right, n))
}

func hitLRU(r *harness.Run) error {
	n, loads := r.Load, 0
	c := baseline.NewPageCache(baseline.LRU, n+max(n/100, 64), hitPage, func(id uint64, page []byte) {
		loads++
		binary.LittleEndian.PutUint64(page, id)
	})
	each := func() (right int) {
		for id := range uint64(n) {
			if binary.LittleEndian.Uint64(c.Visit(id)) == id {
				right++
			}
		}
		return right
	}
	each()
	err := visits(r, n, func(order []uint64, from, count int) error {
		for i := range count {
			c.Visit(order[(from+i)%len(order)])
		}
		return nil
	})
	right := each()
	return errors.Join(err, r.Prove("misses", float64(loads-n), 0, 0), r.Verified(right, n))
}

func hitOurs(r *harness.Run) (err error) {
	n := r.Load
	registry := pin.NewRegistry(new(atomic.Uint64))
	c, err := cache.New(cache.Config{
		Bytes: int64(n+max(n/100, 64)) * hitPage, PageSize: hitPage, Registry: registry,
		Read: func(id cache.ID, page []byte) error { binary.LittleEndian.PutUint64(page, uint64(id)); return nil },
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	slot := registry.Slot()
	defer slot.Free()
	each := func() (right int) {
		for id := range cache.ID(n) {
			slot.Enter()
			if page, err := c.Page(id+1, cache.Default); err == nil && binary.LittleEndian.Uint64(page) == uint64(id+1) {
				right++
			}
			slot.Leave()
		}
		return right
	}
	for range 10 { // as warm as they get
		each()
	}
	misses := c.Stats().Misses
	var counted atomic.Uint64
	err = visits(r, n, func(order []uint64, from, count int) error {
		own := registry.Slot()
		defer own.Free()
		visitor := new(cache.Visitor)
		for i := range count {
			own.Enter()
			_, err := c.Visit(cache.ID(order[(from+i)%len(order)]+1), cache.Default, visitor)
			own.Leave()
			if err != nil {
				return fmt.Errorf("visit: %w", err)
			}
		}
		visitor.Hits.Flush()
		counted.Add(visitor.Hits.Count())
		return nil
	})
	all := float64(max(r.Size/r.Point, 1) * r.Point)
	return errors.Join(err, r.Prove("misses", float64(c.Stats().Misses-misses), 0, 0), r.Prove("hits counted", float64(counted.Load()), all, all), r.Verified(each(), n))
}
