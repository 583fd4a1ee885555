package storage

import (
	"slices"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/cache"
	"github.com/epochkv/epochkv/internal/storage/page"
)

const (
	// extentPages is how many neighbours in the file are read together: 16 pages of 8 KiB take the device twice as long as one.
	extentPages = 16
	// extentsRemembered is how many extents may be waiting for their second miss.
	extentsRemembered = 1024
)

// extents reads more than was asked for where point reads come close together: the second miss within one extent of the file reads
// all leaves there that have the same parent as the one that is missing. It is off unless Options.ExtentReadahead asks for it: it pays where
// keys that are wanted together stand together, and costs where they do not (ADR 0019).
type extents struct {
	missed [extentsRemembered]atomic.Uint64 // extents, by their number's remainder; written on misses only
}

func extentOf(id page.ID) uint64 { return uint64(id) / extentPages }

// second notes a miss and reports whether it is the second one in its extent, among the last so many.
func (x *extents) second(id page.ID) bool {
	e := extentOf(id)
	return x.missed[e%extentsRemembered].Swap(e) == e
}

// extendMiss is called before a point read visits a leaf, with the leaf's parent.
func (r *Reader) extendMiss(id page.ID, parent page.Inner) {
	c := r.pages.cache
	if c.Contains(cache.ID(id)) || !r.pages.extents.second(id) {
		return
	}
	var ids [extentPages]cache.ID
	n := 0
	for i := range parent.Count() {
		if child := parent.Child(i); extentOf(child) == extentOf(id) {
			ids[n] = cache.ID(child)
			n++
		}
	}
	slices.Sort(ids[:n])
	c.ReadAhead(ids[:n], cache.Default)
}
