//go:build race

package cache

import "unsafe"

// heapBackingBytesMax bounds the memory that race builds keep on the Go heap. Larger ranges are
// mapped as in other builds.
const heapBackingBytesMax = 64 << 20

// backing is the memory of frames, usage counts and tables. The race detector watches the Go heap
// and does not see mappings. Therefore race builds keep small ranges on the heap: the detector then
// reports a page that is overwritten while a reader uses it.
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

func (b *backing) release() error {
	if b.heap == nil {
		return b.mapping.release()
	}
	return nil
}

// reservation is the address space that a cache of the given size reserves. On the heap it costs
// memory, so it is smaller than in other builds.
func reservation(bytes int64) int64 { return 4 * bytes }
