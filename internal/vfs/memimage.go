package vfs

import "io"

const (
	// memBlockSize is the unit in which images share memory.
	memBlockSize = 4096
	// sectorSize is the largest write that a crash does not tear.
	sectorSize = 512
)

// memBlock is a block of a file. Only the image that owns it may change it; for all other images it is constant.
type memBlock struct {
	owner *memImage
	data  [memBlockSize]byte
}

// zeroBlock is every block that is allocated and was never written. It has no owner.
var zeroBlock = new(memBlock)

// memImage is the contents of a file at one moment. Images share blocks and copy them on write, so that a sync and a
// crash copy pointers and not contents.
//
// Invariants: len(blocks)*memBlockSize >= size; a nil block is a hole; bytes at or beyond size are zero.
type memImage struct {
	size   int64
	blocks []*memBlock
	used   int // blocks that are not holes
}

func (m *memImage) clone() *memImage {
	return &memImage{size: m.size, used: m.used, blocks: append([]*memBlock(nil), m.blocks...)}
}

func blocksFor(size int64) int { return int((size + memBlockSize - 1) / memBlockSize) }

func (m *memImage) readAt(p []byte, off int64) (int, error) {
	n := 0
	for n < len(p) && off < m.size {
		at := int(off % memBlockSize)
		span := int(min(int64(len(p)-n), m.size-off, int64(memBlockSize-at)))
		if block := m.blocks[off/memBlockSize]; block != nil {
			copy(p[n:n+span], block.data[at:])
		} else {
			clear(p[n : n+span])
		}
		n, off = n+span, off+int64(span)
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// write stores p, growing the file as needed.
func (m *memImage) write(p []byte, off int64) {
	m.grow(off + int64(len(p)))
	for len(p) > 0 {
		at := int(off % memBlockSize)
		n := copy(m.own(int(off / memBlockSize)).data[at:], p)
		p, off = p[n:], off+int64(n)
	}
}

// own makes block i writable.
func (m *memImage) own(i int) *memBlock {
	old := m.blocks[i]
	if old != nil && old.owner == m {
		return old
	}
	block := &memBlock{owner: m}
	if old == nil {
		m.used++
	} else {
		block.data = old.data
	}
	m.blocks[i] = block
	return block
}

// grow makes the file at least size bytes long; the new part is a hole.
func (m *memImage) grow(size int64) {
	if size <= m.size {
		return
	}
	m.size = size
	for need := blocksFor(size); len(m.blocks) < need; {
		m.blocks = append(m.blocks, nil)
	}
}

func (m *memImage) truncate(size int64) {
	if size >= m.size {
		m.grow(size)
		return
	}
	blocks := blocksFor(size)
	for i, block := range m.blocks[blocks:] {
		if block != nil {
			m.used--
		}
		m.blocks[blocks+i] = nil
	}
	m.blocks, m.size = m.blocks[:blocks], size
	if at := int(size % memBlockSize); at != 0 && m.blocks[blocks-1] != nil {
		clear(m.own(blocks - 1).data[at:])
	}
}

// preallocate fills the holes of [0, size).
func (m *memImage) preallocate(size int64) {
	m.grow(size)
	for i := range m.blocks[:blocksFor(size)] {
		if m.blocks[i] == nil {
			m.blocks[i] = zeroBlock
			m.used++
		}
	}
}

// fits is how many bytes of [off, off+length), from off on, can be written with at most free more blocks.
func (m *memImage) fits(off, length int64, free int) int64 {
	end := off + length
	for at := off; at < end; at += memBlockSize - at%memBlockSize {
		if i := at / memBlockSize; int(i) < len(m.blocks) && m.blocks[i] != nil {
			continue
		}
		if free == 0 {
			return at - off
		}
		free--
	}
	return length
}

// revert makes block i, which is allocated, what it is in src: zeros if it is not allocated there.
func (m *memImage) revert(src *memImage, i int) {
	if i < len(src.blocks) && src.blocks[i] != nil {
		m.adopt(src, i, i+1)
		return
	}
	m.blocks[i] = zeroBlock
}

// adopt makes blocks [from, to) of m those of src, which may not change them in place any more.
func (m *memImage) adopt(src *memImage, from, to int) {
	for i := from; i < to; i++ {
		block := src.blocks[i]
		if block != nil && block.owner == src {
			block.owner = nil
		}
		m.blocks[i] = block
	}
}
