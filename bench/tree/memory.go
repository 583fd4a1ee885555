package tree

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"golang.org/x/sys/unix"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// memory is a data file without the file: pages and rows in one mapping. With it a merge costs what its processors do and
// nothing else. Pages that a merge replaces are used again by the next one.
type memory struct {
	size    int
	bytes   []byte
	end     page.ID
	free    []page.ID
	taken   []page.ID // by the merge under way
	written []bool    // by id
	rows    rowPages
}

// openMemory maps room for so many pages; only those that are touched take memory.
func openMemory(pageSize, pages int) (*memory, error) {
	bytes, err := unix.Mmap(-1, 0, pageSize*pages, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	return &memory{size: pageSize, bytes: bytes, end: 2, written: make([]bool, pages), rows: rowPages{size: pageSize}}, nil
}

func (m *memory) close() error { return unix.Munmap(m.bytes) }

// Page implements btree.Source.
func (m *memory) Page(id page.ID, _ int) ([]byte, error) {
	at := int(id) * m.size
	return m.bytes[at : at+m.size : at+m.size], nil
}

// Pages implements btree.BatchSource.
func (m *memory) Pages(ids []page.ID, level int, pages [][]byte) (err error) {
	for i, id := range ids {
		if pages[i], err = m.Page(id, level); err != nil {
			return err
		}
	}
	return nil
}

var errMemoryFull = errors.New("tree: the scenario's pages are used up")

// AllocExtent implements btree.Sink.
func (m *memory) AllocExtent(n int) (first page.ID, count int, err error) {
	if last := len(m.free) - 1; last >= 0 {
		first, m.free = m.free[last], m.free[:last]
		m.taken = append(m.taken, first)
		return first, 1, nil
	}
	if int(m.end)+n > len(m.written) {
		return 0, 0, errMemoryFull
	}
	first = m.end
	m.end += page.ID(n)
	for id := first; id < m.end; id++ {
		m.taken = append(m.taken, id)
	}
	return first, n, nil
}

// WritePage implements btree.Sink.
func (m *memory) WritePage(id page.ID, p []byte) error {
	copy(m.bytes[int(id)*m.size:], p)
	m.written[id] = true
	return nil
}

// input is a merge into base that keeps the newest versions only.
func (m *memory) input(base btree.Root, workers int) btree.MergeInput {
	return btree.MergeInput{
		Base: base, Checkpoint: 1, PageSize: m.size, Policy: btree.Policy{MinVisible: keys.MaxEpoch},
		Source: func() btree.Source { return m }, Sink: m, Values: &m.rows, Workers: btree.Always(workers),
	}
}

// put merges sorted entries, and frees the pages and blobs that the result does not need.
func (m *memory) put(base btree.Root, entries []btree.Entry) (btree.Root, error) {
	return m.settle(putAll(context.Background(), m.input(base, 1), entries))
}

// The result of a merge tells which pages were reserved and not written, and which pages it has replaced: both are taken back.
func (m *memory) settle(result *btree.Result, err error) (btree.Root, error) {
	if err != nil {
		return btree.Root{}, err
	}
	for _, id := range m.taken {
		if !m.written[id] {
			m.free = append(m.free, id)
		}
	}
	for _, id := range result.Freed {
		m.written[id] = false
	}
	m.free, m.taken = append(m.free, result.Freed...), m.taken[:0]
	return result.Root, nil
}

// digest is a checksum over every page of the tree with its place.
func (m *memory) digest(root btree.Root) (sum uint32, err error) {
	err = btree.Walk(m, root, &btree.Visitor{Page: func(id page.ID, _ int, p []byte) error {
		sum = crc32.Update(sum, crc32.IEEETable, binary.LittleEndian.AppendUint64(nil, uint64(id)))
		sum = crc32.Update(sum, crc32.IEEETable, p)
		return nil
	}})
	return sum, err
}

// holds counts the entries whose value the tree has.
func (m *memory) holds(root btree.Root, entries []btree.Entry) (right int, err error) {
	for i := range entries {
		v, ok, err := btree.Get(m, root, entries[i].Key, keys.MaxEpoch)
		if err != nil {
			return right, err
		}
		value := v.Value
		if ok && v.Large {
			if value, err = m.rows.value(page.Ref(v.Value)); err != nil {
				return right, err
			}
		}
		if ok && string(value) == string(entries[i].Value) {
			right++
		}
	}
	return right, nil
}

// rowPages packs values one after the other into pages, in the order in which they come: the least that storing values can cost.
type rowPages struct {
	size  int
	bytes []byte
	live  int
}

// Place implements btree.Values.
func (r *rowPages) Store(value []byte) (ref page.Ref, err error) {
	if left := r.size - len(r.bytes)%r.size; len(value) > left && len(value) <= r.size {
		r.bytes = append(r.bytes, make([]byte, left)...)
	}
	binary.LittleEndian.PutUint64(ref[:], uint64(len(r.bytes)))
	binary.LittleEndian.PutUint64(ref[8:], uint64(len(value)))
	r.bytes = append(r.bytes, value...)
	r.live += len(value)
	return ref, nil
}

// ReadAhead implements btree.Values.
func (r *rowPages) ReadAhead([]page.Ref) {}

// Drop implements btree.Values.
func (r *rowPages) Drop(ref page.Ref) error {
	r.live -= int(binary.LittleEndian.Uint64(ref[8:]))
	return nil
}

func (r *rowPages) value(ref page.Ref) ([]byte, error) {
	at, length := binary.LittleEndian.Uint64(ref[:]), binary.LittleEndian.Uint64(ref[8:])
	if at+length > uint64(len(r.bytes)) {
		return nil, fmt.Errorf("tree: reference %x leads nowhere", ref)
	}
	return r.bytes[at : at+length], nil
}

// fill is the part of the row pages that live rows take; 1 without any.
func (r *rowPages) fill() float64 {
	if len(r.bytes) == 0 {
		return 1
	}
	return float64(r.live) / float64(len(r.bytes))
}
