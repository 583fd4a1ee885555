package memtable

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/epochkv/epochkv/internal/offheap"
)

// mapping is a reserved range of addresses: inaccessible at first, so that a stray offset faults instead of reading zeros.
type mapping struct {
	start unsafe.Pointer // as mapped
	bytes uintptr        // as mapped
	base  unsafe.Pointer // start, rounded up to a huge page
}

func reserveMapping(bytes uint64, huge bool) (mapping, error) {
	m := mapping{bytes: uintptr(bytes) + hugePageBytes}
	start, err := unix.MmapPtr(-1, 0, nil, m.bytes, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return mapping{}, err
	}
	m.start = start
	m.base = unsafe.Add(start, -uintptr(start)&(hugePageBytes-1))
	if huge {
		// Advice only: where transparent huge pages are off, small pages serve.
		_ = unix.Madvise(unsafe.Slice((*byte)(m.base), bytes), unix.MADV_HUGEPAGE)
	}
	return m, nil
}

// populate makes [from, to) accessible and takes its page faults now, so that no commit takes them later.
func (m mapping) populate(from, to uint64) error {
	b := unsafe.Slice((*byte)(unsafe.Add(m.base, from)), to-from)
	if err := unix.Mprotect(b, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return err
	}
	return offheap.Populate(b)
}

// discard gives the memory of [from, to) back and makes it inaccessible, as before populate.
func (m mapping) discard(from, to uint64) error {
	b := unsafe.Slice((*byte)(unsafe.Add(m.base, from)), to-from)
	if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
		return err
	}
	return unix.Mprotect(b, unix.PROT_NONE)
}

// drop gives the whole pages of [from, to), which has some, back. They stay accessible. 64 KiB is the largest page of the kernels that are served.
func (m mapping) drop(from, to uint64) error {
	const page = 64 << 10
	from, to = (from+page-1)/page*page, to/page*page
	return unix.Madvise(unsafe.Slice((*byte)(unsafe.Add(m.base, from)), to-from), unix.MADV_DONTNEED)
}

// release gives the address space back. The second call is EINVAL: what is mapped there since is not the caller's.
func (m *mapping) release() error {
	start, bytes := m.start, m.bytes
	m.start, m.bytes = nil, 0
	return unix.MunmapPtr(start, bytes)
}
