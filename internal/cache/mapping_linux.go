package cache

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	hugePageBytes = 2 << 20
	// machinePageBytesMax is the largest unit in which a machine frees memory.
	machinePageBytesMax = 64 << 10
)

// mapping is a reserved range of addresses. It is accessible at once, and takes memory page by page
// as the pages are touched. So a cache takes memory only for the pages that it holds.
type mapping struct {
	start unsafe.Pointer // as mapped
	bytes uintptr        // as mapped
	base  unsafe.Pointer // start, rounded up to a huge page
}

func reserveMapping(bytes int64) (mapping, error) {
	m := mapping{bytes: uintptr(bytes) + hugePageBytes}
	start, err := unix.MmapPtr(-1, 0, nil, m.bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return mapping{}, err
	}
	m.start = start
	m.base = unsafe.Add(start, -uintptr(start)&(hugePageBytes-1))
	return m, nil
}

// adviseHuge requests for huge pages for the first bytes: gets become 6 to 35 % faster. It is advice
// only: where transparent huge pages are off, small pages are used. The memory after these bytes is
// left alone, so that no huge page reaches past the cache's size.
func (m mapping) adviseHuge(bytes int64) {
	if whole := bytes &^ (hugePageBytes - 1); whole > 0 {
		_ = unix.Madvise(unsafe.Slice((*byte)(m.base), whole), unix.MADV_HUGEPAGE)
	}
}

// discard frees the memory of [from, to). The range reads as zeros afterwards.
func (m mapping) discard(from, to int64) error {
	return unix.Madvise(unsafe.Slice((*byte)(unsafe.Add(m.base, from)), to-from), unix.MADV_DONTNEED)
}

// release gives the address space back. The second call is EINVAL: what is mapped there since is not the caller's.
func (m *mapping) release() error {
	start, bytes := m.start, m.bytes
	m.start, m.bytes = nil, 0
	return unix.MunmapPtr(start, bytes)
}

// machineBytes is the memory of the machine. No cache can use more. Therefore address space for
// that many frames is reserved, and a cache can grow in place.
func machineBytes() int64 {
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return 0
	}
	return int64(info.Totalram) * int64(info.Unit)
}
