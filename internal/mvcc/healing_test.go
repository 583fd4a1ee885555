package mvcc

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

var healingSeeds = flag.Int("healing.seeds", 4, "stores of TestWhatOnlySomeStartsCanRead")

// healing is a store over many runs, between which pages are damaged, and others are as they were again. The model knows the state after each
// commit.
type healing struct {
	*testing.T
	rng     *rand.Rand
	fs      *vfs.Mem
	o       Options
	s       *Store
	x       *Session
	epochs  []keys.Epoch // of all commits
	states  map[keys.Epoch]map[string]string
	now     map[string]string
	applied []Request
	holds   []uint64
	most    int // pages that are damaged at a time
	hurt    []hurtPage
	did     []string
}

// hurtPage is a page that was damaged.
type hurtPage struct {
	at          int64
	was, become []byte
}

// TestWhatOnlySomeStartsCanRead: a page that a start cannot read may be read by a later one, for instance because an inner node was rebuilt.
// Whatever the starts in between have not seen, no wrong state of any time is read, and no request is executed twice. While one page is damaged
// at a time, each start succeeds.
func TestWhatOnlySomeStartsCanRead(t *testing.T) {
	base := testseed.Base(t)
	for i := range uint64(*healingSeeds) {
		t.Run(fmt.Sprint("seed=", base+i), func(t *testing.T) {
			h := &healing{T: t, most: 1 + 4*int(i%2), rng: rand.New(rand.NewPCG(base+i, 62)), fs: vfs.NewMem(), now: map[string]string{}}
			h.states = map[keys.Epoch]map[string]string{0: {}}
			t.Cleanup(func() {
				if t.Failed() {
					for _, line := range h.did {
						t.Log(line)
					}
				}
			})
			for range 8 {
				h.run()
			}
		})
	}
}

func (h *healing) tracef(format string, args ...any) {
	h.did = append(h.did, fmt.Sprintf(format, args...))
}

func (h *healing) check(err error) {
	h.Helper()
	if err != nil && !errors.Is(err, ErrDamaged) {
		h.Fatal(err)
	}
}

// run is a run of the server, before which some pages are healed, and others damaged.
func (h *healing) run() {
	if len(h.epochs) > 0 {
		h.heal()
		for range h.rng.IntN(6) {
			if len(h.hurt) < h.most {
				h.damage()
			}
		}
	}
	h.o = tiny(h.fs)
	h.o.Storage.PageSize = 512
	h.o.Retention = []time.Duration{0, time.Hour}[h.rng.IntN(2)]
	var err error
	for h.s, err = Open(h.o); err != nil; h.s, err = Open(h.o) {
		if !errors.Is(err, ErrDamaged) || h.most == 1 {
			h.Fatalf("%d damaged pages: %v", len(h.hurt), err)
		}
		h.tracef("no start beside %d damaged pages: %v", len(h.hurt), err)
		h.heal()
	}
	h.tracef("opened at %d, retention %v, holds %v, low watermark %d, %d pages damaged", h.s.Visible(), h.o.Retention, h.s.Holds(), h.s.LowWatermark(), len(h.hurt))
	h.x = mustSession(h, h.s)
	h.recall()
	for range 30 {
		h.act()
	}
	h.recall()
	h.recallAt(h.s.Visible())
	h.x.Close()
	crash := h.rng.IntN(3) == 0
	if crash {
		h.fs = h.fs.Crash(h.rng.Uint64(), vfs.SurviveSome)
	}
	if err := h.s.Close(); !crash {
		h.check(err)
	}
}

// damage flips a bit of a page of the tree.
func (h *healing) damage() {
	b := dataFile(h.T, h.fs)
	var pages []int64
	for at := 0; at+512 <= len(b); at += 512 {
		is := func(p hurtPage) bool { return p.at == int64(at) }
		if p := b[at : at+512]; (page.IsTree(p, 0) || page.IsTree(p, 1)) && !slices.ContainsFunc(h.hurt, is) {
			pages = append(pages, int64(at))
		}
	}
	if len(pages) == 0 {
		return
	}
	p := hurtPage{at: pages[h.rng.IntN(len(pages))]}
	p.was = bytes.Clone(b[p.at : p.at+512])
	p.become = bytes.Clone(p.was)
	p.become[100+h.rng.IntN(412)] ^= 1 << h.rng.IntN(8)
	h.write(p.at, p.become)
	h.hurt = append(h.hurt, p)
}

