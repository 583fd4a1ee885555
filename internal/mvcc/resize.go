package mvcc

// ResizeCache changes the size of the page cache while it is used, and returns the size before. The error is
// *storage.CacheSizeError.
func (s *Store) ResizeCache(bytes int64) (before int64, err error) {
	return s.engine.ResizeCache(bytes)
}
