package wal

import (
	"fmt"
	"sync"

	"github.com/epochkv/epochkv/internal/invariants"
)

// BuffersMin is the least number of standard buffers: one that writers fill, one that the flusher writes,
// and one of a preallocated segment. A writer that needs another buffer waits for the flusher.
const BuffersMin = 3

// bufferPool hands out segment buffers: anonymous mappings that are zero, with every page touched, so that
// no page fault happens between a reservation and its publication.
//
// Invariant: a standard buffer is either with one segment or idle, never both: mapped <= max.
type bufferPool struct {
	size int // of a standard buffer; constant
	max  int // number of standard buffers; constant

	obtain func(size int) error // asked before memory is taken from the system; constant, nil but in tests, which refuse it

	mu     sync.Mutex
	mapped int          // standard buffers that exist
	idle   []usedBuffer // at most max; dirty up to used
	bytes  int64        // all mappings, oversized ones included

	lent map[*byte]bool // the standard buffers that are handed out; only with the tag invariants
}

type usedBuffer struct {
	buf  []byte
	used int
}

// take returns a standard buffer, or nil if all are in use.
func (p *bufferPool) take() ([]byte, error) {
	buf, err := p.takeAny()
	if invariants.Enabled && buf != nil && err == nil {
		p.assertLent(buf)
	}
	return buf, err
}

// takeAny is take without assertions.
func (p *bufferPool) takeAny() ([]byte, error) {
	p.mu.Lock()
	if n := len(p.idle); n > 0 {
		b := p.idle[n-1]
		p.idle = p.idle[:n-1]
		p.mu.Unlock()
		clear(b.buf[:b.used])
		return b.buf, nil
	}
	if p.mapped == p.max {
		p.mu.Unlock()
		return nil, nil
	}
	p.mapped++
	p.mu.Unlock()
	buf, err := p.mapZero(p.size)
	if err != nil {
		p.mu.Lock()
		p.mapped--
		p.mu.Unlock()
	}
	return buf, err
}

// put takes a standard buffer back. The next take clears the first used bytes, off the flusher's path.
func (p *bufferPool) put(buf []byte, used int) {
	if invariants.Enabled {
		p.assertReturned(buf)
	}
	p.mu.Lock()
	p.idle = append(p.idle, usedBuffer{buf, used})
	p.mu.Unlock()
}

// mapZero maps size bytes and touches them.
func (p *bufferPool) mapZero(size int) ([]byte, error) {
	var buf []byte
	err := p.allows(size)
	if err == nil {
		buf, err = reserveBuffer(size)
	}
	if err != nil {
		return nil, fmt.Errorf("wal: map a segment buffer of %d bytes: %w", size, err)
	}
	p.mu.Lock()
	p.bytes += int64(size)
	p.mu.Unlock()
	return buf, nil
}

func (p *bufferPool) allows(size int) error {
	if p.obtain == nil {
		return nil
	}
	return p.obtain(size)
}

func (p *bufferPool) unmap(buf []byte) error {
	p.mu.Lock()
	p.bytes -= int64(len(buf))
	p.mu.Unlock()
	return releaseBuffer(buf)
}

// mappedBytes is the memory of all buffers.
func (p *bufferPool) mappedBytes() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.bytes
}

// free unmaps the idle buffers.
func (p *bufferPool) free() (err error) {
	p.mu.Lock()
	idle := p.idle
	p.idle = nil
	p.mapped -= len(idle)
	p.mu.Unlock()
	for _, b := range idle {
		if e := p.unmap(b.buf); err == nil {
			err = e
		}
	}
	return err
}
