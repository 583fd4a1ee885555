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
type images struct {
	size int // of a standard image; constant
	max  int // number of standard images; constant

	obtain func(size int) error // asked before memory is taken from the system; constant, nil but in tests, which refuse it

	mu     sync.Mutex
	mapped int         // standard images that exist
	idle   []usedImage // at most max; dirty up to used
	bytes  int64       // all mappings, oversized ones included
}

type usedImage struct {
	buf  []byte
	used int
}

// take returns a standard image, or nil if all are in use.
func (p *images) take() ([]byte, error) {
	p.mu.Lock()
	if n := len(p.idle); n > 0 {
		img := p.idle[n-1]
		p.idle = p.idle[:n-1]
		p.mu.Unlock()
		clear(img.buf[:img.used])
		return img.buf, nil
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
func (p *images) give(buf []byte, used int) {
	p.mu.Lock()
	p.idle = append(p.idle, usedImage{buf, used})
	p.mu.Unlock()
}

// mapZero maps size bytes and touches them.
func (p *images) mapZero(size int) ([]byte, error) {
	var buf []byte
	err := p.allows(size)
	if err == nil {
		buf, err = reserveImage(size)
	}
	if err != nil {
		return nil, fmt.Errorf("wal: map a segment image of %d bytes: %w", size, err)
	}
	p.mu.Lock()
	p.bytes += int64(size)
	p.mu.Unlock()
	return buf, nil
}

func (p *images) allows(size int) error {
	if p.obtain == nil {
		return nil
	}
	return p.obtain(size)
}

func (p *images) unmap(buf []byte) error {
	p.mu.Lock()
	p.bytes -= int64(len(buf))
	p.mu.Unlock()
	return releaseImage(buf)
}

// mappedBytes is the memory that images hold.
func (p *images) mappedBytes() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.bytes
}

// free unmaps the idle images.
func (p *images) free() (err error) {
	p.mu.Lock()
	idle := p.idle
	p.idle = nil
	p.mapped -= len(idle)
	p.mu.Unlock()
	for _, img := range idle {
		if e := p.unmap(img.buf); err == nil {
			err = e
		}
	}
	return err
}
