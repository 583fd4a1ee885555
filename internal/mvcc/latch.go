package mvcc

import (
	"context"
	"hash/maphash"
	"math/bits"

	"github.com/epochkv/epochkv/internal/ablation"
	"github.com/epochkv/epochkv/internal/keys"
)

// stripes is the number of latches. A collision only makes one writer wait for another, for the time of an insert. But a
// batch holds its latches for the time of all its inserts: of 1024 latches two batches of 100 keys share some in nearly
// all cases, of 16,384 in less than half. The table has 640 KiB, of which a writer touches one line for each key.
const stripes = 16384

// latches is the striped table of key latches. Every writer takes the latches of its whole write
// set, in stripe order, so that no two commits deadlock, and holds them until its versions are in
// the memtable.
//
// A latch stores the newest epoch that was installed under it. A transaction whose snapshot is not
// older than this epoch has no newer version to look for. So most conflict checks read only the
// cache line of a latch that the commit holds already.
//
// Invariant: no key of a stripe has a version newer than the stripe's newest, whether a commit or a
// bulk load wrote it. Exempt are the versions that recovery found: they are older than every
// snapshot.
type latches struct {
	seed     maphash.Seed
	ablation ablation.Switches
	table    [stripes]latch
}

func newLatches(a ablation.Switches) *latches {
	return &latches{seed: maphash.MakeSeed(), ablation: a}
}

// stripe is the index of an internal key's latch.
func (l *latches) stripe(key []byte) int {
	if l.ablation.OneMutex() {
		return 0 // with one mutex, all keys share one latch
	}
	return int(maphash.Bytes(l.seed, key) % stripes)
}

// latchSet is the set of stripes that one commit holds. A session reuses it. It is a bit set with a summary, so that a
// set of few stripes is walked in few steps.
type latchSet struct {
	summary [stripes / 64 / 64]uint64 // a bit for each word of bits that is not zero
	bits    [stripes / 64]uint64
	only    int // the stripe, while the set holds one
	count   int // of keys: two may have one stripe
}

func (s *latchSet) reset() {
	if s.count > 1 {
		for i, words := range s.summary {
			for ; words != 0; words &= words - 1 {
				s.bits[i*64+bits.TrailingZeros64(words)] = 0
			}
		}
		clear(s.summary[:])
	}
	s.count = 0
}

// add puts the stripe of an internal key into the set.
func (s *latchSet) add(l *latches, key []byte) {
	stripe := l.stripe(key)
	if s.count == 0 { // the common case of one key needs no bit set
		s.only, s.count = stripe, 1
		return
	}
	if s.count == 1 {
		s.set(s.only)
	}
	s.set(stripe)
	s.count++
}

func (s *latchSet) set(stripe int) {
	word := stripe / 64
	s.bits[word] |= 1 << (stripe % 64)
	s.summary[word/64] |= 1 << (word % 64)
}

// next is the first stripe of a set of several that is not below from, or stripes if there is none.
func (s *latchSet) next(from int) int {
	if from >= stripes {
		return stripes
	}
	word := from / 64
	if left := s.bits[word] >> (from % 64); left != 0 {
		return from + bits.TrailingZeros64(left)
	}
	word++
	for i := word / 64; i < len(s.summary); i++ {
		words := s.summary[i]
		if i == word/64 {
			words &= ^uint64(0) << (word % 64)
		}
		if words != 0 {
			word = i*64 + bits.TrailingZeros64(words)
			return word*64 + bits.TrailingZeros64(s.bits[word])
		}
	}
	return stripes
}

// addAll puts every stripe into the set.
func (s *latchSet) addAll() {
	for stripe := range stripes {
		s.set(stripe)
	}
	s.count = stripes
}

// lock takes every latch of the set, in ascending stripe order. If the context ends before that,
// lock holds none of them.
func (l *latches) lock(ctx context.Context, s *latchSet, w *waiter) error {
	l.ablation.LockCommit()
	err := l.lockStripes(ctx, s, w)
	if err != nil {
		l.ablation.UnlockCommit()
	}
	return err
}

func (l *latches) lockStripes(ctx context.Context, s *latchSet, w *waiter) error {
	if s.count == 1 {
		return l.table[s.only].lock(ctx, w)
	}
	if s.count == 0 {
		return nil
	}
	for stripe := s.next(0); stripe < stripes; stripe = s.next(stripe + 1) {
		if err := l.table[stripe].lock(ctx, w); err != nil {
			l.unlockBelow(s, stripe)
			return err
		}
	}
	return nil
}

func (l *latches) unlock(s *latchSet) {
	if s.count == 1 {
		l.table[s.only].unlock()
	} else if s.count > 0 {
		l.unlockBelow(s, stripes)
	}
	l.ablation.UnlockCommit()
}

// unlockBelow releases the latches with stripes below the given one, of a set of several.
func (l *latches) unlockBelow(s *latchSet, below int) {
	for stripe := s.next(0); stripe < below; stripe = s.next(stripe + 1) {
		l.table[stripe].unlock()
	}
}

// newest is the newest epoch installed under any latch of the set. The set is held.
func (l *latches) newest(s *latchSet) (newest keys.Epoch) {
	if s.count == 1 {
		return l.table[s.only].newest
	}
	if s.count == 0 {
		return 0
	}
	for stripe := s.next(0); stripe < stripes; stripe = s.next(stripe + 1) {
		newest = max(newest, l.table[stripe].newest)
	}
	return newest
}

// wrote notes that a commit of the set is about to be installed at an epoch. The set is held.
func (l *latches) wrote(s *latchSet, e keys.Epoch) {
	if s.count == 1 {
		l.table[s.only].newest = e
		return
	}
	if s.count == 0 {
		return
	}
	for stripe := s.next(0); stripe < stripes; stripe = s.next(stripe + 1) {
		l.table[stripe].newest = e
	}
}
