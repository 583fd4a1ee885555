package memtable

import (
	"bytes"
	"unsafe"
)

// A block is an array of slots after one word.
//
//	0              8        16
//	+--------------+--------+--------+---
//	| sorted count | slot 0 | slot 1 | ...
//	+--------------+--------+--------+---
//
// A slot is head|offset of a node, or zero while it is empty. The first sorted slots were filled in
// key order when a split made the block; the rest are in order of arrival.
const (
	// slotsMax makes a block 512 bytes: eight lines, read in order, of which a block that is two
	// thirds full shows five or six. Blocks of 31 slots took 5 % more time on random inserts of
	// 500k keys, for they split twice as often.
	slotsMax   = 63
	blockAlign = 8 // words: a block starts on a cache line

	// arrivalsForRun: one in so many slots must have arrived in order before a split treats that as
	// a run of ascending or descending keys. Fifteen random keys are in order by chance once in
	// 10^11 splits.
	arrivalsForRun = 4
)

func blockWords(slots int) uint32 {
	return (uint32(slots) + 1 + blockAlign - 1) &^ (blockAlign - 1)
}

func slotAt(base unsafe.Pointer, block uint32, i int) unsafe.Pointer {
	return unsafe.Add(base, (uintptr(block)+1+uintptr(i))*wordBytes)
}

// writeBlock fills a block that no other goroutine can see yet. The memory may be dirty.
func writeBlock(base unsafe.Pointer, block uint32, slots int, sorted []uint64) {
	*raw64(base, block) = uint64(len(sorted))
	dst := unsafe.Slice((*uint64)(slotAt(base, block, 0)), slots)
	n := copy(dst, sorted)
	clear(dst[n:])
}

// loadBlock copies the filled slots, in slot order, and returns how many there are and how many
// were sorted when the block was made.
func loadBlock(base unsafe.Pointer, block uint32, slots int, dst *[slotsMax]uint64) (n, sorted int) {
	for n < slots {
		w := word64(base, block+1+uint32(n)).Load()
		if w == 0 {
			break
		}
		dst[n] = w
		n++
	}
	return n, int(*raw64(base, block))
}

// compareWords orders two slots by key.
func compareWords(base unsafe.Pointer, a, b uint64) int {
	if ah, bh := headIn(a), headIn(b); ah != bh {
		if ah < bh {
			return -1
		}
		return 1
	}
	return bytes.Compare(nodeKey(base, offsetIn(a)), nodeKey(base, offsetIn(b)))
}

// sortWords sorts words by key when the first sorted ones are in order already. Insertion sort
// suits: at most half of a block is out of order, in cache, and often nearly sorted.
func sortWords(base unsafe.Pointer, words []uint64, sorted int) {
	for i := max(sorted, 1); i < len(words); i++ {
		w := words[i]
		j := i
		for ; j > 0; j-- {
			left := words[j-1]
			if lh, h := headIn(left), headIn(w); lh < h || lh == h && compareWords(base, left, w) < 0 {
				break
			}
			words[j] = left
		}
		words[j] = w
	}
}

// cutAt says where to split a full block: the index, in key order, of the first slot that moves to
// the right half. It depends on the block alone, so that all goroutines that split it agree. Blocks
// that a run of ascending or descending keys filled are cut at the run's end, which leaves full
// blocks; all others are cut in the middle.
//
// arrived is the block in slot order, ordered the same slots in key order.
func cutAt(base unsafe.Pointer, arrived, ordered []uint64, sorted int) int {
	run := arrived[sorted:]
	if len(run) < 2 || len(run) < len(arrived)/arrivalsForRun {
		return len(ordered) / 2
	}
	direction := compareWords(base, run[0], run[1])
	for i := 2; i < len(run); i++ {
		if compareWords(base, run[i-1], run[i]) != direction {
			return len(ordered) / 2
		}
	}
	last := run[len(run)-1]
	at := 0
	for ordered[at] != last {
		at++
	}
	// Descending: the next key goes below the last one. Ascending with larger keys after it: they
	// are separated once, otherwise they would move with the run and take the place of its keys in
	// every block.
	if direction > 0 || at < len(ordered)-1 {
		at++
	}
	return min(max(at, 1), len(ordered)-1)
}
