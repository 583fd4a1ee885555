package server

import (
	"context"
	"errors"
	"unsafe"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// executor is what one request at a time executes with: an engine session and the buffers that a
// write is built in. It is the attachment of its session, so that both are pooled together and a
// request in the steady state takes nothing from the heap.
type executor struct {
	admission *admission
	gate      *gate
	ctx       context.Context // of the current request; its connection is charged
	held      *memoryCharge   // for large values that the current request has read, until its answer is charged
	heldBytes int
	heldMax   int                   // an answer with large values of more bytes is full; 0: no bound
	admit     func(bytes int) error // admitLarge of this executor
	made      made
	attempt   attempt
	access    *access                // of the current request; nil if users were not checked when it began
	permit    func() error           // checkAgain of this executor
	touches   func(*mvcc.Touch) bool // hasNamed of this executor

	session *mvcc.Session
	now     func() uint64 // of the store's clock, in microseconds since 1970
	write   mvcc.Write
	invoked invocations
	request mvcc.Request // of toRequest
	scratch []byte       // that a request is encoded into

	keyBytes int   // of the first key, that details keep; constant
	noted    noted // of the current request
}

// takeExecutor takes a session from the store's pool, with its executor. The caller releases it.
func (s *Server) takeExecutor() (*executor, error) {
	session, err := s.store.Session()
	if err != nil {
		return nil, err
	}
	c, ok := session.Attachment.(*executor)
	if !ok {
		c = &executor{ctx: context.Background(), session: session, admission: &s.admission, now: s.store.Clock().Now, keyBytes: s.config.SlowRequests.KeyBytes}
		c.admit, c.permit, c.touches = c.admitLarge, c.checkAgain, c.hasNamed
		c.made.admitted = c.admitMade
		c.gate = &s.gate
		session.Attachment = c
	}
	session.AdmitLarge(c.admit)
	session.AdmitMade(c.made.admitted)
	session.Permit(c.permit)
	session.AssertTouches(c.touches)
	return c, nil
}

// checkAgain checks the rights of the current request again if the users have changed since the check. Commits ask it under their latches. What
// only reads asks it at its end: all that it has read was committed before, and it may have waited since the check.
func (c *executor) checkAgain() error { return c.gate.checkAgain(c.access) }

// hasNamed reports whether the current request has named what is touched. It is for assertions.
func (c *executor) hasNamed(t *mvcc.Touch) bool { return c.access.hasNamed(t) }

// identity is that of the caller for the records of requests; 0 if users are not checked.
func (c *executor) identity() uint32 {
	if u := c.access.user(); u != nil {
		return auth.RequestIdentity(u.Name)
	}
	return 0
}

// attempt says how reads wait. A read beyond its limit fails with mvcc.ErrWouldWait and leaves its
// snapshot open. It is then repeated, with a higher limit, in that snapshot: it sees what was written
// before it was tried first, and nothing else.
type attempt struct {
	limit   readLimit  // of gets and batches of gets; other operations have none
	begun   bool       // a read is between beginRead and endRead
	repeats bool       // the next read repeats one
	large   bool       // the last read that failed met a large value
	at      keys.Epoch // of the snapshot that is open
}

// readLimit is what reads do not do.
type readLimit uint8

const (
	readAny    readLimit = iota
	readSmall            // copy no large values
	readCached           // nor wait for the device
)

// beginRead opens the snapshot of a read: at an epoch, at a time, or the newest if both are zero.
func (c *executor) beginRead(at, atTime uint64) (err error) {
	a := &c.attempt
	if a.repeats {
		err = context.Cause(c.ctx) // the client may have waited in vain until now
	} else if at, err = c.epochAt(at, atTime); err == nil {
		a.at, err = c.session.OpenSnapshot(keys.Epoch(at))
	}
	if err == nil {
		a.begun, a.large = true, false
		c.session.SetWaits(a.limit != readCached)
	}
	return err
}

// epochAt is the epoch that a request names, with an epoch or a time. It waits for commits that are under way.
func (c *executor) epochAt(at, atTime uint64) (uint64, error) {
	if atTime == 0 {
		return at, nil
	}
	if at != 0 {
		return 0, errEpochAndTime
	}
	if c.attempt.limit == readCached {
		return 0, mvcc.ErrWouldWait
	}
	epoch, err := c.epochOf(c.ctx, atTime)
	return uint64(epoch), err
}

// epochOf is the epoch of a time. What it reads of the log counts until it returns.
func (c *executor) epochOf(ctx context.Context, atTime uint64) (keys.Epoch, error) {
	defer c.releaseCharge()
	return c.session.EpochAt(ctx, atTime)
}

// endRead closes the snapshot of a read, unless the read is to be repeated.
func (c *executor) endRead(err error) {
	a := &c.attempt
	a.begun = false
	c.session.SetWaits(true)
	if a.repeats = err != nil && a.limit != readAny && errors.Is(err, mvcc.ErrWouldWait); a.repeats {
		c.releaseCharge()
		return
	}
	c.session.CloseSnapshot()
}

// abandonRead closes the snapshot of a read that is not repeated after all.
func (c *executor) abandonRead() {
	c.attempt = attempt{}
	c.session.CloseSnapshot()
}

// tryFirst executes a read, at first without waiting: only a read that waits counts its session.
func (c *executor) tryFirst(execute func(*executor) (ackWait, error)) (ackWait, error) {
	c.attempt.limit = readCached
	w, err := execute(c)
	if !errors.Is(err, mvcc.ErrWouldWait) {
		return w, err
	}
	conn := connectionOf(c.ctx)
	if err := c.admission.holdSession(conn); err != nil {
		c.abandonRead()
		return w, err
	}
	defer c.admission.sessions.release(conn)
	c.attempt.limit = readAny
	return execute(c)
}

// admitLarge counts a large value before it is copied. Without it, many requests at once could each
// copy a large value before the first answer is counted.
func (c *executor) admitLarge(bytes int) error {
	if c.attempt.begun && c.attempt.limit != readAny {
		c.attempt.large = true
		return mvcc.ErrWouldWait
	}
	if c.heldMax > 0 && c.heldBytes > 0 && c.heldBytes+bytes > c.heldMax {
		return errAnswerFull
	}
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

// admitStep is how far an answer grows before it is counted again.
const admitStep = 64 << 10

// admitGrowing counts an answer of small values while it grows, in steps: of many that are made at once, each could otherwise become as large as an
// answer may be before the first of them is counted.
func (c *executor) admitGrowing(bytes int) error {
	if bytes < c.heldBytes+admitStep {
		return nil
	}
	return c.admitAnswer(bytes)
}

// made counts as a large write what a request makes beyond its own bytes until it is committed: the deletions of a range, values that are written
// again, or what a transaction has written before. The request may be small.
type made struct {
	admitted func(bytes int) error // admitMade of this executor
	conn     *connection
	bytes    int
	own      int // with which the request is admitted as a large write; 0: it is a small one
	before   int // made by the operations of the request before the one at hand
}

// begin says with how many bytes the request is admitted, until releaseMade.
func (m *made) begin(size int) {
	if shareOf(true, size) == shareLargeWrites {
		m.own = size
	}
}

// admitMade counts bytes of what is made, in steps. What is counted already stays so meanwhile: to give up the large slot would be the end of a turn.
func (c *executor) admitMade(bytes int) error { return c.countMade(bytes, c.admission.enterMade) }

// countMade is admitMade; enter finds room for the bytes, beside those that the request has as a large write already.
func (c *executor) countMade(bytes int, enter func(conn *connection, own, bytes int) error) error {
	m := &c.made
	if bytes += m.before; bytes <= max(m.bytes, smallRequestMax) {
		return nil
	}
	conn := connectionOf(c.ctx)
	if conn == nil {
		return nil
	}
	bytes += bytes / 4
	if err := enter(conn, m.own+m.bytes, bytes-m.bytes); err != nil {
		return err
	}
	m.conn, m.bytes = conn, bytes
	return nil
}

func (a *admission) enterMade(conn *connection, own, bytes int) error {
	if !a.enterBeside(conn, shareLargeWrites, own, bytes) {
		return errOverloaded
	}
	return nil
}

func (c *executor) releaseMade() {
	m := &c.made
	if m.bytes > 0 {
		c.admission.leaveBeside(m.conn, shareLargeWrites, m.own, m.bytes)
	}
	m.conn, m.bytes, m.own = nil, 0, 0
}

// forgetMade releases what all operations of a request have made.
func (c *executor) forgetMade() {
	c.releaseMade()
	c.made.before = 0
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
	c.forgetMade()
	c.request = mvcc.Request{}   // its Result refers to memory of the request
	c.ctx = context.Background() // the context of the request must not remain reachable
	c.attempt, c.access = attempt{}, nil
	c.takeDetails(new(details))
	c.forgetWrite()
	c.session.Close()
}

// memoryBytes is about what an executor keeps from one request to the next beside its session.
func (c *executor) memoryBytes() int {
	c.forgetWrite()
	c.request = mvcc.Request{} // as release does
	return c.write.MemoryBytes() + cap(c.scratch) + cap(c.invoked.ops)*invocationBytes
}

// invocationBytes is what each place of invocations takes.
const invocationBytes = int(unsafe.Sizeof(mvcc.Invoke{}) + unsafe.Sizeof(mvcc.Invoked{}))

// forgetBuffers gives up what memoryBytes counts.
func (c *executor) forgetBuffers() { c.write, c.scratch, c.invoked = mvcc.Write{}, nil, invocations{} }

// forgetWrite empties the write, and keeps no large buffers of it.
func (c *executor) forgetWrite() {
	if c.write.Reset(); c.write.MemoryBytes() > pooledBytesMax {
		c.write = mvcc.Write{}
	}
}
