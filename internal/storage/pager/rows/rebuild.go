package rows

import (
	"epochkv/internal/storage/page"
	"epochkv/internal/storage/pager"
)

// Rebuild makes a store for reading only from the data pages themselves, for a file whose row table cannot be read. pages calls its
// argument for pages of the file, any type, any order, any number of times. Of several copies of a row the one that the newest checkpoint
// wrote is taken; whether it is the right one, the checksum in the reference tells.
func Rebuild(p *pager.Pager, pages func(each func(id page.ID, buf []byte)) error) (*Store, error) {
	s := &Store{pager: p, pageSize: p.PageSize(), table: newTable(), stored: &pager.Vector{}}
	s.fill.capacity = capacity(s.pageSize)
	bound := (p.Stats().PageCount + 1) * slotsMax // no file of so many pages ever had more rows
	written := make(map[uint64]uint64)
	err := pages(func(id page.ID, buf []byte) {
		n, err := pageRows(buf)
		if err != nil {
			return
		}
		for slot := range n {
			r, err := rowAt(buf, slot, n)
			checkpoint := page.ReadHeader(buf).Checkpoint
			if err != nil || r.id >= bound || written[r.id] > checkpoint {
				continue
			}
			written[r.id] = checkpoint
			s.table.set(r.id, makePlace(id, slot, cost(len(r.data), s.pageSize), r.kind))
		}
	})
	s.snapshotStats()
	return s, err
}
