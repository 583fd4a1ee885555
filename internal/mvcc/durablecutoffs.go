package mvcc

import (
	"slices"
	"sync"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
)

// durableCutoffs are the cut-offs that a crash cannot take back. A repair of the log can, and a restore of a backup begins without the log: so a
// merge drops records only up to the newest cut-off that the state has which it makes. Of the earlier ones, those are kept that a merge may need.
type durableCutoffs struct {
	mu   sync.Mutex
	list []storage.Expired // ascending
}

// durableCutoffsMax bounds the list. While no merge takes the newer ones, every second cut-off is forgotten, and a merge drops a little less.
const durableCutoffsMax = 64

// add adds a cut-off, which a commit has made, after all others.
func (d *durableCutoffs) add(cutoff uint64, since keys.Epoch) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.list) == durableCutoffsMax {
		second := true
		d.list = slices.DeleteFunc(d.list, func(storage.Expired) bool { second = !second; return second })
	}
	d.list = append(d.list, storage.Expired{KeyRange: storage.KeyRange{Lower: recordsLower, Upper: recordsFrom(cutoff + 1)}, Since: since})
}

// expired are the keys that merges may drop: from now on every state has the commits up to the epoch of the tree.
func (d *durableCutoffs) expired(tree keys.Epoch) []storage.Expired {
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(d.list) > 1 && d.list[1].Since <= tree {
		d.list = d.list[1:]
	}
	return slices.Clone(d.list)
}
