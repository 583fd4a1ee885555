package blob

import (
	"bytes"
	"errors"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAnAuditTellsLostSpaceFromOtherDamage: blobs to which nothing refers cost space. If anything else differs, too, they do not hide that.
func TestAnAuditTellsLostSpaceFromOtherDamage(t *testing.T) {
	for name, round := range map[string]struct {
		spoil func(*bag)
		space bool
	}{
		"nothing refers to a small blob":      {func(b *bag) { delete(b.refs, 1) }, true},
		"nothing refers to blobs with pages":  {func(b *bag) { delete(b.refs, 2); delete(b.refs, 3) }, true},
		"more bytes than in the accounts":     {func(b *bag) { delete(b.refs, 1); b.s.state.Bytes = 0 }, false},
		"more pages than in the accounts":     {func(b *bag) { delete(b.refs, 1); b.s.state.OverflowPages = 0 }, false},
		"more blobs in the accounts":          {func(b *bag) { delete(b.refs, 1); b.s.state.Blobs++ }, false},
		"only the accounts differ":            {func(b *bag) { b.s.state.Blobs++ }, false},
		"only their bytes differ":             {func(b *bag) { b.s.state.Bytes++ }, false},
		"more on a page than in the accounts": {func(b *bag) { delete(b.refs, 1); b.s.fill.put(b.pageOf(4), 1) }, false},
		"a page that is reachable twice":      {func(b *bag) { delete(b.refs, 1); b.index = append(b.index, b.pageOf(4)) }, false},
	} {
		b := mustCreate(t, vfs.NewMem(), 1024)
		must(t, b.checkpoint(change{1: bytes.Repeat([]byte("a"), 300), 2: bytes.Repeat([]byte("b"), 5000), 3: bytes.Repeat([]byte("c"), 9000), 4: bytes.Repeat([]byte("d"), 400)}))
		must(t, b.audit())
		round.spoil(b)
		if err := b.audit(); err == nil || errors.Is(err, ErrUnreferenced) != round.space {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// pageOf is the blob page of a value.
func (b *bag) pageOf(name int) page.ID {
	ref, _ := decodeRef(b.refs[name])
	return b.s.table.locationOf(ref.id).page()
}
