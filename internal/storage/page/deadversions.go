package page

import (
	"encoding/binary"

	"github.com/epochkv/epochkv/internal/keys"
)

// DeadRatio is a part of a whole in 255ths, rounded up: only zero means nothing at all.
//
// The dead-version ratio of a leaf is the part of its entries' bytes that superseded versions and tombstones
// take. That of an inner node is the mean of its children's ratios. A node stores its children's ratios, and
// not its own, so that vacuum finds dead versions from the root down.
type DeadRatio uint8

const (
	ratioWhole = 255
	deadShift  = 56 // above the 56 bits of an epoch
)

// Ratio is the ratio as a number from 0 to 1.
func (s DeadRatio) Ratio() float64 { return float64(s) / ratioWhole }

func ratioOf(part, whole int) DeadRatio { return DeadRatio((part*ratioWhole + whole - 1) / whole) }

// DeadVersionRatio computes the leaf's dead-version ratio. continued says that the leaf begins with an older
// version of the key at the end of the previous leaf.
func (p Leaf) DeadVersionRatio(continued bool) DeadRatio {
	v := p.Layout()
	dead := 0
	start := int(binary.LittleEndian.Uint16(v.offsets))
	at := start
	for i := range v.count {
		end := int(binary.LittleEndian.Uint16(v.offsets[2*i+2:]))
		e := v.page[at:end]
		further := continued
		if i > 0 {
			further = suffixLen(binary.LittleEndian.Uint16(e[8:])) == 0
		}
		if further || keys.Kind(e[0]) == keys.KindDelete {
			dead += end - at
		}
		at = end
	}
	return ratioOf(dead, at-start)
}

// DeadVersionRatio is the mean of the children's dead-version ratios.
func (p Inner) DeadVersionRatio() DeadRatio {
	n, sum := p.Count(), 0
	l := layoutInner(n, p.prefixLen())
	for i := range n {
		sum += int(p[l.newest+8*i+deadShift/8])
	}
	return DeadRatio((sum + n - 1) / n)
}
