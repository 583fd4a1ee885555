package memtable

import (
	"errors"
	"hash/maphash"
	"sync/atomic"
	"unsafe"

	"github.com/epochkv/epochkv/internal/keys"
)

// Config says how large a table should be and what its keys look like.
type Config struct {
	// Bytes is the size at which the caller rotates the table; the index and the growth steps are
	// sized for it. The table accepts entries beyond it: an oversized one, or those of writers that
	// have already begun.
	Bytes int
	// Heads computes the key heads. Nil means that the heads are the four bytes after Prefix, the
	// beginning that most keys are expected to share. Other keys are valid too, only slower.
	Heads  *Heads
	Prefix []byte
	// Expected, if set, is keys to come that no earlier table tells of.
	Expected *Expected
	// Filling, if set, gets a token whenever another step of memory is begun, and when half of
	// Bytes is used. A token that is still in the channel is enough. Its capacity is one.
	Filling chan<- struct{}
	// LongChain is the chain length at whose multiples Apply reports a key as a long chain;
	// zero reports none.
	LongChain int
	// Obtain, if set, is called before memory is taken from the system. Tests let it fail.
	Obtain func(bytes uint64) error

	layout layout // zero means the defaults; tests make everything tiny
}

// layout has the sizes that tests shrink in order to meet rare cases often.
type layout struct {
	slots        int    // slots per block
	reserveBytes uint64 // address space
	stepBytes    uint64 // growth of the mapping
	regionBytes  int    // what an inserter secures at a time
	indexBytes   int    // table size for which the index is built
}

const (
	stepBytesMin   = 64 << 10
	regionBytesMin = 8 << 10
	regionBytesMax = 128 << 10
	// regionsPerTable bounds what inserters hold unused at rotation: with 64 inserters, an eighth.
	regionsPerTable = 512
	// stripeCount spreads the counters; with more writers than that, some share cache lines.
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
	if c.Heads == nil {
		c.Heads = plainHeads(c.Prefix, c.Expected)
	}
	return c
}

// Table is one memtable. Its methods may be called from any goroutine until Free.
type Table struct {
	// Constant after New.
	start     uint64 // tail of the arena after index and first tower
	heads     *Heads
	expected  *Expected
	seed      maphash.Seed
	first     uint32 // the tower whose anchor is below every key
	slots     int
	region    uint64 // words
	longChain uint32
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

// stripe counts keys (high half) and versions (low half) for some of the inserters. Only the sum
// over all stripes has a meaning: a prune may subtract from one stripe what an insert added to
// another.
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

// Reset makes an empty table in the memory of t, which must not be used after that. So a rotation
// maps nothing and the kernel has to clear nothing. What t mapped beyond its intended size, for an
// oversized entry, is given back to the system. Inserts do not become faster: pages that the kernel
// has just cleared are in the processor's cache, and one inserter took 0.60 us of user time per
// entry in reused memory against 0.50 us in new (3 M entries, busy machine).
func (t *Table) Reset(c Config) (*Table, error) {
	c = c.withDefaults()
	if c.layout.reserveBytes != t.layout.reserveBytes {
		return nil, errors.Join(errors.New("memtable: reset with a different reservation size"), t.Free())
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

// Shrink gives what t mapped beyond its intended size back to the system. Nothing reads t or writes to it any more: Reset or Free follows.
func (t *Table) Shrink() error { return t.arena.shrink(t.layout.stepBytes, t.half*2*wordBytes) }

func newTable(c Config) *Table {
	return &Table{
		heads:     c.Heads,
		expected:  c.Expected,
		seed:      maphash.MakeSeed(),
		slots:     c.layout.slots,
		region:    uint64(c.layout.regionBytes) / wordBytes,
		longChain: uint32(c.LongChain),
		layout:    c.layout,
		half:      uint64(c.Bytes) / 2 / wordBytes,
		filling:   c.Filling,
	}
}

// Prefault maps the memory that the table is expected to need, so that no Secure has to. The kernel
// takes a millisecond to clear two megabytes, and several times that in a virtual machine whose
// host has to find the pages first.
func (t *Table) Prefault() error {
	for {
		if more, err := t.prefaultTo(t.half * 2); !more || err != nil {
			return err
		}
	}
}

// prefaultSteps is how many steps of memory PrefaultAhead keeps ready: what the fastest writers use
// while the slowest host provides one step.
const prefaultSteps = 4

// PrefaultAhead maps a step of the memory that writers will need next, and reports whether there
// may be more to map. Writers may fill the table meanwhile.
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

// Resident is the memory that the table occupies, in bytes: what entries use, and what is mapped in
// advance.
func (t *Table) Resident() int { return int(t.arena.mapped.Load() * wordBytes) }

// HalfFull reports whether half of the table's intended size is used.
func (t *Table) HalfFull() bool { return t.arena.tail.Load() >= t.half }

// layOut allocates the index, the first tower with its empty block, and the free lists.
func (t *Table) layOut() error {
	buckets, all := indexBuckets(t.layout.indexBytes)
	words := all * bucketSlots
	at, err := t.arena.grant(words, 0)
	if err != nil {
		return err
	}
	clear(unsafe.Slice(raw64(t.arena.base, at), words)) // the memory of a reset table is dirty
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

// Free gives the memory back to the system. No goroutine may still read the table or use anything
// that aliases it.
func (t *Table) Free() error {
	t.arena.base = nil // a use after free then faults at once
	return t.arena.mem.release()
}

// Bytes is the memory that the table has used: index, entries, and what inserters have secured but
// not used yet.
func (t *Table) Bytes() int { return t.arena.bytes() }

// Empty reports whether nothing is inserted and no insert has begun: no Secure has taken memory
// yet. A reader whose snapshot was taken before misses nothing if it skips an empty table.
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
		return t.search(key, t.heads.of(key))
	}
	return n
}

// Find returns the newest version of key that is <= at. The caller's snapshot must keep that
// version from being pruned.
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

// Older is the version before r in the chain of its key, as far as it was not pruned.
func (t *Table) Older(r Ref) Ref {
	older := versionOlder(r.at, 0).Load()
	if older == 0 {
		return Ref{}
	}
	return refAt(t.arena.base, older)
}

// FindWindow is how many keys FindAll looks up together.
const FindWindow = 32

// FindAll is Find for up to FindWindow keys; it skips keys whose ref is already found. The cache
// lines that the keys need are loaded for all of them before any is waited for, so the misses of
// the look-ups overlap.
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
			node = t.search(key, t.heads.of(key))
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

// Newest returns the newest version of key, whatever its epoch. A conflict check reads it under the
// key's latch.
func (t *Table) Newest(key []byte) (Version, bool) { return t.Get(key, keys.MaxEpoch) }
