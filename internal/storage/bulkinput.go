package storage

import (
	"bytes"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/extsort"
)

// bulkInput is what the merge of a bulk load reads: the run at the epoch of the bulk load, over the
// immutable memtables.
type bulkInput struct {
	cursor  *extsort.Cursor
	used    bool // Next returned the cursor's entry, which is valid until the cursor moves
	trailer keys.Trailer
	under   *memInput
	below   btree.Entry // next of under
	any     bool        // below holds an entry
}

var _ btree.Input = (*bulkInput)(nil)

func newBulkInput(r *extsort.Run, epoch keys.Epoch, under *memInput) *bulkInput {
	in := &bulkInput{cursor: r.Cursor(), trailer: keys.MakeTrailer(epoch, keys.KindSet), under: under}
	in.SeekGE(nil)
	return in
}

// SeekGE implements btree.Input.
func (in *bulkInput) SeekGE(key []byte) {
	in.cursor.SeekGE(key)
	in.used = false
	in.under.SeekGE(key)
	in.any = in.under.Next(&in.below)
}

// Next implements btree.Input. The entry of the run is newer than every version of its key in a memtable.
func (in *bulkInput) Next(e *btree.Entry) bool {
	c := in.cursor
	if in.used {
		c.Next()
		in.used = false
	}
	if c.Valid && (!in.any || bytes.Compare(c.Key, in.below.Key) <= 0) {
		e.Key, e.Value, e.Trailer, e.Large = c.Key, c.Value, in.trailer, c.Replaced
		in.used = true
		return true
	}
	if !in.any || c.Err != nil {
		return false
	}
	*e = in.below
	in.any = in.under.Next(&in.below)
	return true
}

// Err implements btree.Input.
func (in *bulkInput) Err() error { return in.cursor.Err }
