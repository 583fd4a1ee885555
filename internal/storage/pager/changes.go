package pager

import (
	"slices"
	"sync"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// changes remembers which pages became live since states that were copied, so that the next copy reads only those. It is in memory: a
// state that an earlier process copied is unknown.
//
//	copy 1      copy 2           copy 3
//	---+-----------+----------------+-------------> checkpoints
//	   |  period 1 |    period 2    |  current
//
// What a copy has to read after an earlier one is the union of the periods between them. A period may have more pages than became live in it:
// those of aborted checkpoints, and those that were freed since. It never has fewer, because every page becomes live in Checkpoint.makeLive, but
// for those of a map that was rebuilt. The state before a rebuilt map cannot be copied, and so it has no name.
//
// There are at most periodsMax periods, each with one bit for a page. Beyond that the two neighbours with the fewest pages become one, and what
// is read after a copy between them is a little more. The newest copy is not between them, because it is what most copies follow.
type changes struct {
	current *bitset.Set // since the last cut; nil before the first one. Owned by the open checkpoint, or by the goroutine that has set open

	mu      sync.Mutex // guards the fields below, and the sets of the periods
	began   uint64     // the checkpoint of the first cut that counts
	periods []period   // ascending
	copies  []namedCopy
}

// period is the pages that became live after the period before, up to a checkpoint.
type period struct {
	through uint64
	pages   *bitset.Set
}

// namedCopy is a state of which a copy was made.
type namedCopy struct {
	name       string
	checkpoint uint64
}

const (
	periodsMax = 8  // a byte for each page, 13 MiB for 100 GiB with pages of 8 KiB
	copiesMax  = 64 // names that are remembered
)

// noteLive records that a page becomes live.
func (c *changes) noteLive(id page.ID) {
	if c.current != nil {
		c.current.Add(int(id))
	}
}

// cut ends a period at a checkpoint, the newest one.
func (c *changes) cut(n uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.current == nil:
		c.began = n
	case n == c.lastCut():
		return // what was written since belongs to no state
	default:
		c.periods = append(c.periods, period{n, c.current})
	}
	c.current = new(bitset.Set)
	c.forget(n)
	if len(c.periods) > periodsMax {
		c.mergeTwo()
	}
}

func (c *changes) lastCut() uint64 {
	if n := len(c.periods); n > 0 {
		return c.periods[n-1].through
	}
	return c.began
}

// forget drops the periods up to the oldest copy that has a name; all of them if none has.
func (c *changes) forget(newest uint64) {
	oldest := newest
	for i := range c.copies {
		oldest = min(oldest, c.copies[i].checkpoint)
	}
	for len(c.periods) > 0 && c.periods[0].through <= oldest {
		c.began = c.periods[0].through
		c.periods = slices.Delete(c.periods, 0, 1)
	}
}

// mergeTwo makes the two neighbours with the fewest pages one, if the newest copy is not between them.
func (c *changes) mergeTwo() {
	newest := uint64(0)
	for i := range c.copies {
		newest = max(newest, c.copies[i].checkpoint)
	}
	best, fewest := 0, bitset.None
	for i := range len(c.periods) - 1 {
		if c.periods[i].through == newest {
			continue
		}
		if n := c.periods[i].pages.Count() + c.periods[i+1].pages.Count(); n < fewest {
			best, fewest = i, n
		}
	}
	addAll(c.periods[best+1].pages, c.periods[best].pages)
	c.periods = slices.Delete(c.periods, best, best+1)
}

func addAll(into, from *bitset.Set) {
	for i := range from.Len() / 64 {
		if word := from.Word(i); word != 0 {
			into.SetWord(i, into.Word(i)|word)
		}
	}
}

// name gives the copy of a checkpoint at which there was a cut a name.
func (c *changes) name(n uint64, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n < c.began {
		return // the copy took so long that its period was dropped
	}
	if c.copies = append(c.copies, namedCopy{name, n}); len(c.copies) > copiesMax {
		c.copies = slices.Delete(c.copies, 0, 1)
	}
}

// forgetCopies forgets all names. The next cut drops the periods.
func (c *changes) forgetCopies() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.copies = nil
}

// since returns pages among which are all that became live after the named copy and up to a cut at checkpoint n. It returns false if the
// copy is not known.
func (c *changes) since(name string, n uint64) (*bitset.Set, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := slices.IndexFunc(c.copies, func(copied namedCopy) bool { return copied.name == name })
	if at < 0 || c.copies[at].checkpoint > n {
		return nil, false
	}
	pages, from, begin := new(bitset.Set), c.copies[at].checkpoint, c.began
	for _, p := range c.periods {
		if p.through > from && begin < n {
			addAll(pages, p.pages)
		}
		begin = p.through
	}
	return pages, true
}
