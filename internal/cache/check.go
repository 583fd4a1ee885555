package cache

import "fmt"

// checkFramesLocked panics unless every frame is in exactly the list that its state names. It walks
// all frames, for builds with the tag `invariants`.
func (c *Cache) checkFramesLocked() {
	var byState [stateRetired + 1]int
	for f, s := range c.states {
		byState[s]++
		if s != stateResident {
			continue
		}
		if named, ok := c.table.Load().lookup(c.ids[f]); !ok || named != uint32(f) {
			panic(fmt.Sprintf("cache: frame %d holds page %d, and the table names frame %d for it (found: %v)", f, c.ids[f], named, ok))
		}
	}
	if byState[stateFree] != len(c.free) || byState[stateRetired] != len(c.retired) || byState[stateResident] != int(c.resident) {
		panic(fmt.Sprintf("cache: %d, %d, %d frames are free, retired, resident; the lists have %d, %d, %d",
			byState[stateFree], byState[stateRetired], byState[stateResident], len(c.free), len(c.retired), c.resident))
	}
}

// checkVictimLocked panics unless frame f, which is about to be evicted, is resident and the table names it for its page.
func (c *Cache) checkVictimLocked(t *table, f uint32) {
	if c.states[f] != stateResident {
		panic(fmt.Sprintf("cache: victim %d is in state %d", f, c.states[f]))
	}
	if named, ok := t.lookup(c.ids[f]); !ok || named != f {
		panic(fmt.Sprintf("cache: victim %d holds page %d, and the table names frame %d for it (found: %v)", f, c.ids[f], named, ok))
	}
}

// checkTakenLocked panics unless frame f, which was taken from the free list, is free and holds no page.
func (c *Cache) checkTakenLocked(f uint32) {
	if c.states[f] != stateFree || wordAt(c.words, f).Load() != absent {
		panic(fmt.Sprintf("cache: frame %d of the free list is in state %d with usage count %d", f, c.states[f], wordAt(c.words, f).Load()))
	}
}
