package memtable

import (
	"errors"
	"fmt"
	"math"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

const (
	// entryOverheadBytes is what an operation takes in addition to its key and value: both headers
	// and their rounding. A version with a skip link has no node of its own to make.
	entryOverheadBytes = nodeKeyOffset + versionHeaderBytes + 2*wordBytes
	// splitBytesMax is what one split takes: two blocks with their alignment, and a tower of full
	// height.
	splitBytesMax = 2*(slotsMax+1)*wordBytes + blockAlign*wordBytes + towerMaxWord*wordBytes
	// insertsPerSplit: a block cut in the middle takes at least this many inserts until it is full
	// again. One cut at the end of a run may take a single one, but is cut in the middle then.
	// Splits that a commit does for other writers may exceed this budget; they use the arena's
	// margin.
	insertsPerSplit = slotsMax / 2
)

// MaxSize bounds the bytes that applying body may take.
func MaxSize(body *batch.Body) int { return MaxSizeOf(body.Count(), body.Size()) }

// MaxSizeOf is MaxSize of a body of so many operations, and so many bytes.
func MaxSizeOf(ops, size int) int {
	return ops*entryOverheadBytes + size + size/classesPerDoubling + min(ops, 2+ops/insertsPerSplit)*splitBytesMax
}

// Inserter is one writer's state for a table: the memory that it has secured and the position of
// its latest insert. The zero value is ready. An Inserter may be used for one table after the
// other, but only by one goroutine at a time.
type Inserter struct {
	// Ordered says that versions of one key come in the order of their epochs, as they do under its
	// latch. Install then does not read the newest version, which is in a cache line of another
	// writer.
	Ordered bool

	table    *Table
	pos, end uint32 // secured words, not used yet
	stripe   *stripe
	rnd      uint64

	splice    splice // of the latest insert, without those of records
	record    splice // of the latest record: what comes before the other operations of a small body
	overwrote bool   // the latest lone operation found its key in the table

	starved error // why the latest Apply found no memory; see ErrStarved

	pooled      uint32 // free versions of pooledClass, linked; zero without any
	pooledClass int

	longChains     [longChainsMax]Chain
	longChainCount int
}

// longChainsMax bounds what one Apply reports; the next multiple of a chain's length reports it again.
const longChainsMax = 16

// Chain names one key's version chain in its table, for Prune.
type Chain struct{ node uint32 }

// LongChains returns the chains whose length became a multiple of Config.LongChain in the last Apply.
// The slice is valid until the next one.
func (in *Inserter) LongChains() []Chain { return in.longChains[:in.longChainCount] }

// Secure makes sure that an Apply of up to n bytes (see MaxSize) finds its memory mapped and
// touched, and binds in to t. It is called before the log reservation: it may take a lock and cause
// page faults. It maps some memory beyond n, for splits that the inserts of other writers cause.
// ErrFull means that t is full; other errors mean that the system has no memory. After an error
// nothing has changed.
func (t *Table) Secure(in *Inserter, n int) error { return t.SecureBelow(in, n, math.MaxInt) }

// SecureBelow is Secure as long as no more than most bytes of t are used, and ErrFull then. Many writers that find t nearly
// empty at once do not all make it larger.
func (t *Table) SecureBelow(in *Inserter, n, most int) error {
	if t.guide.towers.Load() >= t.guide.next.Load() {
		t.buildGuide()
	}
	words := uint64(n+wordBytes-1) / wordBytes
	if in.table == t && uint64(in.end-in.pos) >= words {
		return t.arena.mapAhead()
	}
	grab := max(words, t.region)
	at, err := t.grantBelow(grab, most)
	if errors.Is(err, ErrFull) && grab > words {
		grab = words
		at, err = t.grantBelow(grab, most)
	}
	if err != nil {
		return err
	}
	if t.filling != nil && t.tells(uint64(at), uint64(at)+grab) {
		select {
		case t.filling <- struct{}{}:
		default:
		}
	}
	if in.table != t {
		t.bind(in)
	}
	if in.end == at { // adjacent to the last region: nothing is left over
		in.end += uint32(grab)
		return nil
	}
	in.pos, in.end = at, at+uint32(grab)
	return nil
}

// grantBelow allocates words that begin in the first most bytes.
func (t *Table) grantBelow(words uint64, most int) (uint32, error) {
	keepBack := uint64(marginBytes / wordBytes)
	if end := uint64(most)/wordBytes + words; end < t.arena.limit {
		keepBack = max(keepBack, t.arena.limit-end)
	}
	return t.arena.grant(words, keepBack)
}

// tells reports whether words [from, to) begin another step, or the second half.
func (t *Table) tells(from, to uint64) bool {
	return from/t.arena.step != to/t.arena.step || from < t.half && to >= t.half
}

// bind resets in for use with t.
func (t *Table) bind(in *Inserter) {
	n := t.nextTab.Add(1)
	in.table = t
	in.pos, in.end = 0, 0
	in.stripe = &t.stripes[n%stripeCount]
	in.rnd = uint64(n)*0x9e3779b97f4a7c15 | 1
	in.splice, in.record = splice{}, splice{follows: true}
	in.pooled = 0
	in.longChainCount = 0
}

// givenBackMin is the least that GiveBack gives back.
const givenBackMin = 1 << 20

// GiveBack gives memory back to the system that was secured for a large body and is not used: the splits of a body in a table of its own take less than
// MaxSize has for them, which was 17 of 73 MiB for 400,000 short operations. The table counts it nevertheless. If it fails, the memory stays until
// the table is merged.
func (in *Inserter) GiveBack() {
	if left := uint64(in.end - in.pos); left < givenBackMin/wordBytes || left < 2*in.table.region {
		return
	}
	_ = in.table.arena.mem.drop(uint64(in.pos)*wordBytes, uint64(in.end)*wordBytes)
	in.pos = in.end
}

// alloc allocates words, aligned to align words. It returns zero if there is no memory, and sets
// starved to the reason. Beyond what was secured it uses the arena's margin.
func (in *Inserter) alloc(words, align uint32) uint32 {
	at := (in.pos + align - 1) &^ (align - 1)
	if uint64(at)+uint64(words) <= uint64(in.end) {
		in.pos = at + words
		return at
	}
	return in.allocMargin(words, align)
}

// allocMargin serves splits that the inserts of other writers caused. They are rare, and the memory
// is nearly always touched already.
func (in *Inserter) allocMargin(words, align uint32) uint32 {
	at, err := in.table.arena.grant(uint64(words+align-1), 0)
	if err != nil {
		in.starved = err
		return 0
	}
	return (at + align - 1) &^ (align - 1)
}

// Apply inserts every operation of body, which is sorted by key, at epoch. It takes no lock,
// allocates nothing, and makes no system call, provided that Secure was called with MaxSize(body)
// before. An error means a malformed body, or ErrStarved. The operations before it are in the table
// then. So bodies from a file are validated first, and after ErrStarved no reader may reach the
// epoch.
func (t *Table) Apply(in *Inserter, body *batch.Body, epoch keys.Epoch, sync bool) error {
	in.longChainCount, in.splice.ascending, in.record.ascending, in.starved = 0, false, false, nil
	var r batch.Reader
	if err := r.ReadBody(body); err != nil {
		return err
	}
	var fresh, ops uint64
	if r.Count() < windowMin {
		fresh, ops = t.applySingles(in, &r, epoch, sync)
	} else {
		fresh, ops = t.applyWindows(in, &r, epoch, sync)
	}
	if in.starved != nil {
		return fmt.Errorf("%w: %w", ErrStarved, in.starved)
	}
	in.stripe.packed.Add(fresh<<32 + ops)
	return r.Err()
}

// applySingles installs the operations one by one. It returns how many keys were new and how many
// operations were installed.
func (t *Table) applySingles(in *Inserter, r *batch.Reader, epoch keys.Epoch, sync bool) (fresh, ops uint64) {
	for r.Next() {
		hash := t.hash(r.Key)
		node, _ := t.index.find(t.arena.base, hash, r.Key)
		in.overwrote = node != 0
		if t.applyFound(in, in.spliceOf(int(ops), r.Count()), &r.Op, epoch, sync, node, hash, 0) {
			fresh++
		}
		if in.starved != nil {
			break
		}
		ops++
	}
	return fresh, ops
}

// applyFound installs one version of a key, of which the index has the given node, or zero, and reports
// whether the key is new. near is a tower as in window, or zero. If in is starved afterwards, nothing was
// installed.
func (t *Table) applyFound(in *Inserter, s *splice, op *batch.Op, epoch keys.Epoch, sync bool, node uint32, hash uint64, near uint32) bool {
	if node != 0 {
		t.add(in, node, op, epoch, sync)
		return false
	}
	node, fresh := t.insertNode(in, s, op, epoch, sync, near)
	if node == 0 {
		return false
	}
	if !fresh {
		t.add(in, node, op, epoch, sync)
	}
	t.index.put(hash, node) // also for a racer's node, which the racer may not have published yet
	return fresh
}

// add installs a version of a key that has a node.
func (t *Table) add(in *Inserter, node uint32, op *batch.Op, epoch keys.Epoch, sync bool) {
	length := headIn(word64(t.arena.base, node).Load()) + 1
	if v := t.newVersion(in, op, epoch, flagsOf(sync, length)); v != 0 {
		t.install(in, node, v)
	}
}

// insertNode puts the key of op into the blocks with its first version, and reports whether it was new. If it
// was not, nothing is installed, and the node is the existing one, or zero if in is starved. The
// search begins at the tower near, or finds its own way if near is zero. A split needs the splice and
// makes the search find its own way, too.
func (t *Table) insertNode(in *Inserter, s *splice, op *batch.Op, epoch keys.Epoch, sync bool, near uint32) (node uint32, fresh bool) {
	key := op.Key
	base, head := t.arena.base, t.heads.of(key)
	x := near
	if x == 0 {
		x = t.approach(s, key, head)
		s.ascending = true
	}
	made := uint32(0)
	for {
		tower, block, link := advanceRight(base, x, key, head, upTo)
		if near == 0 {
			if tower != x {
				s.moved = true
			}
			s.highHead = headIn(link)
		}
		x = tower
		for i := range t.slots {
			slot := word64(base, block+1+uint32(i))
			w := slot.Load()
			if w == 0 {
				if made == 0 {
					if made = t.newNode(in, op, epoch, sync); made == 0 {
						return 0, false
					}
				}
				if slot.CompareAndSwap(0, pack(head, made)) {
					s.save()
					return made, true
				}
				w = slot.Load()
			}
			if headIn(w) == head && nodeHasKey(base, offsetIn(w), key) {
				if made != 0 {
					t.unmakeNode(in, made, len(key), op.StoredBytes())
				}
				s.save()
				return offsetIn(w), false
			}
		}
		if near != 0 {
			near = 0
			x = t.approach(s, key, head)
			s.ascending = true
			continue
		}
		if t.split(in, s, x, block); in.starved != nil {
			return 0, false
		}
	}
}

// newNode writes a node with its first version after it, or returns zero.
func (t *Table) newNode(in *Inserter, op *batch.Op, epoch keys.Epoch, sync bool) uint32 {
	n := nodeWords(len(op.Key))
	_, words := classOf(uint32(op.StoredBytes()))
	at := in.alloc(n+words, 1)
	if at == 0 {
		return 0
	}
	writeNode(t.arena.base, at, op.Key, at+n)
	writeVersion(t.arena.base, at+n, keys.MakeTrailer(epoch, op.Kind), flagsOf(sync, 1), op.Value, op.Rest)
	return at
}

// unmakeNode takes back the memory of a node whose slot another node has taken, if nothing was
// allocated since.
func (t *Table) unmakeNode(in *Inserter, node uint32, keyBytes, valueBytes int) {
	_, words := classOf(uint32(valueBytes))
	if node+nodeWords(keyBytes)+words == in.pos {
		in.pos = node
	}
}
