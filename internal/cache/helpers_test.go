package cache

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/pin"
)

const testPageSize = 512

// disk is a data file in memory: page id at version v is a pattern of both, so that every byte
// shows where it comes from.
type disk struct {
	loads    atomic.Int64 // pages read
	batches  atomic.Int64
	versions sync.Map // ID -> uint64; absent: 0
	fail     func(id ID) error
	gate     func(id ID) // called before a page is read
}

var errDisk = errors.New("the disk is on fire")

func (d *disk) version(id ID) uint64 {
	if v, ok := d.versions.Load(id); ok {
		return v.(uint64)
	}
	return 0
}

func fill(buf []byte, id ID, version uint64) {
	for at := 0; at < len(buf); at += 16 {
		binary.LittleEndian.PutUint64(buf[at:], uint64(id))
		binary.LittleEndian.PutUint64(buf[at+8:], version)
	}
}

// pageError says what is wrong with bytes that should be page id, in one version throughout.
func pageError(buf []byte, id ID) error {
	version := binary.LittleEndian.Uint64(buf[8:])
	for at := 0; at < len(buf); at += 16 {
		got, v := ID(binary.LittleEndian.Uint64(buf[at:])), binary.LittleEndian.Uint64(buf[at+8:])
		if got != id || v != version {
			return fmt.Errorf("page %d has bytes of page %d version %d at %d, and of version %d at 0", id, got, v, at, version)
		}
	}
	return nil
}

func (d *disk) load(id ID, buf []byte) error {
	if d.gate != nil {
		d.gate(id)
	}
	d.loads.Add(1)
	if d.fail != nil {
		if err := d.fail(id); err != nil {
			buf[0] = 0xff // a page that was read in part
			return err
		}
	}
	fill(buf, id, d.version(id))
	return nil
}

func (d *disk) loadBatch(reads []Read) {
	d.batches.Add(1)
	for i := range reads {
		reads[i].Err = d.load(reads[i].ID, reads[i].Buf)
	}
}

// rig is a cache with one reader.
type rig struct {
	*Cache
	disk     *disk
	registry *pin.Registry
	slot     *pin.Slot
	visitor  Visitor
}

func newRig(t testing.TB, frames int) *rig {
	t.Helper()
	r := &rig{disk: new(disk), registry: newRegistry()}
	r.slot = r.registry.Slot()
	c, err := New(Config{
		Bytes: int64(frames) * testPageSize, PageSize: testPageSize, Registry: r.registry,
		Read: r.disk.load, ReadBatch: r.disk.loadBatch,
	})
	if err != nil {
		t.Fatal(err)
	}
	r.Cache = c
	t.Cleanup(func() {
		r.slot.Free()
		if err := c.check(); err != nil {
			t.Error(err)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func newRegistry() *pin.Registry {
	visible := new(atomic.Uint64)
	visible.Store(1)
	return pin.NewRegistry(visible)
}

// get is one operation that visits one page.
func (r *rig) get(t testing.TB, id ID, h Hint) {
	t.Helper()
	r.slot.Enter()
	defer r.slot.Leave()
	p, err := r.Visit(id, h, &r.visitor)
	if err != nil {
		t.Fatal(err)
	}
	if err := pageError(p, id); err != nil {
		t.Fatal(err)
	}
}

// has checks as a reader whether a page is cached.
func (r *rig) has(id ID) bool {
	r.slot.Enter()
	defer r.slot.Leave()
	return r.Contains(id)
}

func visit(c *Cache, s *pin.Slot, id ID, h Hint) error {
	s.Enter()
	defer s.Leave()
	p, err := c.Page(id, h)
	if err != nil {
		return err
	}
	return pageError(p, id)
}

// seeded returns a random source and logs its seed.
func seeded(t testing.TB) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// check verifies the invariants of the package comment. No other goroutine may use the cache.
func (c *Cache) check() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	lists := map[uint32]state{}
	note := func(f uint32, s state) error {
		if old, ok := lists[f]; ok || c.states[f] != s {
			return fmt.Errorf("frame %d is listed as %d and %d, and marked %d", f, old, s, c.states[f])
		}
		lists[f] = s
		return nil
	}
	var errs []error
	for _, f := range c.free {
		errs = append(errs, note(f, stateFree))
	}
	for _, r := range c.retired {
		errs = append(errs, note(r.frame, stateRetired))
	}
	for _, fl := range c.flights {
		if fl.frame != noFrame {
			errs = append(errs, note(fl.frame, stateReading))
		}
	}
	resident, named := uint64(0), uint64(0)
	t := c.table.Load()
	for i := range t.mask + 1 {
		e := t.slot(i).Load()
		if e == 0 {
			continue
		}
		named++
		f := uint32(e & frameMask)
		errs = append(errs, note(f, stateResident))
		if c.ids[f] != ID(e>>frameBits) {
			errs = append(errs, fmt.Errorf("frame %d holds page %d, and the table says %d", f, c.ids[f], e>>frameBits))
		}
		if got, ok := t.lookup(c.ids[f]); !ok || got != f {
			errs = append(errs, fmt.Errorf("page %d is in the table and not found", c.ids[f]))
		}
	}
	hot := int64(0)
	for f, s := range c.states {
		w := wordAt(c.words, uint32(f)).Load()
		if (s == stateResident) != (w != absent) {
			errs = append(errs, fmt.Errorf("frame %d in state %d has usage count %#x", f, s, w))
		}
		if s == stateResident {
			resident++
			if w >= hotUsage {
				hot++
			}
		}
		if _, ok := lists[uint32(f)]; !ok && s != stateAbsent {
			errs = append(errs, fmt.Errorf("frame %d is marked %d and in no list", f, s))
		}
		if s != stateRetired && s != stateAbsent && uint32(f) >= c.count {
			errs = append(errs, fmt.Errorf("frame %d in state %d is above the cache's size", f, s))
		}
	}
	if resident != named || resident != c.resident {
		errs = append(errs, fmt.Errorf("%d frames are resident, %d named, %d counted", resident, named, c.resident))
	}
	if c.clock.hot.Load() != hot {
		errs = append(errs, fmt.Errorf("%d frames are hot, and %d are counted", hot, c.clock.hot.Load()))
	}
	return errors.Join(errs...)
}
