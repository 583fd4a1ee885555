package blob

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// bag is the smallest durable index over blobs: a chain of pages with (name, reference), all rewritten by each
// checkpoint.
type bag struct {
	wasteful bool // every value is stored twice, and the same batch drops one of the two
	relocate int  // pages at the file end that a checkpoint relocates; 8 if it is zero

	p     *pager.Pager
	s     *Store
	refs  map[int]page.Ref
	index []page.ID
}

const bagFile = "data"

func createBag(fs vfs.FS, pageSize int) (*bag, error) {
	p, err := pager.Create(fs, bagFile, pager.Options{PageSize: pageSize})
	if err != nil {
		return nil, err
	}
	s, err := Open(&p.Reader)
	return &bag{p: p, s: s, refs: map[int]page.Ref{}}, err
}

func mustCreate(t testing.TB, fs vfs.FS, pageSize int) *bag {
	t.Helper()
	b, err := createBag(fs, pageSize)
	must(t, err)
	return b
}

// openBag opens the file and audits it.
func openBag(fs vfs.FS) (*bag, error) {
	p, err := pager.Open(fs, bagFile, pager.Options{})
	if err != nil {
		return nil, err
	}
	b := &bag{p: p, refs: map[int]page.Ref{}}
	if b.s, err = Open(&p.Reader); err == nil {
		err = errors.Join(b.load(), b.audit())
	}
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return b, nil
}

const (
	indexHead  = page.HeaderSize + 16 // next page, count
	indexEntry = 8 + page.RefSize
)

func (b *bag) load() error {
	buf := make([]byte, b.p.PageSize())
	for id := b.p.State().Root; id != 0; {
		if err := b.p.ReadPage(id, buf); err != nil {
			return err
		}
		b.index = append(b.index, id)
		id = page.ID(binary.LittleEndian.Uint64(buf[page.HeaderSize:]))
		for i := range int(binary.LittleEndian.Uint64(buf[page.HeaderSize+8:])) {
			e := buf[indexHead+i*indexEntry:]
			b.refs[int(binary.LittleEndian.Uint64(e))] = page.Ref(e[8:indexEntry])
		}
	}
	return nil
}

func (b *bag) audit() error {
	return b.p.Audit(func(reach func(page.ID) error) error {
		for _, id := range b.index {
			if err := reach(id); err != nil {
				return err
			}
		}
		return b.s.Audit(func(each func(page.Ref) error) error {
			for _, name := range slices.Sorted(maps.Keys(b.refs)) {
				if err := each(b.refs[name]); err != nil {
					return err
				}
			}
			return nil
		}, reach)
	})
}

// contents reads every value.
func (b *bag) contents() (map[int]string, error) {
	values := map[int]string{}
	for name, r := range b.refs {
		v, err := b.s.Append(nil, r, b.s.Direct())
		if err != nil {
			return nil, err
		}
		values[name] = string(v)
	}
	return values, nil
}

// change is what a checkpoint does: values by name, nil to remove.
type change map[int][]byte

func (b *bag) checkpoint(c change) error {
	ck, err := b.p.Begin()
	if err != nil {
		return err
	}
	defer ck.Abort()
	batch := b.s.Begin(ck)
	refs, index, err := b.build(ck, batch, c)
	if err != nil {
		return err
	}
	state := pager.State{Epoch: 1}
	if len(index) > 0 {
		state.Root = index[0]
	}
	if err := ck.Commit(context.Background(), state); err != nil {
		return err
	}
	b.refs, b.index = refs, index
	batch.Publish()
	return nil
}

// randomChange removes or stores up to n of forty values, of 100 to 400 bytes.
func randomChange(rng *rand.Rand, n int) change {
	c := change{}
	for range n {
		if name := rng.IntN(40); rng.IntN(5) < 2 {
			c[name] = nil
		} else {
			c[name] = value(name, rng.IntN(100), 100+rng.IntN(300))
		}
	}
	return c
}

