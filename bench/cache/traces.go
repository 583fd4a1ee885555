package cache

import (
	"math/rand/v2"
	"sync/atomic"

	"github.com/maypok86/otter/v2"

	"github.com/epochkv/epochkv/bench/baseline"
	"github.com/epochkv/epochkv/bench/workload"
	"github.com/epochkv/epochkv/internal/cache"
	"github.com/epochkv/epochkv/internal/pin"
)

// subject is a cache under comparison.
type subject interface {
	// visit asks for a page and reports whether it was there. A scan's visit says so.
	visit(id uint64, scan bool) (hit bool)
	close() error
}

// arm is one cache, to be opened with room for so many entries.
type arm struct {
	name string
	open func(entries int) (subject, error)
}

const (
	otterArm      = "otter"
	usageCountArm = "usage count"
	lruArm        = "lru"
)

// arms has our cache once with the hint that the engine gives for a scan, and once without it, because otter has no such hint.
var arms = []arm{
	{otterArm, newPeer},
	{lruArm, func(n int) (subject, error) { return newBaseline(n, baseline.LRU), nil }},
	{"clock", func(n int) (subject, error) { return newBaseline(n, baseline.Clock), nil }},
	{usageCountArm, func(n int) (subject, error) { return newOurs(n, cache.Low) }},
	{"usage count, no hint", func(n int) (subject, error) { return newOurs(n, cache.Default) }},
}

// ours is a page cache with pages of one word: only which are kept matters here.
type ours struct {
	*cache.Cache
	slot     *pin.Slot
	missed   bool
	scanHint cache.Hint
}

func newOurs(entries int, scanHint cache.Hint) (subject, error) {
	visible := new(atomic.Uint64)
	visible.Store(1)
	registry := pin.NewRegistry(visible)
	o := &ours{slot: registry.Slot(), scanHint: scanHint}
	c, err := cache.New(cache.Config{
		Bytes: int64(entries) * 8, PageSize: 8, Registry: registry,
		Read:      func(cache.ID, []byte) error { o.missed = true; return nil },
		ReadBatch: func([]cache.Read) {},
	})
	o.Cache = c
	return o, err
}

func (o *ours) visit(id uint64, scan bool) bool {
	h := cache.Default
	if scan {
		h = o.scanHint
	}
	o.missed = false
	o.slot.Enter()
	_, err := o.Page(cache.ID(id+1), h)
	o.slot.Leave()
	return err == nil && !o.missed
}

func (o *ours) close() error { return o.Close() }

// plain is a baseline, which knows no hints.
type plain struct {
	*baseline.PageCache
	missed bool
}

func newBaseline(entries int, policy baseline.Policy) subject {
	p := &plain{}
	p.PageCache = baseline.NewPageCache(policy, entries, 8, func(uint64, []byte) { p.missed = true })
	return p
}

func (p *plain) visit(id uint64, _ bool) bool {
	p.missed = false
	p.Visit(id + 1)
	return !p.missed
}

func (*plain) close() error { return nil }

type peer struct{ *otter.Cache[uint64, uint64] }

// newPeer makes otter do its upkeep within each call, so that a run can be repeated.
func newPeer(entries int) (subject, error) {
	c, err := otter.New(&otter.Options[uint64, uint64]{MaximumSize: entries, Executor: func(f func()) { f() }})
	return peer{c}, err
}

func (p peer) visit(id uint64, _ bool) bool {
	if _, ok := p.GetIfPresent(id); ok {
		return true
	}
	p.Set(id, id)
	return false
}

func (peer) close() error { return nil }

// trace feeds visits to a cache of n entries, and returns which of those that count were hits. A scan's visits do not count.
type trace struct {
	name string
	run  func(c subject, n int, seed uint64) tally
}

const visitsPerEntry = 100

// tally counts hits in the second half of a run, or in all of it.
type tally struct{ hits, visits int }

func (t *tally) add(hit, counted bool) {
	if !counted {
		return
	}
	t.visits++
	if hit {
		t.hits++
	}
}

func (t tally) percent() float64 { return 100 * float64(t.hits) / float64(t.visits) }

var traces = []trace{
	{"zipf", zipfBeside(0)},
	{"zipf beside a scan, 1:1", zipfBeside(1)},
	{"zipf beside a scan, 4:1", zipfBeside(4)},
	{"loop over 1.1 times the cache", loop},
	{"working set changes, zipf", func(c subject, n int, seed uint64) (t tally) {
		z := zipf(seed, n)
		for i := range visitsPerEntry * n {
			t.add(c.visit(uint64(i/(20*n)*10*n+z.Next()), false), true)
		}
		return t
	}},
	{"working set changes, uniform", func(c subject, n int, seed uint64) (t tally) {
		random := rand.New(rand.NewPCG(seed, 2))
		for i := range visitsPerEntry * n {
			t.add(c.visit(uint64(i/(20*n)*10*n)+random.Uint64N(uint64(n*8/10)), false), true)
		}
		return t
	}},
	{"zipf, then uniform over 5 times the cache", func(c subject, n int, seed uint64) (t tally) {
		z, random := zipf(seed, n), rand.New(rand.NewPCG(seed, 3))
		for range visitsPerEntry * n / 2 {
			c.visit(uint64(z.Next()), false)
		}
		for i := range visitsPerEntry * n {
			t.add(c.visit(1<<30+random.Uint64N(uint64(n*5)), false), i > visitsPerEntry*n/2)
		}
		return t
	}},
}

// zipf draws from ten times as many pages as fit.
func zipf(seed uint64, n int) *workload.Zipf {
	return workload.NewZipf(rand.New(rand.NewPCG(seed, 2)), 10*n, workload.SkewYCSB)
}

// loop visits the same pages in order, over and over.
func loop(c subject, n int, _ uint64) (t tally) {
	for i := range visitsPerEntry * n {
		t.add(c.visit(uint64(i%(n*11/10)), false), i >= visitsPerEntry*n/2)
	}
	return t
}

// zipfBeside visits ten times as many pages as fit, after each so many of them one of a scan of twice the cache that repeats for ever.
func zipfBeside(every int) func(c subject, n int, seed uint64) tally {
	return func(c subject, n int, seed uint64) (t tally) {
		z := zipf(seed, n)
		place := rand.New(rand.NewPCG(seed, 4)).Perm(10 * n)
		scanned := 0
		for i := range visitsPerEntry * n {
			t.add(c.visit(uint64(place[z.Next()]), false), i >= visitsPerEntry*n/2)
			if every != 0 && i%every == 0 {
				c.visit(uint64(1<<30+scanned), true)
				scanned = (scanned + 1) % (2 * n)
			}
		}
		return t
	}
}

// takeover fills the cache with one working set of four fifths of it, changes to another, and returns how many visits missed until
// the end, over the size of the set: 1 means that each page was read once.
func takeover(c subject, n int, seed uint64) float64 {
	random, set, missed := rand.New(rand.NewPCG(seed, 2)), n*8/10, 0
	for range 20 * n {
		c.visit(random.Uint64N(uint64(set)), false)
	}
	for range 20 * n {
		if !c.visit(1<<30+random.Uint64N(uint64(set)), false) {
			missed++
		}
	}
	return float64(missed) / float64(set)
}
