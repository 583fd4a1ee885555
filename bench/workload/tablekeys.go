package workload

import "fmt"

// tableKeys is set once, before any scenario runs.
var tableKeys bool

// UseTableKeys makes all scenarios use keys as TableKey makes them, instead of random bytes. Keys of real data have such
// prefixes: they are the same in many bytes, and what tells them apart is in their middle.
func UseTableKeys() { tableKeys = true }

// TableKeys reports whether keys are as TableKey makes them.
func TableKeys() bool { return tableKeys }

// TableKeyBytes is the length of such a key, and tableNumbers how many there are.
const (
	TableKeyBytes = len("table/00000000042/column")
	tableNumbers  = 100_000_000_000
)

// TableKey appends the key of a row's column.
func TableKey(dst []byte, number uint64) []byte {
	return fmt.Appendf(dst, "table/%011d/column", number%tableNumbers)
}

// Permute returns a number below count for each i below count, another one for each: keys in random order whose numbers
// have no gaps. It is a Feistel network of four rounds over the next square number, repeated until it hits.
func Permute(seed, i, count uint64) uint64 {
	side := uint64(1)
	for side*side < count {
		side++
	}
	for {
		left, right := i/side, i%side
		for round := range uint64(4) {
			left, right = right, (left+mix(seed^round<<56^right))%side
		}
		if i = left*side + right; i < count {
			return i
		}
	}
}

func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
