package feed

import (
	"cmp"

	"github.com/epochkv/epochkv/internal/keys"
)

// Position is a place in the history: everything through Epoch, and the first Operations operations of the commit at
// Epoch+1. Operations count all operations of a commit, whether a watch wants them or not.
type Position struct {
	Epoch      keys.Epoch
	Operations uint32
}

// Compare is negative, zero or positive.
func (p Position) Compare(q Position) int {
	return cmp.Or(cmp.Compare(p.Epoch, q.Epoch), cmp.Compare(p.Operations, q.Operations))
}

func latest(p, q Position) Position {
	if p.Compare(q) < 0 {
		return q
	}
	return p
}
