package cache

import "unsafe"

// flight is one page that is being read into memory. The goroutine that made the flight reads the
// page into buf without the mutex, and then completes the flight with finishLocked.
type flight struct {
	id          ID
	frame       uint32 // or noFrame
	usageCap    uint32 // the cap that its hint gives
	prefetched  bool   // prefetched: no reader has asked for it yet
	handed      bool   // written by a checkpoint rather than read: the history does not apply to it
	replaces    ID     // of a page that was written: the page whose usage count it takes over; zero for none
	invalidated bool   // guarded by mu: invalidated, removed from flights early; must not be cached
	buf         []byte
	err         error
	done        chan struct{} // made by the first waiter; closed by finishLocked
}

const noFrame = ^uint32(0)

// pooledMax bounds the pooled flights: as many as the largest batch that is read at once, and some
// more.
const pooledMax = 128

// miss is Page for an id that the table does not have.
func (c *Cache) miss(id ID, h Hint) ([]byte, error) {
	c.lockForFrames()
	if f, ok := c.table.Load().lookup(id); ok { // read just now, or missed because the table moved its entry
		c.mu.Unlock()
		c.touch(f, h)
		return c.frame(f), nil
	}
	if fl := c.flights[id]; fl != nil {
		done := c.joinLocked(fl)
		c.mu.Unlock()
		return c.await(fl, done, h)
	}
	c.missedLocked()
	fl := c.startLocked(id, h, true)
	c.mu.Unlock()
	fl.err = c.config.Read(id, fl.buf)
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.finishLocked(fl)
}

// startLocked makes a flight for a page that is neither resident nor being read. Without a free
// frame the result is nil or, if heap is true, a flight into the Go heap.
func (c *Cache) startLocked(id ID, h Hint, heap bool) *flight {
	f, ok := noFrame, false
	if id != 0 && id <= idMax {
		f, ok = c.takeLocked()
	}
	if !ok && !heap {
		return nil
	}
	fl := c.pooledFlight()
	fl.id, fl.frame, fl.usageCap = id, noFrame, usageCaps[h]
	if ok {
		fl.frame, fl.buf = f, c.frame(f)
	} else {
		c.counters.uncached++
		fl.buf = heapPage(c.pageSize)
	}
	c.flights[id] = fl
	return fl
}

// heapPage returns a page outside the frames, aligned so that direct I/O may read into it. Memory
// of the runtime's size classes for powers of two mostly has that alignment.
func heapPage(size int) []byte {
	buf := make([]byte, size)
	if uintptr(unsafe.Pointer(unsafe.SliceData(buf)))&(heapAlign-1) == 0 {
		return buf
	}
	buf = make([]byte, size+heapAlign)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(buf))) & (heapAlign - 1))
	return buf[skip : skip+size : skip+size]
}

const heapAlign = 4096

func (c *Cache) pooledFlight() *flight {
	if n := len(c.pooled); n > 0 {
		fl := c.pooled[n-1]
		c.pooled = c.pooled[:n-1]
		*fl = flight{}
		return fl
	}
	return new(flight)
}

// joinLocked returns the channel on which the caller waits for the flight of another goroutine.
func (c *Cache) joinLocked(fl *flight) <-chan struct{} {
	c.counters.joined++
	if fl.done == nil {
		fl.done = make(chan struct{})
	}
	return fl.done
}

// await returns the result of the flight. Its frame cannot have been reused since: the caller has
// been inside its guard all the time.
func (c *Cache) await(fl *flight, done <-chan struct{}, h Hint) ([]byte, error) {
	<-done
	if fl.err != nil {
		return nil, fl.err
	}
	if fl.frame != noFrame {
		c.touch(fl.frame, h)
	}
	return fl.buf, nil
}

// finishLocked completes a flight: it caches the page, if that is allowed, and wakes the waiters. The
// bytes are the caller's in any case.
func (c *Cache) finishLocked(fl *flight) ([]byte, error) {
	if c.flights[fl.id] == fl {
		delete(c.flights, fl.id)
	}
	switch {
	case fl.err != nil:
		c.counters.failed++
		if fl.frame != noFrame {
			c.releaseLocked(fl.frame) // no reader uses it
		}
	case fl.frame == noFrame:
	case fl.invalidated || fl.frame >= c.count:
		c.retireLocked([]uint32{fl.frame})
	default:
		c.completeLocked(fl)
	}
	buf, err := fl.buf, fl.err
	if err != nil {
		buf = nil
	}
	if fl.done != nil {
		close(fl.done)
	} else if len(c.pooled) < pooledMax {
		fl.buf = nil
		c.pooled = append(c.pooled, fl)
	}
	return buf, err
}

// completeLocked makes the flight's frame resident.
func (c *Cache) completeLocked(fl *flight) {
	f := fl.frame
	a := admission{prefetched: fl.prefetched}
	if !fl.prefetched && !fl.handed {
		if a.refaults = c.history.refaulted(fl.id); a.refaults > 0 {
			c.counters.refaulted++
		}
	}
	if fl.prefetched {
		c.counters.prefetched++
	}
	c.replaced[f] = 0
	if old, ok := c.table.Load().lookup(fl.replaces); ok {
		a.usage, a.refaults = c.clock.handOver(old), c.refaults[old]
		c.replaced[f] = fl.replaces
	}
	c.states[f], c.ids[f], c.refaults[f] = stateResident, fl.id, a.refaults
	c.resident++
	c.clock.admit(f, fl.usageCap, a)
	c.table.Load().insert(fl.id, f)
}
