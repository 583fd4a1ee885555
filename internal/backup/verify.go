package backup

import (
	"context"

	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// VerifyReport is what a verification has read.
type VerifyReport struct {
	Backups, Parts, Pages uint64
	Bytes                 int64 // of parts
}

// Verify reads a backup and the bases that it needs: every byte of every part against its hash, every page against its checksum
// and its id. It does not know whether pages are missing in a base; a restoration does. The error names what is damaged.
func Verify(ctx context.Context, store objectstore.Store, m *Manifest, progress func(VerifyReport)) (r VerifyReport, err error) {
	chain, err := Chain(ctx, store, m)
	if err != nil {
		return r, err
	}
	for _, b := range chain {
		r.Backups++
		err := eachPart(ctx, store, b, func(part *Part, object []byte) error {
			err := readPages(b, part, object, func(page.ID, []byte) error { return ctx.Err() })
			r.Parts, r.Pages, r.Bytes = r.Parts+1, r.Pages+part.Pages, r.Bytes+part.Bytes
			if progress != nil {
				progress(r)
			}
			return err
		})
		if err == nil && b.Quarantine != nil {
			_, err = readQuarantine(ctx, store, b)
		}
		if err != nil {
			return r, err
		}
	}
	return r, nil
}
