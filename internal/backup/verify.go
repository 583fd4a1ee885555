package backup

import (
	"context"
	"fmt"
	"math"

	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// VerifyReport is what a verification has read.
type VerifyReport struct {
	Backups, Parts, Pages uint64
	Bytes                 int64 // of parts
}

// Verify reads a backup and the bases that it needs: every byte of every part against its hash, every page against its checksum and its id, and
// the page table of each backup against its pages, the table of its base, and its digest. So no page is missing in the chain, or is older than the
// one that was copied. Of backups of formats before 3, which have no table, only a restoration knows that. The error names what is damaged.
func Verify(ctx context.Context, store objectstore.Store, m *Manifest, progress func(VerifyReport)) (r VerifyReport, err error) {
	chain, err := Chain(ctx, store, m)
	if err != nil {
		return r, err
	}
	if progress == nil {
		progress = func(VerifyReport) {}
	}
	for i, b := range chain {
		r.Backups++
		v := &verification{report: &r, progress: progress}
		if b.hasTable() {
			v.table = newTableCheck(ctx, store, b, chain[:i])
		}
		if err := v.parts(ctx, store, b); err != nil {
			return r, err
		}
		if b.Quarantine != nil {
			if _, err := readQuarantine(ctx, store, b); err != nil {
				return r, err
			}
		}
	}
	return r, nil
}

// verification reads one backup.
type verification struct {
	report   *VerifyReport
	progress func(VerifyReport)
	table    *tableCheck // nil if the backup has no table
}

func (v *verification) parts(ctx context.Context, store objectstore.Store, m *Manifest) error {
	size := m.State.PageSize
	err := eachPart(ctx, store, m, func(part *Part, object []byte) error {
		err := readPages(m, part, object, func(first page.ID, pages []byte) error {
			for i := 0; v.table != nil && i*size < len(pages); i++ {
				if err := v.table.page(tableEntry{first + page.ID(i), sumOf(pages[i*size:])}); err != nil {
					return err
				}
			}
			return ctx.Err()
		})
		v.count(part, part.Pages)
		return err
	})
	if err != nil || v.table == nil {
		return err
	}
	for i := range m.Table {
		v.count(&m.Table[i], 0)
	}
	return v.table.finish()
}

func (v *verification) count(part *Part, pages uint64) {
	r := v.report
	r.Parts, r.Pages, r.Bytes = r.Parts+1, r.Pages+pages, r.Bytes+part.Bytes
	v.progress(*r)
}

// tableCheck compares the table of a backup with its pages, and with the table of its base.
type tableCheck struct {
	m      *Manifest
	own    *tableReader
	base   *tableReader // nil if the backup has no base, or a base without a table
	any    bool         // the base has no table
	digest *digest
}

// newTableCheck checks a backup with these bases, the newest last.
func newTableCheck(ctx context.Context, store objectstore.Store, m *Manifest, bases []*Manifest) *tableCheck {
	c := &tableCheck{m: m, own: newTableReader(ctx, store, m), digest: newDigest()}
	if n := len(bases); n > 0 {
		if c.any = !bases[n-1].hasTable(); !c.any {
			c.base = newTableReader(ctx, store, bases[n-1])
		}
	}
	return c
}

// page checks a page of the backup, and those before it that the base has. Ids ascend from call to call.
func (c *tableCheck) page(p tableEntry) error {
	e, err := c.next(p.id)
	if err != nil {
		return err
	}
	if e != p {
		return fmt.Errorf("%w: page %d of backup %s has checksum %08x, and is not the one in the page table", ErrDamaged, p.id, c.m.ID, p.sum)
	}
	c.digest.add(e)
	return nil
}

// next checks the pages of the table before page id, which the base has, and returns the one after them; after the last one it is zero.
func (c *tableCheck) next(id page.ID) (tableEntry, error) {
	for {
		e, ok, err := c.own.read()
		if err != nil || !ok || e.id >= id {
			return e, err
		}
		if err := c.inBase(e); err != nil {
			return tableEntry{}, err
		}
	}
}

// finish checks the pages after the last one of the backup, and the digest.
func (c *tableCheck) finish() error {
	if _, err := c.next(math.MaxUint64); err != nil {
		return err
	}
	if sum := c.digest.sum(); sum != c.m.Digest {
		return fmt.Errorf("%w: the page table of backup %s has the digest %s, the manifest says %s", ErrDamaged, c.m.ID, sum, c.m.Digest)
	}
	return nil
}

// inBase checks a page that the backup has not.
func (c *tableCheck) inBase(e tableEntry) error {
	c.digest.add(e)
	if c.any || c.m.isDamaged(e.id) {
		return nil
	}
	if c.base != nil {
		if was, ok, err := c.base.at(e.id); err != nil || ok && was == e {
			return err
		}
	}
	return fmt.Errorf("%w: page %d of backup %s, with checksum %08x, is neither in it nor in its base", ErrDamaged, e.id, c.m.ID, e.sum)
}
