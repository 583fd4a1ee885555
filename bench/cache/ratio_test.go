package cache

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/maypok86/otter/v2"

	"epochkv/internal/cache"
	"epochkv/internal/pin"
)

// entries is the size of every cache; EPOCHKV_CACHE_ENTRIES overrides it.
func entries() int {
	if n, err := strconv.Atoi(os.Getenv("EPOCHKV_CACHE_ENTRIES")); err == nil {
		return n
	}
	return 4_000
}

// subject is a cache under comparison.
type subject interface {
	// visit asks for a page and reports whether it was there. A scan's visit says so.
	visit(id uint64, scan bool) (hit bool)
	close()
}

// ours is a page cache with pages of one word: only which are kept matters here.
type ours struct {
	*cache.Cache
	slot     *pin.Slot
	missed   bool
	scanHint cache.Hint
}

func newOurs(tb testing.TB, entries int, policy cache.Policy, scanHint cache.Hint) *ours {
	tb.Helper()
	visible := new(atomic.Uint64)
	visible.Store(1)
	registry := pin.NewRegistry(visible)
	o := &ours{slot: registry.Slot(), scanHint: scanHint}
	c, err := cache.New(cache.Config{
		Bytes: int64(entries) * 8, PageSize: 8, Registry: registry, Policy: policy,
		Load:      func(cache.ID, []byte) error { o.missed = true; return nil },
		LoadBatch: func([]cache.Read) {},
	})
	if err != nil {
		tb.Fatal(err)
	}
	o.Cache = c
	return o
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

func (o *ours) close() { _ = o.Close() }

type peer struct{ *otter.Cache[uint64, uint64] }

// newPeer makes otter do its upkeep within each call, so that a run can be repeated.
func newPeer(entries int) peer {
	return peer{otter.Must(&otter.Options[uint64, uint64]{MaximumSize: entries, Executor: func(f func()) { f() }})}
}

func (p peer) visit(id uint64, _ bool) bool {
	if _, ok := p.GetIfPresent(id); ok {
		return true
	}
	p.Set(id, id)
	return false
}

func (p peer) close() {}

// trace feeds visits to a cache of n entries, and returns the share of hits in percent. Scans are not counted.
type trace struct {
	name string
	run  func(c subject, n int) float64
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

func (t *tally) percent() float64 { return 100 * float64(t.hits) / float64(t.visits) }

var traces = []trace{
	{"zipf", func(c subject, n int) float64 { return zipfBeside(c, n, 0) }},
	{"zipf beside a scan, 1:1", func(c subject, n int) float64 { return zipfBeside(c, n, 1) }},
	{"zipf beside a scan, 4:1", func(c subject, n int) float64 { return zipfBeside(c, n, 4) }},
	{"loop over 1.1 times the cache", loop},
	{"working set changes, zipf", func(c subject, n int) float64 {
		z := newZipf(rand.New(rand.NewPCG(1, 2)), 10*n)
		var t tally
		for i := range visitsPerEntry * n {
			t.add(c.visit(uint64(i/(20*n)*10*n)+z.next(), false), true)
		}
		return t.percent()
	}},
	{"working set changes, uniform", func(c subject, n int) float64 {
		random := rand.New(rand.NewPCG(1, 2))
		var t tally
		for i := range visitsPerEntry * n {
			t.add(c.visit(uint64(i/(20*n)*10*n)+random.Uint64N(uint64(n*8/10)), false), true)
		}
		return t.percent()
	}},
	{"zipf, then uniform over 5 times the cache", func(c subject, n int) float64 {
		random := rand.New(rand.NewPCG(1, 2))
		z := newZipf(random, 10*n)
		var t tally
		for range visitsPerEntry * n / 2 {
			c.visit(z.next(), false)
		}
		for i := range visitsPerEntry * n {
			t.add(c.visit(1<<30+random.Uint64N(uint64(n*5)), false), i > visitsPerEntry*n/2)
		}
		return t.percent()
	}},
}

// loop visits the same pages in order, over and over.
func loop(c subject, n int) float64 {
	var t tally
	for i := range visitsPerEntry * n {
		t.add(c.visit(uint64(i%(n*11/10)), false), i >= visitsPerEntry*n/2)
	}
	return t.percent()
}

// zipfBeside visits ten times as many pages as fit, after each so many of them one of a scan of twice the cache that repeats for ever.
func zipfBeside(c subject, n, every int) float64 {
	z := newZipf(rand.New(rand.NewPCG(1, 2)), 10*n)
	place := rand.New(rand.NewPCG(3, 4)).Perm(10 * n)
	var t tally
	scanned := 0
	for i := range visitsPerEntry * n {
		t.add(c.visit(uint64(place[z.next()]), false), i >= visitsPerEntry*n/2)
		if every != 0 && i%every == 0 {
			c.visit(uint64(1<<30+scanned), true)
			scanned = (scanned + 1) % (2 * n)
		}
	}
	return t.percent()
}

// zipf draws numbers in [0, n) with YCSB's skew of 0.99, by the method of Gray et al.
type zipf struct {
	random              *rand.Rand
	n, alpha, zeta, eta float64
}

func newZipf(random *rand.Rand, n int) *zipf {
	const skew = 0.99
	zeta := 0.0
	for i := 1; i <= n; i++ {
		zeta += 1 / math.Pow(float64(i), skew)
	}
	two := 1 + 1/math.Pow(2, skew)
	return &zipf{random: random, n: float64(n), alpha: 1 / (1 - skew), zeta: zeta, eta: (1 - math.Pow(2/float64(n), 1-skew)) / (1 - two/zeta)}
}

func (z *zipf) next() uint64 {
	u := z.random.Float64()
	switch uz := u * z.zeta; {
	case uz < 1:
		return 0
	case uz < 1+math.Pow(0.5, 0.99):
		return 1
	}
	return uint64(min(int(z.n*math.Pow(z.eta*u-z.eta+1, z.alpha)), int(z.n)-1))
}

// behind is how far ours may lie below otter in one run: otter itself varies by this much from run to run.
const behind = 0.5

// TestHitRatiosReachThoseOfOtter prints the share of hits at equal entries. The scan beside the Zipf mix comes once with the hint that the engine
// gives a scan, and once with none, as otter knows none.
func TestHitRatiosReachThoseOfOtter(t *testing.T) {
	n := entries()
	arms := []struct {
		name string
		make func() subject
	}{
		{"otter", func() subject { return newPeer(n) }},
		{"lru", func() subject { return newOurs(t, n, cache.LRU, cache.Default) }},
		{"clock", func() subject { return newOurs(t, n, cache.Clock, cache.Default) }},
		{"two bands", func() subject { return newOurs(t, n, cache.TwoBand, cache.Low) }},
		{"two bands, no hint", func() subject { return newOurs(t, n, cache.TwoBand, cache.Default) }},
	}
	for _, tr := range traces {
		line, got := fmt.Sprintf("%-42s", tr.name), map[string]float64{}
		for _, arm := range arms {
			c := arm.make()
			got[arm.name] = tr.run(c, n)
			c.close()
			line += fmt.Sprintf("  %s %.1f", arm.name, got[arm.name])
		}
		t.Log(line)
		if got["two bands"] < got["otter"]-behind {
			t.Errorf("%s: %.2f %% hits, otter %.2f %%", tr.name, got["two bands"], got["otter"])
		}
	}
}
