package feed

import (
	"sort"

	"github.com/epochkv/epochkv/internal/keys"
)

// ring are the last commits, in order: those with epochs after from and up to dispatched. Epochs without a commit are not
// in it.
type ring struct {
	commits    fifo[*Commit]
	from       keys.Epoch
	dispatched keys.Epoch
	bytes      int64
}

func (r *ring) reset(at keys.Epoch) { *r = ring{from: at, dispatched: at} }

func (r *ring) len() int { return r.commits.len() }

// after are the commits after an epoch that is not before from.
func (r *ring) after(e keys.Epoch) []*Commit {
	all := r.commits.all()
	return all[sort.Search(len(all), func(i int) bool { return all[i].Epoch > e }):]
}

func (r *ring) add(c *Commit) {
	r.commits.push(c)
	r.bytes += c.size
	c.inRing = true
}

// drop removes the oldest commit.
func (r *ring) drop() *Commit {
	c := r.commits.pop()
	r.from, r.bytes = c.Epoch, r.bytes-c.size
	c.inRing = false
	return c
}
