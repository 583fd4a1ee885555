// Package cache sets the page cache beside otter, an implementation of W-TinyLFU: hit ratios at equal entries, and what a hit costs.
package cache
