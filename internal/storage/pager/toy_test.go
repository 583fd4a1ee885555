package pager

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// toy is the smallest tree there is: a root page that lists leaf pages, each of which holds one number. A checkpoint rewrites
// the root and the leaves that change.
type toy struct {
	p      *Pager          // nil if the toy is only read
	r      *Reader         // of its state
	leaves map[int]toyLeaf // by slot
	root   page.ID
}

type toyLeaf struct {
	id    page.ID
	value uint64
}

const toyFile = "data"

func toySlots(pageSize int) int { return (pageSize - page.HeaderSize) / 24 }

func createToy(t testing.TB, fs vfs.FS, pageSize int) *toy {
	t.Helper()
	p, err := Create(fs, toyFile, Options{PageSize: pageSize})
	if err != nil {
		t.Fatal(err)
	}
	return &toy{p: p, r: &p.Reader, leaves: map[int]toyLeaf{}}
}

// openToy opens the file, reads every page of the newest state and audits.
func openToy(fs vfs.FS) (*toy, error) {
	p, err := Open(fs, toyFile, Options{})
	if err != nil {
		return nil, err
	}
	y := &toy{p: p, r: &p.Reader, leaves: map[int]toyLeaf{}, root: p.State().Root}
	if err := errors.Join(y.load(), y.audit()); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return y, nil
}

func (y *toy) load() error {
	if y.root == 0 {
		return nil
	}
	buf := make([]byte, y.r.PageSize())
	if err := y.r.ReadPage(y.root, buf); err != nil {
		return err
	}
	for i := range toySlots(len(buf)) {
		at := page.HeaderSize + i*24
		if id := page.ID(binary.LittleEndian.Uint64(buf[at:])); id != 0 {
			y.leaves[i] = toyLeaf{id, binary.LittleEndian.Uint64(buf[at+8:])}
		}
	}
	var ids []page.ID
	var want []uint64
	for _, l := range y.leaves {
		ids, want = append(ids, l.id), append(want, l.value)
	}
	return y.r.readEach(ids, func(i int, buf []byte) error {
		if got := binary.LittleEndian.Uint64(buf[page.HeaderSize:]); got != want[i] {
			return fmt.Errorf("page %d holds %d, want %d", ids[i], got, want[i])
		}
		return nil
	})
}

func (y *toy) audit() error {
	return y.p.Audit(y.reachable)
}

func (y *toy) reachable(each func(page.ID) error) error {
	if y.root == 0 {
		return nil
	}
	err := each(y.root)
	for _, l := range y.leaves {
		err = errors.Join(err, each(l.id))
	}
	return err
}

// contents is the numbers in the toy, by slot.
func (y *toy) contents() map[int]uint64 {
	m := map[int]uint64{}
	for i, l := range y.leaves {
		m[i] = l.value
	}
	return m
}

// checkpoint writes value to the slots of set and empties those of del. epoch is stored in the state.
func (y *toy) checkpoint(epoch uint64, set, del []int, value uint64) error {
	ck, err := y.p.Begin()
	if err != nil {
		return err
	}
	defer ck.Abort()
	next, root, err := y.build(ck, set, del, value)
	if err != nil {
		return err
	}
	if err := ck.Commit(context.Background(), State{Epoch: keys.Epoch(epoch), Root: root, Height: 2}); err != nil {
		return err
	}
	y.leaves, y.root = next, root
	return nil
}

func (y *toy) build(ck *Checkpoint, set, del []int, value uint64) (map[int]toyLeaf, page.ID, error) {
	next := map[int]toyLeaf{}
	for i, l := range y.leaves {
		next[i] = l
	}
	for _, i := range del {
		if l, ok := next[i]; ok {
			ck.Free(l.id)
			delete(next, i)
		}
	}
	if err := prepare(ck); err != nil {
		return nil, 0, err
	}
	limit := ck.RelocateFrom(4)
	for i := range toySlots(y.p.PageSize()) {
		if l, ok := next[i]; ok && limit != 0 && l.id >= limit {
			if err := y.put(ck, next, i, l.value); err != nil {
				return nil, 0, err
			}
		}
	}
	for _, i := range set {
		if err := y.put(ck, next, i, value); err != nil {
			return nil, 0, err
		}
	}
	if err := prepare(ck); err != nil {
		return nil, 0, err
	}
	if y.root != 0 {
		ck.Free(y.root)
	}
	root, err := y.writeRoot(ck, next)
	return next, root, err
}

// prepare prepares every second checkpoint, so that all tests of checkpoints see both kinds.
func prepare(ck *Checkpoint) error {
	if ck.Number()%2 == 0 {
		return nil
	}
	return ck.Prepare()
}

func (y *toy) put(ck *Checkpoint, next map[int]toyLeaf, slot int, value uint64) error {
	if l, ok := next[slot]; ok {
		ck.Free(l.id)
	}
	e := ck.AllocExtent(3) // two more than are used
	next[slot] = toyLeaf{e.First, value}
	return writeToyPage(ck, page.TypeLeaf, e.First, func(p []byte) { binary.LittleEndian.PutUint64(p, value) })
}

func (y *toy) writeRoot(ck *Checkpoint, leaves map[int]toyLeaf) (page.ID, error) {
	id := ck.AllocExtent(1).First
	return id, writeToyPage(ck, page.TypeInner, id, func(p []byte) {
		for i, l := range leaves {
			binary.LittleEndian.PutUint64(p[i*24:], uint64(l.id))
			binary.LittleEndian.PutUint64(p[i*24+8:], l.value)
		}
	})
}

func writeToyPage(ck *Checkpoint, t page.Type, id page.ID, fill func(payload []byte)) error {
	w := ck.Writer()
	buf, err := w.Page(id)
	if err != nil {
		return err
	}
	page.PutHeader(buf, page.Header{Type: t, ID: id, Checkpoint: ck.Number()})
	fill(buf[page.HeaderSize:])
	page.Seal(buf)
	return w.Flush()
}
