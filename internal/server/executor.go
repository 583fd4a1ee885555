package server

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/mvcc"
)

// executor is what one request at a time executes with: an engine session and the buffers that a
// write is built in. Callers are pooled, so that a request in the steady state takes nothing from
// the heap and nothing from the engine's pool.
type executor struct {
	admission *admission
	ctx       context.Context // of the request at hand; its connection is charged
	held      *memoryCharge   // for large values that the request at hand has read, until its answer is charged
	heldBytes int

	session *mvcc.Session
	write   mvcc.Write
	invoked invocations
}

// executorsIdleMax bounds the pool. More sessions than this at once are a burst; theirs go back to
// the engine.
const executorsIdleMax = 256

// executorPool is the pool, newest first: the buffers used last are the warmest.
type executorPool struct {
	store     *mvcc.Store
	admission *admission
	open      atomic.Int64 // in use or idle

	mu     sync.Mutex
	idle   []*executor
	closed bool
}

func (p *executorPool) take() (*executor, error) {
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
	c := &executor{session: session, admission: p.admission}
	session.AdmitLarge(c.admitLarge)
	return c, nil
}

// admitLarge counts a large value before it is copied: requests that read such values at once would
// hold as many of them as there are requests before the first answer is counted.
func (c *executor) admitLarge(bytes int) error {
	return c.admitAnswer(c.heldBytes + bytes)
}

// admitAnswer counts what the answer has come to so far.
func (c *executor) admitAnswer(bytes int) (err error) {
	if bytes < countedBytesMin {
		return nil
	}
	c.heldBytes = max(c.heldBytes, bytes)
	c.held, err = c.admission.grow(c.held, connectionOf(c.ctx), c.heldBytes)
	return err
}

// releaseCharge ends what the request's large values count: they are counted as its answer, or gone.
func (c *executor) releaseCharge() {
	if c.heldBytes > 0 {
		c.held.release()
		c.held, c.heldBytes = nil, 0
	}
}

// release takes the executor back, whatever state its request left it in.
func (p *executorPool) release(c *executor) {
	c.releaseCharge()
	c.ctx = context.Background() // it must not keep the request's
	c.session.CloseSnapshot()
	c.trim()
	p.mu.Lock()
	if !p.closed && len(p.idle) < executorsIdleMax {
		p.idle = append(p.idle, c)
		p.mu.Unlock()
		return
	}
	p.mu.Unlock()
	p.end(c)
}

// trim keeps the pool from holding what a few huge requests needed.
func (c *executor) trim() {
	c.session.Trim()
	if c.write.Reset(); c.write.Batch.MemoryBytes() > pooledBytesMax {
		c.write = mvcc.Write{}
	}
}

func (p *executorPool) end(c *executor) {
	p.open.Add(-1)
	c.session.AdmitLarge(nil)
	c.session.Close()
}

// close ends the idle executors; those in use end when they are released.
func (p *executorPool) close() {
	p.mu.Lock()
	idle := p.idle
	p.idle, p.closed = nil, true
	p.mu.Unlock()
	for _, c := range idle {
		p.end(c)
	}
}
