package storage

import "fmt"

// CacheSizeError means that the page cache cannot have the size asked for.
type CacheSizeError struct{ Bytes, Min, Max int64 }

func (e *CacheSizeError) Error() string {
	return fmt.Sprintf("storage: a page cache of %d bytes: choose from %d to %d", e.Bytes, e.Min, e.Max)
}

// cachePagesMin is the smallest page cache: a few descents.
const cachePagesMin = 16

// ResizeCache changes the size of the page cache while readers use it, and returns the size before. The budget of immutable
// memtables changes by the opposite amount, so that the memory budget stays the same. The error is *CacheSizeError.
func (e *Engine) ResizeCache(bytes int64) (before int64, err error) {
	e.memory.resizing.Lock()
	defer e.memory.resizing.Unlock()
	o := e.options // a copy
	lowest := int64(cachePagesMin * o.PageSize)
	most := o.MemoryBytes - int64(o.logBuffers())*o.SegmentBytes - 3*o.MemtableBytes // one active, two immutable
	most = min(max(most, e.memory.cacheBytes.Load()), CacheBytesMax(o.PageSize))     // with large memtables the cache may have more than the budget leaves
	if bytes < lowest || bytes > most {
		return 0, &CacheSizeError{Bytes: bytes, Min: lowest, Max: most}
	}
	if err := e.pages.Resize(bytes); err != nil {
		return 0, err
	}
	o.CacheBytes = bytes
	e.memory.immutableBytes.Store(o.immutableBytes())
	e.trimPool()
	e.signalRoom()
	e.requestIfDue()
	return e.memory.cacheBytes.Swap(bytes), nil
}
