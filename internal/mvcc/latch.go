package mvcc

import (
	"context"
	"hash/maphash"
	"math/bits"

	"github.com/epochkv/epochkv/internal/ablation"
	"github.com/epochkv/epochkv/internal/keys"
)

// stripes is the number of latches. A collision only makes one writer wait for another, for the time of an insert; among
// 64 writers at once a put would meet one in 6 % of cases. 64 KiB of padded latches stay in the second-level cache.
const stripes = 1024

// latches is the striped table of key latches. Every writer takes the latches of its whole write set, in stripe order, so
// that no two commits deadlock, and holds them until its versions are in the memtable.
//
// A latch knows the newest epoch that was installed under it. A transaction whose snapshot is not older need not look for a newer version
// of its keys: most conflict checks read nothing but the line that they hold already.
//
// Invariant: no key of a stripe has a version newer than the stripe's newest, whether a commit wrote it or a bulk load, but for those that
// recovery found, which are older than every snapshot.
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
		return 0 // the mutex excludes more than latches would
	}
	return int(maphash.Bytes(l.seed, key) % stripes)
}

// latchSet is the set of stripes that one commit holds. A session reuses it.
type latchSet struct {
	bits  [stripes / 64]uint64
	only  int // the stripe, while the set holds one
	count int
}

func (s *latchSet) reset() {
	if s.count > 1 {
		clear(s.bits[:])
	}
	s.count = 0
}

// add puts the stripe of an internal key into the set.
func (s *latchSet) add(l *latches, key []byte) {
	stripe := l.stripe(key)
	if s.count == 0 { // one key is the common case and needs no bit set
		s.only, s.count = stripe, 1
		return
	}
	if s.count == 1 {
		s.bits[s.only/64] |= 1 << (s.only % 64)
	}
	s.bits[stripe/64] |= 1 << (stripe % 64)
	s.count++
}

// addAll puts every stripe into the set.
func (s *latchSet) addAll() {
	for i := range s.bits {
		s.bits[i] = ^uint64(0)
	}
	s.count = stripes
}

// lock takes every latch of the set, in ascending stripe order, or none of them if the context ends before.
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
	for i, word := range s.bits {
		for ; word != 0; word &= word - 1 {
			stripe := i*64 + bits.TrailingZeros64(word)
			if err := l.table[stripe].lock(ctx, w); err != nil {
				l.unlockBelow(s, stripe)
				return err
			}
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

// unlockBelow gives back the latches of a set of several with stripes below one.
func (l *latches) unlockBelow(s *latchSet, below int) {
	for i, word := range s.bits {
		for ; word != 0; word &= word - 1 {
			stripe := i*64 + bits.TrailingZeros64(word)
			if stripe >= below {
				return
			}
			l.table[stripe].unlock()
		}
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
	for i, word := range s.bits {
		for ; word != 0; word &= word - 1 {
			newest = max(newest, l.table[i*64+bits.TrailingZeros64(word)].newest)
		}
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
	for i, word := range s.bits {
		for ; word != 0; word &= word - 1 {
			l.table[i*64+bits.TrailingZeros64(word)].newest = e
		}
	}
}
