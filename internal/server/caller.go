package server

import (
	"sync"
	"sync/atomic"

	"epochkv/internal/mvcc"
)

// caller is what one request at a time executes with: an engine session and the buffers that a write is built in. Callers
// are pooled, so that a request in the steady state takes nothing from the heap and nothing from the engine's pool.
type caller struct {
	session *mvcc.Session
	write   mvcc.Write
	invoked invocations
}

// callersIdleMax bounds the pool. More sessions than this at once are a burst; theirs go back to the engine.
const callersIdleMax = 256

// callers is the pool, newest first: the buffers used last are the warmest.
type callers struct {
	store *mvcc.Store
	open  atomic.Int64 // in use or idle

	mu     sync.Mutex
	idle   []*caller
	closed bool
}

func (p *callers) take() (*caller, error) {
	p.mu.Lock()
	if n := len(p.idle); n > 0 {
		c := p.idle[n-1]
		p.idle = p.idle[:n-1]
		p.mu.Unlock()
		return c, nil
	}
	p.mu.Unlock()
	session, err := p.store.Session()
	if err != nil {
		return nil, err
	}
	p.open.Add(1)
	return &caller{session: session}, nil
}

// release takes the caller back, whatever state its request left it in.
func (p *callers) release(c *caller) {
	c.session.Done()
	c.trim()
	p.mu.Lock()
	if !p.closed && len(p.idle) < callersIdleMax {
		p.idle = append(p.idle, c)
		p.mu.Unlock()
		return
	}
	p.mu.Unlock()
	p.end(c)
}

// trim keeps the pool from holding what a few huge requests needed.
func (c *caller) trim() {
	c.session.Trim()
	if c.write.Reset(); c.write.Batch.Held() > keepBytesMax {
		c.write = mvcc.Write{}
	}
}

func (p *callers) end(c *caller) {
	p.open.Add(-1)
	c.session.Close()
}

// close ends the idle callers; those in use end when they are released.
func (p *callers) close() {
	p.mu.Lock()
	idle := p.idle
	p.idle, p.closed = nil, true
	p.mu.Unlock()
	for _, c := range idle {
		p.end(c)
	}
}