// heal lets some pages be as they were, unless they have been written since.
func (h *healing) heal() {
	b := dataFile(h.T, h.fs)
	var left []hurtPage
	for _, p := range h.hurt {
		switch {
		case p.at+512 > int64(len(b)) || !bytes.Equal(b[p.at:p.at+512], p.become):
		case h.rng.IntN(2) == 0:
			h.write(p.at, p.was)
		default:
			left = append(left, p)
		}
	}
	h.hurt = left
}

func (h *healing) write(at int64, b []byte) {
	f, err := h.fs.Open("db/data.ekv", vfs.ReadWrite)
	if err != nil {
		h.Fatal(err)
	}
	if _, err := f.WriteAt(b, at); err != nil {
		h.Fatal(err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		h.Fatal(err)
	}
}

func (h *healing) act() {
	switch h.rng.IntN(10) {
	case 0:
		h.check(h.s.Checkpoint(h.Context()))
	case 1:
		hold, err := h.x.TakeHold(h.Context(), "a hold with a name that takes some room in its leaf", 0, time.Hour)
		h.check(err)
		if err == nil {
			h.holds = append(h.holds, hold.ID)
			h.tracef("hold %d at %d", hold.ID, hold.Epoch)
		}
	case 2:
		h.endHold()
	case 3:
		h.again()
	default:
		h.put()
	}
}

func (h *healing) endHold() {
	if len(h.holds) == 0 {
		return
	}
	n := h.rng.IntN(len(h.holds))
	_, err := h.x.EndHold(h.Context(), h.holds[n])
	h.tracef("end of hold %d: %v", h.holds[n], err)
	if !errors.Is(err, ErrNoHold) { // a start that could not read it has ended it
		h.check(err)
	}
	h.holds = append(h.holds[:n], h.holds[n+1:]...)
}

// put writes some keys, now and then as a request with an id.
func (h *healing) put() {
	var w Write
	next := maps.Clone(h.now)
	if h.rng.IntN(3) == 0 {
		w.Identify(newRequest())
	}
	for n := range 1 + h.rng.IntN(3) {
		key := fmt.Sprintf("key %d%03d", n, h.rng.IntN(60))
		switch h.rng.IntN(8) {
		case 0, 1:
			delete(next, key)
			w.Delete([]byte(key))
		default:
			next[key] = fmt.Sprintf("value %d", h.rng.Uint64())
			w.Set([]byte(key), []byte(next[key]))
		}
	}
	request := w.request
	e, err := commitAndWait(h.x, &w)
	if errors.As(err, new(*RequestExpiredError)) {
		return
	}
	if h.check(err); err != nil {
		return
	}
	h.now = next
	h.states[e] = next
	h.epochs = append(h.epochs, e)
	if request != nil {
		h.applied = append(h.applied, *request)
	}
}

// again repeats a request.
func (h *healing) again() {
	if len(h.applied) == 0 {
		return
	}
	r := h.applied[h.rng.IntN(len(h.applied))]
	var w Write
	w.Identify(&r)
	w.Set([]byte("again"), nil)
	if _, err := commitAndWait(h.x, &w); !errors.As(err, new(*AppliedError)) && !errors.As(err, new(*RequestExpiredError)) && !errors.Is(err, ErrDamaged) {
		h.Fatalf("the request is executed again: %v", err)
	}
}

// recall reads the past: a state is right, or gone, or damaged.
func (h *healing) recall() {
	for range min(len(h.epochs), 15) {
		h.recallAt(h.epochs[h.rng.IntN(len(h.epochs))])
	}
	for _, one := range h.s.Holds() {
		h.recallAt(one.Epoch)
	}
}

// stateOf is the state at an epoch.
func (h *healing) stateOf(at keys.Epoch) map[string]string {
	best := keys.Epoch(0)
	for e := range h.states {
		if e <= at {
			best = max(best, e)
		}
	}
	return h.states[best]
}

func (h *healing) recallAt(e keys.Epoch) {
	if e == 0 {
		return
	}
	if _, err := h.x.OpenSnapshot(e); err != nil {
		if !errors.As(err, new(*SnapshotGoneError)) {
			h.Fatal(err)
		}
		return
	}
	defer h.x.CloseSnapshot()
	all := maps.Clone(h.stateOf(e))
	for key := range h.now {
		if _, there := all[key]; !there {
			all[key] = "-"
		}
	}
	for key, want := range all {
		v, err := h.x.Read(nil, []byte(key))
		if errors.Is(err, ErrDamaged) {
			continue
		}
		got := string(v.Data)
		if !v.Found {
			got = "-"
		}
		if err != nil || got != want {
			h.Fatalf("%s at %d: %q, %v; want %q", key, e, got, err, want)
		}
	}
}
