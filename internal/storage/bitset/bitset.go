// Package bitset is a growing set of small integers as bits, made to find runs: "the lowest n adjacent
// integers that are not in the set". Beyond its length a set is empty, so that a search for absent members
// always succeeds.
//
//	set {0 1 2 5 7}   11100101 0000...   Run(0, 2, -1) = 3, Run(0, 3, -1) = 8
//
// Invariants: Count is the number of set bits; bits past Len are zero.
//
// Sets hold page ids and blob ids: dense, starting at zero. The package does not know what they mean. A set
// is for one goroutine at a time.
package bitset

import (
	"math"
	"math/bits"
)

const wordBits = 64

// None is the result of a search for a member if there is none. It is greater than any member, so that a
// loop up to a bound ends.
const None = math.MaxInt

// Set is a set of integers >= 0. The zero Set is empty and ready.
type Set struct {
	words []uint64
	count int
}

// Len is an upper bound: every member is less.
func (s *Set) Len() int { return len(s.words) * wordBits }

// Count is the number of members.
func (s *Set) Count() int { return s.count }

// Has reports whether i is a member.
func (s *Set) Has(i int) bool {
	w := i / wordBits
	return w < len(s.words) && s.words[w]&(1<<(i%wordBits)) != 0
}

// Add makes i a member, and reports whether it was not one before.
func (s *Set) Add(i int) bool {
	s.grow(i + 1)
	word, bit := &s.words[i/wordBits], uint64(1)<<(i%wordBits)
	if *word&bit != 0 {
		return false
	}
	*word |= bit
	s.count++
	return true
}

// Remove takes i out, and reports whether it was a member.
func (s *Set) Remove(i int) bool {
	if !s.Has(i) {
		return false
	}
	s.words[i/wordBits] &^= 1 << (i % wordBits)
	s.count--
	return true
}

// grow makes room for members below n. It grows by at least a quarter, so that adding in ascending order
// takes linear time.
func (s *Set) grow(n int) {
	need := (n + wordBits - 1) / wordBits
	if need <= len(s.words) {
		return
	}
	if need <= cap(s.words) {
		s.words = s.words[:need]
		return
	}
	words := make([]uint64, need, need+need/4)
	copy(words, s.words)
	s.words = words
}

// NextAbsent is the smallest integer >= i that is not a member.
func (s *Set) NextAbsent(i int) int {
	w := i / wordBits
	if w >= len(s.words) {
		return i
	}
	word := ^s.words[w] &^ (1<<(i%wordBits) - 1)
	for word == 0 {
		if w++; w == len(s.words) {
			return w * wordBits
		}
		word = ^s.words[w]
	}
	return w*wordBits + bits.TrailingZeros64(word)
}

// Next is the smallest member >= i, or None.
func (s *Set) Next(i int) int {
	w := i / wordBits
	if w >= len(s.words) {
		return None
	}
	word := s.words[w] &^ (1<<(i%wordBits) - 1)
	for word == 0 {
		if w++; w == len(s.words) {
			return None
		}
		word = s.words[w]
	}
	return w*wordBits + bits.TrailingZeros64(word)
}

// Last is the largest member below limit, or -1.
func (s *Set) Last(limit int) int {
	limit = min(limit, s.Len())
	if limit <= 0 {
		return -1
	}
	w := (limit - 1) / wordBits
	word := s.words[w]
	if r := limit % wordBits; r != 0 {
		word &= 1<<r - 1
	}
	for word == 0 {
		if w--; w < 0 {
			return -1
		}
		word = s.words[w]
	}
	return w*wordBits + bits.Len64(word) - 1
}

// Run is the lowest run of at least n adjacent integers >= from that are not members, cut to n. With limit
// < 0 it always finds one. Otherwise only runs that begin below limit count, and ok says whether there was
// one.
func (s *Set) Run(from, n, limit int) (first int, ok bool) {
	for i := from; ; {
		if n >= skipRun {
			i = s.skipShort(i)
		}
		i = s.NextAbsent(i)
		if limit >= 0 && i >= limit {
			return 0, false
		}
		end := s.Next(i)
		if end-i >= n {
			return i, true
		}
		i = end
	}
}

// skipRun is the shortest run for which whole words can be skipped.
const skipRun = 8

// skipShort is the first integer >= i at which a run of skipRun may begin. It works word by word: a set of
// millions with holes of one and two is searched in milliseconds.
func (s *Set) skipShort(i int) int {
	for w := i / wordBits; w < len(s.words); w++ {
		absent := ^s.words[w] &^ (1<<(i%wordBits) - 1)
		two := absent & (absent >> 1)
		four := two & (two >> 2)
		across := bits.LeadingZeros64(^absent)
		if w+1 < len(s.words) {
			across += bits.TrailingZeros64(s.words[w+1])
		} else {
			across += skipRun
		}
		if four&(four>>4) != 0 || across >= skipRun {
			return i
		}
		i = (w + 1) * wordBits
	}
	return i
}

// Word is the i-th word of 64 members, zero beyond the end.
func (s *Set) Word(i int) uint64 {
	if i >= len(s.words) {
		return 0
	}
	return s.words[i]
}

// SetWord replaces the i-th word of 64 members.
func (s *Set) SetWord(i int, word uint64) {
	if i >= len(s.words) && word == 0 {
		return
	}
	s.grow((i + 1) * wordBits)
	s.count += bits.OnesCount64(word) - bits.OnesCount64(s.words[i])
	s.words[i] = word
}

// Trim removes the words after the last member.
func (s *Set) Trim() {
	n := len(s.words)
	for n > 0 && s.words[n-1] == 0 {
		n--
	}
	s.words = s.words[:n]
}
