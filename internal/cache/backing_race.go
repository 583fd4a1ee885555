//go:build race

package cache

import "unsafe"

// heapBackingBytesMax bounds what race builds keep on the Go heap; larger ranges are mapped as ever.
const heapBackingBytesMax = 64 << 20

// backing is the memory under frames, warmth words and tables. The race detector watches the Go heap only and is blind to
// mappings, so in race builds small ranges live there: a page that is overwritten under a reader is then reported.
type backing struct {
	mapping
	heap []uint64
}

func reserve(bytes int64) (backing, error) {
	if bytes <= heapBackingBytesMax {
		heap := make([]uint64, bytes/8)
		return backing{heap: heap, mapping: mapping{base: unsafe.Pointer(unsafe.SliceData(heap))}}, nil
	}
	m, err := reserveMapping(bytes)
	return backing{mapping: m}, err
}

func (b backing) adviseHuge(bytes int64) {
	if b.heap == nil {
		b.mapping.adviseHuge(bytes)
	}
}

func (b backing) discard(from, to int64) error {
	if b.heap == nil {
		return b.mapping.discard(from, to)
	}
	clear(b.heap[from/8 : to/8])
	return nil
}

func (b backing) release() error {
	if b.heap == nil {
		return b.mapping.release()
	}
	return nil
}

// reservation is the address space that a cache of the given size reserves; on the heap it costs memory, so it is less than in
// other builds.
func reservation(bytes int64) int64 { return 4 * bytes }
