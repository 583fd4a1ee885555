package feed

import (
	"sort"

	"github.com/epochkv/epochkv/internal/keys"
)

// ring are the last commits, in order: those with epochs after from and up to dispatched. Epochs without a commit are not
// in it.
type ring struct {
	commits    []*Commit
	head       int // of commits
	from       keys.Epoch
	dispatched keys.Epoch
	bytes      int64
}

func (r *ring) reset(at keys.Epoch) { *r = ring{from: at, dispatched: at} }

func (r *ring) len() int { return len(r.commits) - r.head }

// after are the commits after an epoch that is not before from.
func (r *ring) after(e keys.Epoch) []*Commit {
	all := r.commits[r.head:]
	return all[sort.Search(len(all), func(i int) bool { return all[i].Epoch > e }):]
}

func (r *ring) add(c *Commit) {
	if r.head > 64 && r.head > len(r.commits)/2 {
		n := copy(r.commits, r.commits[r.head:])
		clear(r.commits[n:])
		r.commits, r.head = r.commits[:n], 0
	}
	r.commits = append(r.commits, c)
	r.bytes += c.size
	c.inRing = true
}

// drop removes the oldest commit.
func (r *ring) drop() *Commit {
	c := r.commits[r.head]
	r.commits[r.head] = nil
	r.head++
	r.from, r.bytes = c.Epoch, r.bytes-c.size
	c.inRing = false
	return c
}
