package cache

// Admit caches a page that its owner has just written and will not change, as if the page had been
// read once. It does so only if a frame is available, and reports whether it did.
func (c *Cache) Admit(id ID, page []byte, h Hint) bool {
	c.mu.Lock()
	c.invalidateLocked(id)
	fl := c.startLocked(id, h, false)
	if fl == nil {
		c.counters.admitDropped++
		c.mu.Unlock()
		return false
	}
	c.counters.admitted++
	fl.handed = true
	c.mu.Unlock()
	copy(fl.buf, page)
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := c.finishLocked(fl)
	return err == nil
}

// invalidateWindow bounds the pages that Invalidate invalidates without releasing the mutex.
const invalidateWindow = 256

// Invalidate invalidates pages that were freed, so that their ids may name other contents. Readers that
// have the bytes of such a page keep them until they leave the guard. A page that is still being
// read is not cached.
func (c *Cache) Invalidate(ids ...ID) {
	for len(ids) > 0 {
		n := min(len(ids), invalidateWindow)
		c.mu.Lock()
		for _, id := range ids[:n] {
			c.invalidateLocked(id)
		}
		c.mu.Unlock()
		ids = ids[n:]
	}
}

func (c *Cache) invalidateLocked(id ID) {
	if fl := c.flights[id]; fl != nil {
		fl.invalidated = true
		delete(c.flights, id)
	}
	f, ok := c.table.Load().lookup(id)
	if !ok {
		return
	}
	c.counters.invalidated++
	c.removeLocked(f)
}

// removeLocked removes a resident frame from the cache and leaves no entry in the history.
func (c *Cache) removeLocked(f uint32) {
	c.table.Load().remove(c.ids[f])
	c.clock.remove(f)
	c.resident--
	c.retireLocked([]uint32{f})
}
