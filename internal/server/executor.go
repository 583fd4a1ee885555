package server

import (
	"context"

	"github.com/epochkv/epochkv/internal/mvcc"
)

// executor is what one request at a time executes with: an engine session and the buffers that a
// write is built in. It is the attachment of its session, so that both are pooled together and a
// request in the steady state takes nothing from the heap.
type executor struct {
	admission *admission
	ctx       context.Context // of the current request; its connection is charged
	held      *memoryCharge   // for large values that the current request has read, until its answer is charged
	heldBytes int
	admit     func(bytes int) error // admitLarge of this executor

	session *mvcc.Session
	write   mvcc.Write
	invoked invocations
}

// takeExecutor takes a session from the store's pool, with its executor. The caller releases it.
func (s *Server) takeExecutor() (*executor, error) {
	session, err := s.store.Session()
	if err != nil {
		return nil, err
	}
	c, ok := session.Attachment.(*executor)
	if !ok {
		c = &executor{session: session, admission: &s.admission}
		c.admit = c.admitLarge
		session.Attachment = c
	}
	session.AdmitLarge(c.admit)
	return c, nil
}

// admitLarge counts a large value before it is copied. Without it, many requests at once could each
// copy a large value before the first answer is counted.
func (c *executor) admitLarge(bytes int) error {
	return c.admitAnswer(c.heldBytes + bytes)
}

// admitAnswer counts the bytes of the answer so far.
func (c *executor) admitAnswer(bytes int) (err error) {
	if bytes < countedBytesMin {
		return nil
	}
	c.heldBytes = max(c.heldBytes, bytes)
	c.held, err = c.admission.grow(c.held, connectionOf(c.ctx), c.heldBytes)
	return err
}

// takeCharge hands the charge of the request's large values over to count the answer, for
// admission.chargeAnswer.
func (c *executor) takeCharge() *memoryCharge {
	held := c.held
	c.held, c.heldBytes = nil, 0
	return held
}

// releaseCharge releases the charge of large values that no answer contains.
func (c *executor) releaseCharge() {
	if c.heldBytes > 0 {
		c.held.release()
		c.held, c.heldBytes = nil, 0
	}
}

// release returns the executor to the pool with its session, in whatever state the request left it.
// Buffers of rare huge requests are not pooled.
func (c *executor) release() {
	c.releaseCharge()
	c.ctx = context.Background() // the context of the request must not remain reachable
	if c.write.Reset(); c.write.Batch.MemoryBytes() > pooledBytesMax {
		c.write = mvcc.Write{}
	}
	c.session.Close()
}
