package wal

import (
	"fmt"
	"sync"
)

// BuffersMin is the least number of standard images: one that writers fill, one that the flusher empties, one spare. Who needs
// more than there are waits for the flusher.
const BuffersMin = 3

// images hands out the buffers of segments: anonymous mappings, zero, with every page touched, so that no page fault
// falls between a reservation and its publication.
type bufferPool struct {
	size int // of a standard image; constant
	max  int // number of standard images; constant

	obtain func(size int) error // asked before memory is taken from the system; constant, nil but in tests, which refuse it

	mu     sync.Mutex
	mapped int          // standard images that exist
	idle   []usedBuffer // at most max; dirty up to used
	bytes  int64        // all mappings, oversized ones included
}

type usedBuffer struct {
	buf  []byte
	used int
}

// take returns a standard image, or nil if all are in use.
func (p *bufferPool) take() ([]byte, error) {
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

// give takes a standard image back. The first used bytes are cleared by the next take, off the flusher's path.
func (p *bufferPool) put(buf []byte, used int) {
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
		return nil, fmt.Errorf("wal: map a segment image of %d bytes: %w", size, err)
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

// mappedBytes is the memory that images hold.
func (p *bufferPool) mappedBytes() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.bytes
}

// free unmaps the idle images.
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
