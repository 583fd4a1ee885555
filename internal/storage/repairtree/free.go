package repairtree

import (
	"bytes"
	"context"
	"errors"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
)

// Blobs are the large values, for freeing those of a tree.
type Blobs struct {
	Drop  Dropper // nil: the blobs stay
	Store *blob.Store
}

// Dropper is the part of blob.Batch that Blobs needs.
type Dropper interface {
	Drop(ref page.Ref) error
}

// FreeUnused frees the trees that were abandoned before a merge. It reports whether all of their pages were found.
func (s *Tree) FreeUnused(ctx context.Context, p *pager.Reader, ck *pager.Checkpoint, blobs Blobs) (complete bool, err error) {
	if s == nil {
		return true, nil
	}
	complete = true
	for _, root := range s.unused {
		whole, err := freeTree(ctx, p, ck, blobs, root, s.root)
		if err != nil {
			return false, err
		}
		complete = complete && whole
	}
	return complete, nil
}

// freeTree frees the pages of a tree that the repair tree and its mirror do not need any more, and its blobs. same is the
// tree of the two that is left: it has the same versions.
//
// A page that cannot be read is corrected if one flipped bit explains its damage. That a page is right is not certain then:
// so everything from there on is freed only if each leaf has the versions of the other tree, and each of its values is
// stored once more. Of a page with more damage, the blobs that a leaf names, and all that an inner node names, stay allocated.
func freeTree(ctx context.Context, p *pager.Reader, ck *pager.Checkpoint, blobs Blobs, root, same btree.Root) (complete bool, err error) {
	f := &freer{source: correcting{Direct: pagesource.NewDirect(p)}, ck: ck, blobs: blobs, others: pagesource.WholeTree{Pager: p}, same: same}
	complete = true
	err = btree.Walk(&f.source, root, &btree.Visitor{
		Page: func(id page.ID, level int, buf []byte) error {
			if err := ctx.Err(); err != nil {
				return err
			}
			return f.page(id, level, buf)
		},
		Damaged: func(id page.ID, level int, _, _ *page.Separator, err error) error {
			if !pagesource.IsDamage(err) {
				return err
			}
			if id != f.last { // else the page itself was readable, and was freed
				f.free(id)
			}
			complete = complete && level == 0
			return nil
		},
	})
	if errors.Is(err, errNotSame) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return complete, f.freeDoubtful()
}

// errNotSame means that a page was not corrected to what it was.
var errNotSame = errors.New("a corrected page differs from the other tree")

// freer frees one tree.
type freer struct {
	source correcting
	ck     *pager.Checkpoint
	blobs  Blobs
	others pagesource.WholeTree
	same   btree.Root
	last   page.ID // the last page that was freed
	key    []byte
	value  []byte

	pages []page.ID  // since the first corrected page
	refs  []page.Ref // since the first corrected page
}

// doubts reports whether a page was corrected.
func (f *freer) doubts() bool { return f.source.corrected }

func (f *freer) free(id page.ID) {
	f.last = id
	if f.doubts() {
		f.pages = append(f.pages, id)
		return
	}
	f.ck.Free(id)
}

// page frees a page, and the blobs of a leaf.
func (f *freer) page(id page.ID, level int, buf []byte) error {
	f.free(id)
	if level > 0 || f.blobs.Drop == nil {
		return nil
	}
	view := page.Leaf(buf).Layout()
	for i := range view.Count() {
		suffix, t, inline, large := view.At(i)
		if i == 0 || len(suffix) > 0 {
			f.key = append(append(f.key[:0], view.Prefix()...), suffix...)
		}
		if f.doubts() {
			if err := f.compare(t, inline, large); err != nil {
				return err
			}
		} else if large {
			if err := f.drop(page.RefOf(inline)); err != nil {
				return err
			}
		}
	}
	return nil
}

// compare compares a version of f.key with that of the other tree. A value that cannot be read stays allocated.
func (f *freer) compare(t keys.Trailer, inline []byte, large bool) error {
	v, ok, err := btree.Get(f.others, f.same, f.key, t.Epoch())
	if err != nil && !pagesource.IsDamage(err) {
		return err
	}
	if err != nil || !ok || v.Epoch != t.Epoch() || v.Kind != t.Kind() || v.Large != large || len(v.Value) != len(inline) {
		return errNotSame
	}
	if !large {
		if !bytes.Equal(v.Value, inline) {
			return errNotSame
		}
		return nil
	}
	ref, other := page.RefOf(inline), page.RefOf(v.Value)
	if ref == other || !blob.SameValue(ref, other) {
		return errNotSame
	}
	if f.value, err = f.blobs.Store.Append(f.value[:0], ref, f.blobs.Store.Direct()); err == nil {
		f.refs = append(f.refs, ref)
	} else if !pagesource.IsDamage(err) && !errors.Is(err, blob.ErrBadRef) {
		return err
	}
	return nil
}

// freeDoubtful frees everything since the first corrected page: it has passed the comparison.
func (f *freer) freeDoubtful() error {
	f.ck.Free(f.pages...)
	for _, ref := range f.refs {
		if err := f.drop(ref); err != nil {
			return err
		}
	}
	return nil
}

// drop drops a blob, unless it is damaged.
func (f *freer) drop(ref page.Ref) error {
	if err := f.blobs.Drop.Drop(ref); err != nil && !pagesource.IsDamage(err) { // the walk would take it for damage of the page
		return err
	}
	return nil
}

// correcting is a source that corrects pages with one flipped bit.
type correcting struct {
	*pagesource.Direct
	corrected bool // at least one page was
}

// Page implements btree.Source.
func (c *correcting) Page(id page.ID, level int) ([]byte, error) {
	p, err := c.Direct.Page(id, level)
	if err == nil || !pagesource.IsDamage(err) {
		return p, err
	}
	if p = c.Correct(id); p == nil {
		return nil, err
	}
	c.corrected = true
	return p, nil
}