func (b *bag) build(ck *pager.Checkpoint, batch *Batch, c change) (map[int]page.Ref, []page.ID, error) {
	refs := maps.Clone(b.refs)
	names := slices.Sorted(maps.Keys(c))
	for i, name := range names {
		if i%5 == 0 && ck.Number()%3 > 0 {
			var ahead []page.Ref
			for _, next := range names[i:min(i+5, len(names))] {
				ahead = append(ahead, b.refs[next])
			}
			batch.ReadAhead(ahead)
		}
		if i%7 == 3 && ck.Number()%2 == 1 { // every second checkpoint is prepared, so that all tests see both kinds
			if err := errors.Join(batch.Prepare(context.Background()), ck.Prepare()); err != nil {
				return nil, nil, err
			}
		}
		if i%7 == 5 && ck.Number()%4 == 1 {
			if err := batch.relieve(); err != nil {
				return nil, nil, err
			}
		}
		if old, ok := refs[name]; ok {
			if err := batch.Drop(old); err != nil {
				return nil, nil, err
			}
			delete(refs, name)
		}
		if c[name] != nil {
			if err := b.waste(batch, c[name]); err != nil {
				return nil, nil, err
			}
			r, err := batch.Store(c[name])
			if err != nil {
				return nil, nil, err
			}
			refs[name] = r
		}
	}
	if err := batch.Finish(context.Background(), ck.RelocateFrom(cmp.Or(b.relocate, 8))); err != nil {
		return nil, nil, err
	}
	index, err := b.writeIndex(ck, refs)
	return refs, index, err
}

// waste stores a value and drops it.
func (b *bag) waste(batch *Batch, value []byte) error {
	if !b.wasteful {
		return nil
	}
	r, err := batch.Store(value)
	if err != nil {
		return err
	}
	return batch.Drop(r)
}

func (b *bag) writeIndex(ck *pager.Checkpoint, refs map[int]page.Ref) ([]page.ID, error) {
	ck.Free(b.index...)
	perPage := (b.p.PageSize() - indexHead) / indexEntry
	var ids []page.ID
	for i := 0; i < len(refs); i += perPage {
		ids = append(ids, ck.AllocExtent(1).First)
	}
	w := ck.Writer()
	i := 0
	for names := range slices.Chunk(slices.Sorted(maps.Keys(refs)), perPage) {
		buf, err := w.Page(ids[i])
		if err != nil {
			return nil, err
		}
		page.PutHeader(buf, page.Header{Type: page.TypeLeaf, ID: ids[i], Checkpoint: ck.Number()})
		if i+1 < len(ids) {
			binary.LittleEndian.PutUint64(buf[page.HeaderSize:], uint64(ids[i+1]))
		}
		binary.LittleEndian.PutUint64(buf[page.HeaderSize+8:], uint64(len(names)))
		for j, name := range names {
			e := buf[indexHead+j*indexEntry:]
			binary.LittleEndian.PutUint64(e, uint64(name))
			r := refs[name]
			copy(e[8:], r[:])
		}
		page.Seal(buf)
		i++
	}
	return ids, w.Flush()
}

// value is n bytes that depend on name and round.
func value(name, round, n int) []byte {
	v := make([]byte, n)
	for i := range v {
		v[i] = byte(name*31 + round*17 + i + i>>8)
	}
	return v
}

func checkContents(b *bag, want map[int]string) error {
	got, err := b.contents()
	if err != nil {
		return err
	}
	for name := range want {
		if v, ok := got[name]; !ok || v != want[name] {
			return fmt.Errorf("value %d has %d bytes and is not the one of %d bytes that was put", name, len(got[name]), len(want[name]))
		}
	}
	if len(got) != len(want) {
		return fmt.Errorf("%d values, want %d", len(got), len(want))
	}
	return nil
}

// apply is what c does to a model.
func (c change) apply(m map[int]string) map[int]string {
	next := map[int]string{}
	maps.Copy(next, m)
	for name, v := range c {
		if delete(next, name); v != nil {
			next[name] = string(v)
		}
	}
	return next
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func nothing() int64 { return 0 }
