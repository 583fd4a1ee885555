package memtable

import (
	"errors"
	"hash/maphash"
	"sync/atomic"
	"unsafe"

	"github.com/epochkv/epochkv/internal/keys"
)

// Config says how large a table is meant to be and what its keys look like.
type Config struct {
	// Bytes is the size at which the caller rotates the table; index and growth are laid out for it. The table goes on
	// taking entries beyond it, an oversized one or those of writers already under way.
	Bytes int
	// Prefix is what most keys are expected to start with. It is not stored with the key heads, which then tell more keys
	// apart. Keys without it are just as welcome, only slower.
	Prefix []byte
	// Filling, if set, gets a token whenever another step of memory is begun, and when half of Bytes is taken; one that is still there will do.
	// Its capacity is one.
	Filling chan<- struct{}
	// CrowdedAt is the chain length at whose multiples Apply reports a key to Inserter.Crowded; zero reports none.
	CrowdedAt int
	// Obtain, if set, is asked before memory is taken from the system. Tests refuse it.
	Obtain func(bytes uint64) error

	layout layout // zero means the defaults; tests make everything tiny
}

// layout is what tests shrink in order to meet rare cases often.
type layout struct {
	slots        int    // slots per block
	reserveBytes uint64 // address space
	stepBytes    uint64 // growth of the mapping
	regionBytes  int    // what an inserter secures at a time
	indexBytes   int    // table size that the index is laid out for
}

const (
	stepBytesMin   = 64 << 10
	regionBytesMin = 8 << 10
	regionBytesMax = 128 << 10
	// regionsPerTable bounds what inserters hold unused at rotation: with 64 of them, an eighth.
	regionsPerTable = 512
	// stripeCount spreads the counters; more writers than that share lines.
	stripeCount = 32
)

func (c Config) withDefaults() Config {
	l := &c.layout
	if l.slots == 0 {
		l.slots = slotsMax
	}
	if l.reserveBytes == 0 {
		l.reserveBytes = reservationBytesMax
	}
	if l.stepBytes == 0 {
		l.stepBytes = hugePageBytes
		for l.stepBytes > stepBytesMin && l.stepBytes*16 > uint64(c.Bytes) {
			l.stepBytes /= 2
		}
	}
	if l.regionBytes == 0 {
		l.regionBytes = min(max(c.Bytes/regionsPerTable, regionBytesMin), regionBytesMax)
	}
	if l.indexBytes == 0 {
		l.indexBytes = c.Bytes
	}
	return c
}

// Table is one memtable. Its methods may be called from any goroutine until Free.
type Table struct {
	// Constant after New.
	start     uint64 // tail of the arena behind index and first tower
	prefix    []byte
	seed      maphash.Seed
	first     uint32 // the tower whose anchor is below every key
	slots     int
	region    uint64 // words
	crowdedAt uint32
	index     index
	layout    layout
	half      uint64 // words
	filling   chan<- struct{}

	height atomic.Int32 // levels in use; grows rarely
	guide  guide

	arena   arena
	free    freeLists
	nextTab atomic.Uint32 // next stripe to give to an inserter
	stripes [stripeCount]stripe
}

// stripe counts keys (high half) and versions (low half) for some of the inserters. Only the sum over all stripes means
// anything: a prune may subtract from one what an insert added to another.
type stripe struct {
	packed atomic.Uint64
	_      [cacheLinePair - 8]byte
}

// New makes an empty table. Free must be called once no reader is left.
func New(c Config) (*Table, error) {
	t := newTable(c.withDefaults())
	t.arena.obtain = c.Obtain
	if err := t.arena.open(t.layout.reserveBytes, t.layout.stepBytes); err != nil {
		return nil, err
	}
	if err := t.layOut(); err != nil {
		return nil, errors.Join(err, t.Free())
	}
	return t, nil
}

// Renew makes an empty table in the memory of t, which from then on nobody may use: a rotation then maps nothing and asks
// the kernel to clear nothing. What t mapped beyond the size it was meant to have, for an oversized entry, is given back.
// It does not make inserts faster: pages that the kernel has just cleared are warm in the cache, and one inserter took
// 0.60 us of user time per entry in renewed memory against 0.50 us in new (3 M entries, busy machine).
func (t *Table) Reset(c Config) (*Table, error) {
	c = c.withDefaults()
	if c.layout.reserveBytes != t.layout.reserveBytes {
		return nil, errors.Join(errors.New("memtable: renew with another reservation"), t.Free())
	}
	n := newTable(c)
	n.arena.obtain = c.Obtain
	if err := n.arena.takeOver(&t.arena, t.layout.stepBytes, uint64(c.Bytes)); err != nil {
		return nil, errors.Join(err, t.Free())
	}
	if err := n.layOut(); err != nil {
		return nil, errors.Join(err, n.Free())
	}
	return n, nil
}

func newTable(c Config) *Table {
	return &Table{
		prefix:    append([]byte(nil), c.Prefix...),
		seed:      maphash.MakeSeed(),
		slots:     c.layout.slots,
		region:    uint64(c.layout.regionBytes) / wordBytes,
		crowdedAt: uint32(c.CrowdedAt),
		layout:    c.layout,
		half:      uint64(c.Bytes) / 2 / wordBytes,
		filling:   c.Filling,
	}
}

// Touch takes the memory that the table is meant to need, so that no Secure has to. Pages that the kernel has to clear take a millisecond
// for two megabytes, and several times that in a virtual machine whose host has to find them first.
func (t *Table) Prefault() error {
	for {
		if more, err := t.prefaultTo(t.half * 2); !more || err != nil {
			return err
		}
	}
}

