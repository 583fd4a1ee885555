package page

import (
	"encoding/binary"

	"github.com/epochkv/epochkv/internal/keys"
)

// Share is a part of a whole in 255ths, rounded up: zero means nothing at all.
//
// The stale share of a leaf is the part of its entries' bytes that stale entries take; that of an inner node is the mean of its
// children's. A node keeps its children's shares, and not its own, so that what a sweep looks for is found from the root down.
type Share uint8

const (
	shareWhole = 255
	staleShift = 56 // above the 56 bits of an epoch
)

// Ratio is the share as a number from 0 to 1.
func (s Share) Ratio() float64 { return float64(s) / shareWhole }

func shareOf(part, whole int) Share { return Share((part*shareWhole + whole - 1) / whole) }

// StaleShare works out the leaf's stale share. Behind says that the leaf begins with an older version of the key that ends the leaf
// in front of it.
func (p Leaf) StaleShare(behind bool) Share {
	v := p.View()
	stale := 0
	start := int(binary.LittleEndian.Uint16(v.offsets))
	at := start
	for i := range v.count {
		end := int(binary.LittleEndian.Uint16(v.offsets[2*i+2:]))
		e := v.page[at:end]
		further := behind
		if i > 0 {
			further = suffixLen(binary.LittleEndian.Uint16(e[8:])) == 0
		}
		if further || keys.Kind(e[0]) == keys.KindDelete {
			stale += end - at
		}
		at = end
	}
	return shareOf(stale, at-start)
}

// StaleShare is the mean of the children's stale shares.
func (p Inner) StaleShare() Share {
	n, sum := p.Count(), 0
	l := layoutInner(n, p.prefixLen())
	for i := range n {
		sum += int(p[l.newest+8*i+staleShift/8])
	}
	return Share((sum + n - 1) / n)
}
