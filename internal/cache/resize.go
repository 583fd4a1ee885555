package cache

import "fmt"

// oldTable is a table that Resize has replaced and that readers may still use.
type oldTable struct {
	table *table
	tick  uint64
}

// framesFor checks a size and returns its number of frames.
func (c *Cache) framesFor(bytes int64, limit uint32) (uint32, error) {
	n := bytes / int64(c.pageSize)
	if n < framesMin || n > int64(limit) {
		return 0, fmt.Errorf("%w: %d bytes are %d pages; from %d to %d are possible", ErrSize, bytes, n, framesMin, limit)
	}
	return uint32(n), nil
}

// Resize changes the size of the cache while it is used. A smaller cache drops pages at once,
// whatever their usage count is. Their memory goes back to the machine when their readers have
// left.
func (c *Cache) Resize(bytes int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, err := c.framesFor(bytes, c.framesMax)
	if err != nil || n == c.count {
		return err
	}
	return c.resizeLocked(n)
}

func (c *Cache) resizeLocked(n uint32) error {
	if err := c.retableLocked(n); err != nil {
		return err
	}
	c.frameMem.adviseHuge(int64(n) * int64(c.pageSize))
	old := c.count
	c.count = n
	c.growLocked(old)
	if n < old {
		c.shrinkLocked(n)
	}
	c.countAboveLimitLocked()
	c.clock.resize(n)
	c.history = newHistory(int(n))
	c.sizeReserve()
	c.reclaimLocked()
	return nil
}

// retableLocked replaces the table by a table for n frames.
func (c *Cache) retableLocked(n uint32) error {
	old := c.table.Load()
	t, err := newTable(int(max(n, c.count)))
	if err != nil {
		return err
	}
	for f, s := range c.states {
		if s == stateResident {
			t.insert(c.ids[f], uint32(f))
		}
	}
	c.table.Store(t)
	if old != nil {
		c.oldTables = append(c.oldTables, oldTable{old, c.config.Registry.Retire()})
	}
	return nil
}

// growLocked makes the frames from old on usable. A frame may still be retired or loading from
// before the cache shrank; it becomes free when that ends. Low frames are used first, so that a
// cache that is not full takes whole huge pages.
func (c *Cache) growLocked(old uint32) {
	for f := uint32(len(c.states)); f < c.count; f++ {
		c.states = append(c.states, stateAbsent)
		c.ids = append(c.ids, 0)
		c.refaults = append(c.refaults, 0)
		c.replaced = append(c.replaced, 0)
		wordAt(c.words, f).Store(absent)
	}
	for f := c.count; f > old; f-- {
		if c.states[f-1] == stateAbsent {
			c.states[f-1] = stateFree
			c.free = append(c.free, f-1)
		}
	}
}

// shrinkLocked empties the frames from n on, except frames that are reading: they are retired when
// their flights complete.
func (c *Cache) shrinkLocked(n uint32) {
	for f := n; int(f) < len(c.states); f++ {
		if c.states[f] == stateResident {
			c.counters.shrinkEvicted++
			c.removeLocked(f)
		}
	}
	kept := c.free[:0]
	for _, f := range c.free {
		if f < n {
			kept = append(kept, f)
			continue
		}
		c.states[f] = stateAbsent
	}
	c.free = kept
}

// countAboveLimitLocked counts the frames above the cache's size that are still in use.
func (c *Cache) countAboveLimitLocked() {
	c.aboveLimit = 0
	for f := c.count; int(f) < len(c.states); f++ {
		if c.states[f] != stateAbsent {
			c.aboveLimit++
		}
	}
	if c.aboveLimit == 0 {
		c.discardLocked()
	}
}