// aheadSteps is how many steps of memory TouchAhead keeps ready: what the fastest writers take while the slowest host finds a step.
const prefaultSteps = 4

// TouchAhead takes a step of the memory that writers will need next, and reports whether there may be more to take. They may fill the table meanwhile.
func (t *Table) PrefaultAhead() (more bool, err error) {
	return t.prefaultTo(min(t.arena.tail.Load()+prefaultSteps*t.arena.step, t.half*2))
}

func (t *Table) prefaultTo(end uint64) (more bool, err error) {
	mapped := t.arena.mapped.Load()
	if mapped >= end {
		return false, nil
	}
	return true, t.arena.grow(mapped + 1)
}

// Resident is the memory that the table has, in bytes: what entries have taken, and what was touched ahead of them.
func (t *Table) Resident() int { return int(t.arena.mapped.Load() * wordBytes) }

// HalfFull reports whether half of the memory that the table is meant to have is taken.
func (t *Table) HalfFull() bool { return t.arena.tail.Load() >= t.half }

// layOut places the index, the first tower with its empty block, and the free lists.
func (t *Table) layOut() error {
	buckets, all := indexBuckets(t.layout.indexBytes)
	words := all * bucketSlots
	at, err := t.arena.grant(words, 0)
	if err != nil {
		return err
	}
	clear(unsafe.Slice(raw64(t.arena.base, at), words)) // a renewed table's memory is dirty
	t.index = index{slots: unsafe.Pointer(raw64(t.arena.base, at)), mask: buckets - 1}

	align := -t.arena.tail.Load() & (blockAlign - 1)
	at, err = t.arena.grant(align+uint64(blockWords(t.slots))+towerMaxWord, 0)
	if err != nil {
		return err
	}
	block := at + uint32(align)
	t.first = block + blockWords(t.slots)
	writeBlock(t.arena.base, block, t.slots, nil)
	writeTower(t.arena.base, t.first, block, 0, heightMax)
	t.height.Store(1)
	t.guide.next.Store(guideTowersMin)
	t.start = t.arena.tail.Load()
	return nil
}

// Free gives the memory back. Nobody may be reading the table or holding anything that aliases it.
func (t *Table) Free() error {
	t.arena.base = nil // a use after free then faults at once
	return t.arena.mem.release()
}

// Bytes is the memory that the table has taken: index, entries, and what inserters have secured but not used yet.
func (t *Table) Bytes() int { return t.arena.bytes() }

// Empty reports whether nothing has been inserted nor is about to be: no Secure has taken memory yet. A reader whose snapshot was
// taken before misses nothing by leaving an empty table out.
func (t *Table) Empty() bool { return t.arena.tail.Load() == t.start }

// Count is the number of keys.
func (t *Table) Count() int { return int(t.counters() >> 32) }

// Versions is the number of versions of all keys.
func (t *Table) Versions() int { return int(uint32(t.counters())) }

func (t *Table) counters() (sum uint64) {
	for i := range t.stripes {
		sum += t.stripes[i].packed.Load()
	}
	return sum
}

func (t *Table) hash(key []byte) uint64 { return maphash.Bytes(t.seed, key) }

// node finds the node of key, or zero.
func (t *Table) node(key []byte) uint32 {
	n, sure := t.index.find(t.arena.base, t.hash(key), key)
	if !sure {
		return t.search(key, headOf(t.prefix, key))
	}
	return n
}

// Find returns the newest version of key that is <= at. The caller's snapshot must keep that version from being pruned.
func (t *Table) Find(key []byte, at keys.Epoch) Ref {
	n := t.node(key)
	if n == 0 {
		return Ref{}
	}
	v := newestAt(t.arena.base, n, at)
	if v == 0 {
		return Ref{}
	}
	return refAt(t.arena.base, v)
}

// FindWindow is how many keys FindAll looks up together.
const FindWindow = 32

// FindAll is Find for up to FindWindow keys, those of them whose ref is not found yet. The lines that the keys need are loaded for all of them
// before any is waited for: one look-up's misses then hide behind the others'.
func (t *Table) FindAll(window [][]byte, at keys.Epoch, refs []Ref) {
	var hashes [FindWindow]uint64
	base, end := t.arena.base, t.arena.mapped.Load()
	for i, key := range window {
		if !refs[i].Found() {
			hashes[i] = t.hash(key)
			t.index.prefetch(hashes[i])
		}
	}
	for i := range window {
		if !refs[i].Found() {
			t.index.prefetchNode(base, hashes[i], end)
		}
	}
	for i, key := range window {
		if refs[i].Found() {
			continue
		}
		node, sure := t.index.find(base, hashes[i], key)
		if !sure {
			node = t.search(key, headOf(t.prefix, key))
		}
		if node == 0 {
			continue
		}
		if v := newestAt(base, node, at); v != 0 {
			refs[i] = refAt(base, v)
		}
	}
}

// Get is Find, unpacked.
func (t *Table) Get(key []byte, at keys.Epoch) (Version, bool) {
	r := t.Find(key, at)
	if !r.Found() {
		return Version{}, false
	}
	return r.Version(), true
}

// Newest returns the newest version of key, whatever its epoch: what a conflict check reads under the key's latch.
func (t *Table) Newest(key []byte) (Version, bool) { return t.Get(key, keys.MaxEpoch) }
