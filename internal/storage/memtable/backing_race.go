//go:build race

package memtable

import "unsafe"

// heapBackingBytesMax bounds the arenas that race builds allocate on the Go heap; larger ones are
// mapped as usual.
const heapBackingBytesMax = 64 << 20

// backing is the memory under an arena. The race detector watches the Go heap only and does not see
// mappings, so in race builds a small arena is on the heap: plain accesses that no atomic orders
// are then reported.
type backing struct {
	mapping
	heap []uint64
}

// watched says that the race detector may see the arena.
const watched = true

func reserve(bytes uint64, huge bool) (backing, unsafe.Pointer, error) {
	if bytes <= heapBackingBytesMax {
		heap := make([]uint64, bytes/wordBytes)
		return backing{heap: heap}, unsafe.Pointer(unsafe.SliceData(heap)), nil
	}
	m, err := reserveMapping(bytes, huge)
	return backing{mapping: m}, m.base, err
}

func (b backing) populate(from, to uint64) error {
	if b.heap != nil {
		return nil
	}
	return b.mapping.populate(from, to)
}

func (b backing) discard(from, to uint64) error {
	if b.heap != nil {
		return nil
	}
	return b.mapping.discard(from, to)
}

func (b backing) drop(from, to uint64) error {
	if b.heap != nil {
		return nil
	}
	return b.mapping.drop(from, to)
}

func (b *backing) release() error {
	if b.heap != nil {
		return nil
	}
	return b.mapping.release()
}
