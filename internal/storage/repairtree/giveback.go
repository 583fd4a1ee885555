package repairtree

import (
	"bytes"
	"context"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
)

// GivingBack is the part of a merge that ends the skipping of some pages: the versions in their ranges go back to the tree.
// The repair tree and its mirror are built anew, with what remains, or end if no skipped page remains.
type GivingBack struct {
	Remaining *Tree // for Outside and Merge; it has no trees yet
	from      *Tree
	pager     *pager.Reader
}

// GiveBack prepares a merge that does not skip the pages any more for which mended reports true.
func (s *Tree) GiveBack(p *pager.Reader, mended func(page.ID) bool) *GivingBack {
	g := &GivingBack{from: s, pager: p}
	if s == nil {
		return g
	}
	rest := &Tree{}
	for _, q := range s.pages {
		if !mended(q.ID) {
			q.unrecorded = true
			rest.pages = append(rest.pages, q)
		}
	}
	if len(rest.pages) > 0 {
		rest.index()
		g.Remaining = rest
	}
	return g
}

// Input is all input of the merge: in, and what the repair tree has. Its error is a *DamageError if the repair tree is
// damaged.
func (g *GivingBack) Input(in btree.Input) btree.Input {
	if g.from == nil || g.from.root.Empty() {
		return in
	}
	u := &unionInput{older: g.versions(), newer: in}
	u.SeekGE(nil)
	return u
}

func (g *GivingBack) versions() *versionsInput {
	return &versionsInput{btree.NewTreeInput(pagesource.WholeTree{Pager: g.pager}, g.from.root), g.from.root}
}

// Copies stores a copy, for the mirror, of each blob in the ranges that are still skipped. It reads every blob of the repair
// tree: Free drops the mirror's copies, which may be the only ones that can be read.
func (g *GivingBack) Copies(ctx context.Context, store *blob.Store, put func([]byte) (page.Ref, error)) (map[page.Ref]page.Ref, error) {
	copies, value := map[page.Ref]page.Ref{}, []byte(nil)
	err := g.each(ctx, func(e *btree.Entry) (err error) {
		if !e.Large {
			return nil
		}
		if value, err = store.Append(value[:0], page.RefOf(e.Value), store.Direct()); err != nil {
			return fmt.Errorf("a value in the repair tree: %w", err)
		}
		if g.Remaining.Covers(e.Key, e.Trailer) {
			copies[page.RefOf(e.Value)], err = put(value)
		}
		return err
	})
	return copies, err
}

// each calls do for every version that the repair tree has; not for its records.
func (g *GivingBack) each(ctx context.Context, do func(*btree.Entry) error) error {
	if g.from == nil || g.from.root.Empty() {
		return nil
	}
	in := g.versions()
	in.SeekGE(nil)
	var e btree.Entry
	for in.Next(&e) {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := do(&e); err != nil {
			return err
		}
	}
	return in.Err()
}

// Free frees the trees that the merge replaces: of the repair tree the pages, because its blobs are in use, and of the
// mirror the blobs as well. It subtracts what the repair tree had from the counts, and reports whether all pages were found.
func (g *GivingBack) Free(ctx context.Context, ck *pager.Checkpoint, blobs Blobs, counts *btree.Stats) (complete bool, err error) {
	if g.from == nil {
		return true, nil
	}
	if err := g.subtract(ctx, counts); err != nil {
		return false, err
	}
	complete, err = freeTree(ctx, g.pager, ck, Blobs{}, g.from.root, btree.Root{})
	if err != nil {
		return false, err
	}
	mirror, err := freeTree(ctx, g.pager, ck, blobs, g.from.mirror, g.from.root)
	return complete && mirror, err
}

// subtract subtracts versions and records of the repair tree from the counts of the merge.
func (g *GivingBack) subtract(ctx context.Context, counts *btree.Stats) error {
	if g.from.root.Empty() {
		return nil
	}
	var e btree.Entry
	var last []byte
	in := btree.NewTreeInput(pagesource.WholeTree{Pager: g.pager}, g.from.root)
	for in.Next(&e) {
		counts.Versions--
		counts.Bytes -= int64(len(e.Key) + len(e.Value))
		if !bytes.Equal(last, e.Key) && e.Trailer.Kind() != keys.KindDelete {
			counts.CountKey(e.Key, -1)
		}
		last = append(last[:0], e.Key...)
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return in.Err()
}

// versionsInput is the versions of a repair tree without the records.
type versionsInput struct {
	*btree.TreeInput
	root btree.Root
}

// SeekGE implements btree.Input.
func (v *versionsInput) SeekGE(key []byte) {
	if first := []byte{byte(keys.SpaceRepairTree) + 1}; bytes.Compare(key, first) < 0 {
		key = first
	}
	v.TreeInput.SeekGE(key)
}

// Err implements btree.Input.
func (v *versionsInput) Err() error {
	err := v.TreeInput.Err()
	if err != nil && pagesource.IsDamage(err) {
		return &DamageError{v.root, err}
	}
	return err
}

// unionInput merges two inputs. After a merge in steps was interrupted, both may have the same version: the older input
// has its blob already.
type unionInput struct {
	older, newer     btree.Input
	old, latest      btree.Entry
	isOld, hasLatest bool
}

// SeekGE implements btree.Input.
func (u *unionInput) SeekGE(key []byte) {
	u.older.SeekGE(key)
	u.newer.SeekGE(key)
	u.isOld, u.hasLatest = u.older.Next(&u.old), u.newer.Next(&u.latest)
}

// Next implements btree.Input. The older input reuses its key with the next entry.
func (u *unionInput) Next(e *btree.Entry) bool {
	if !u.isOld && !u.hasLatest || u.older.Err() != nil {
		return false
	}
	order := -1
	switch {
	case !u.isOld:
		order = 1
	case u.hasLatest:
		order = keys.Compare(u.old.Key, u.old.Trailer, u.latest.Key, u.latest.Trailer)
	}
	if order <= 0 {
		*e = u.old
		e.Key = bytes.Clone(e.Key)
		u.isOld = u.older.Next(&u.old)
	} else {
		*e = u.latest
	}
	if order >= 0 {
		u.hasLatest = u.newer.Next(&u.latest)
	}
	return true
}

// Err implements btree.Input.
func (u *unionInput) Err() error {
	if err := u.older.Err(); err != nil {
		return err
	}
	return u.newer.Err()
}
