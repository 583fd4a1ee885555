package cache

// Admit caches a page that its owner has just written and will not change, as if the page had been
// read once. It does so only if a frame is available, and reports whether it did.
func (c *Cache) Admit(id ID, page []byte, h Hint) bool {
	c.mu.Lock()
	c.invalidateLocked(id)
	return c.admit(c.startLocked(id, h, false), page)
}

// Replace is Admit for a page that will take the place of page old, if the page is worth a frame:
// if old is cached, or if a frame is idle. In a cache that admitted every page that is written, the
// kernel's clearing of fresh frames took 18 % of the time of batches, for pages that no reader had
// asked for (ADR 0041).
//
// The page takes over the usage count of old. Old stays, for the readers that still ask for it, as
// if it had been read once.
func (c *Cache) Replace(old, id ID, page []byte, h Hint) bool {
	c.mu.Lock()
	c.invalidateLocked(id)
	if _, cached := c.table.Load().lookup(old); !cached && !c.takeIdleLocked() {
		return c.admit(nil, page)
	}
	fl := c.startLocked(id, h, false)
	if fl != nil {
		fl.replaces = old
	}
	return c.admit(fl, page)
}

// writtenPerMiss is how many pages that were written may take fresh frames for each miss of a reader.
const writtenPerMiss = 8

// takeIdleLocked reports whether the next frame is idle. A frame is idle if taking it evicts no page,
// because more frames are free than the reserve has, and if its memory is in use already. Misses
// show that readers need pages that are not in memory, as after a checkpoint of keys that they used
// to find in memtables: then frames with fresh memory are idle as well.
func (c *Cache) takeIdleLocked() bool {
	if len(c.free) <= c.reserve && len(c.retired) > c.reserve {
		c.reclaimLocked()
	}
	n := len(c.free)
	if n <= c.reserve {
		return false
	}
	if c.free[n-1] < c.touched {
		return true
	}
	if c.wanted == 0 {
		return false
	}
	c.wanted--
	return true
}

// missedLocked counts a page that a reader has to wait for.
func (c *Cache) missedLocked() {
	c.counters.misses++
	c.wanted = min(c.wanted+writtenPerMiss, uint64(c.count))
}

// admit completes the flight of a written page, if there is one. It is called with the mutex, and releases it.
func (c *Cache) admit(fl *flight, page []byte) bool {
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

// Revoke is Invalidate for a page that was written and will not be used after all: the page whose usage
// count it took over gets the count back. Of pages that replace each other the newest is revoked first.
func (c *Cache) Revoke(id ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f, ok := c.table.Load().lookup(id)
	if !ok {
		c.invalidateLocked(id)
		return
	}
	usage := c.clock.word(f).Load()
	old, ok := c.table.Load().lookup(c.replaced[f])
	c.invalidateLocked(id)
	if ok {
		c.clock.giveBack(old, usage)
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
