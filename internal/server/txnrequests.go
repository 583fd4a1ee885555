package server

// The requests of a transaction stream: what each is, and how it is executed.

import (
	"cmp"
	"context"
	"errors"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/audit"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// execute does one request. It returns the transaction that is open after it, marked busy, and the
// charge of large values of the answer.
func (c *transactionStream) execute(req *pb.TransactRequest, out *pb.TransactResponse) (row *openTxn, held *memoryCharge, w ackWait, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over != nil {
		c.code = statusOf(c.over).Code()
		return nil, nil, w, errStreamOver
	}
	c.busy = true
	if begin, ok := req.Request.(*pb.TransactRequest_Begin); ok {
		err = c.begin(begin.Begin, out)
	} else {
		w, err = c.within(req, out)
	}
	err = detached(err)
	if c.txn != nil {
		c.txn.Trim()
		c.executor.takeDetails(&c.spent)
		held = c.executor.takeCharge()
		c.row.requests.Add(1)
		c.row.busy.Store(true)
		err = cmp.Or(err, c.resizeLocked())
		c.executor.releaseMade() // which resizeLocked has counted
		c.failLocked(err)
	}
	return c.row, held, w, err
}

// resizeLocked counts what the transaction has. If there is no room for it, it has nothing any more and fails, so that it can only be rolled back: the
// transactions of other clients would fail until its own client rolls it back.
func (c *transactionStream) resizeLocked() error {
	recorded, err := c.server.transactions.memory.resize(c.row, c.txn.Size())
	if !recorded {
		c.txn.Discard()
		_, _ = c.server.transactions.memory.resize(c.row, c.txn.Size())
	}
	return err
}

// failLocked stores the first error of the open transaction.
func (c *transactionStream) failLocked(err error) {
	if c.txn != nil && c.failed == nil {
		c.failed = err
	}
}

func (c *transactionStream) begin(req *pb.BeginRequest, out *pb.TransactResponse) error {
	s := c.server
	switch {
	case c.txn != nil:
		return errBegunAlready
	case s.drain.active.Load():
		return errShuttingDown
	}
	o, err := toTxnOptions(req)
	if err != nil {
		return err
	}
	row := &openTxn{
		id: s.store.NextSnapshotID(), conn: c.conn, peer: c.peer, isolation: wireIsolation(o.Isolation), readOnly: o.ReadOnly, durability: o.Durability, begun: time.Now(),
	}
	row.end = func(why error, reason telemetry.AbortReason) { c.end(row, why, reason) }
	row.idleSince.Store(int64(s.clock.now()))
	limiter := c.access.operation.limiter()
	if err := limiter.Open(auth.Transactions); err != nil {
		return err
	}
	executor, txn, err := s.beginTransaction(c.stream.Context(), c.conn, o, req.GetSnapshotTimeUs())
	if err != nil {
		limiter.Close(auth.Transactions)
		return err
	}
	row.limiter = limiter
	row.at, executor.ctx, executor.access = txn.At(), c.stream.Context(), c.access.operation
	row.ctx, row.stop = context.WithCancelCause(c.stream.Context())
	s.transactions.enter(row)
	c.executor, c.txn, c.row, c.failed = executor, txn, row, nil
	c.access.begun()
	c.timer = time.AfterFunc(min(s.transactions.idle, s.transactions.total), func() { c.expire(row) })
	out.Response = &pb.TransactResponse_Begin{Begin: &pb.BeginResponse{Id: row.id, ReadEpoch: uint64(row.at)}}
	return nil
}

// beginTransaction begins a transaction that has a reserved entry in the table, with a session of its own.
func (s *Server) beginTransaction(ctx context.Context, conn *connection, o mvcc.TxnOptions, atTime uint64) (*executor, *mvcc.Txn, error) {
	if err := s.transactions.reserve(conn); err != nil {
		return nil, nil, err
	}
	executor, err := s.takeExecutor()
	if err != nil {
		s.transactions.cancel(conn)
		return nil, nil, err
	}
	if atTime != 0 {
		executor.ctx = ctx
		o.At, err = executor.epochOf(ctx, atTime)
	}
	var txn *mvcc.Txn
	if err == nil {
		txn, err = executor.session.Begin(o)
	}
	if err != nil {
		executor.release()
		s.transactions.cancel(conn)
	}
	return executor, txn, err
}

// within executes a request in the open transaction.
func (c *transactionStream) within(req *pb.TransactRequest, out *pb.TransactResponse) (ackWait, error) {
	if c.txn == nil {
		return ackWait{}, errNotBegun
	}
	switch r := req.Request.(type) {
	case *pb.TransactRequest_Commit:
		return c.commit(r.Commit, out)
	case *pb.TransactRequest_Rollback:
		reason := telemetry.AbortRollback
		if c.failed != nil {
			reason = telemetry.AbortFailed
		}
		c.abortLocked(reason)
		out.Response = &pb.TransactResponse_Rollback{Rollback: new(pb.RollbackResponse)}
		return ackWait{}, nil
	case *pb.TransactRequest_RollbackTo:
		if err := c.txn.RollbackTo(int(min(r.RollbackTo.GetSavepoint(), maxSavepoint))); err != nil {
			return ackWait{}, err
		}
		c.failed = nil
		out.Response = &pb.TransactResponse_RollbackTo{RollbackTo: new(pb.RollbackToResponse)}
		return ackWait{}, nil
	}
	if c.failed != nil {
		return ackWait{}, &txnFailedError{cause: c.failed}
	}
	if transactWrites(req) || c.row.keepsReads() {
		if err := c.server.transactions.memory.admit(c.row, req.SizeVT()); err != nil {
			return ackWait{}, err
		}
	}
	err := c.operate(req, out)
	return ackRead(c.unacknowledged()), err
}

// maxSavepoint keeps a savepoint's number an int.
const maxSavepoint = 1 << 31

// unacknowledged is the epoch that must be durable before an answer may show what the transaction
// has read.
func (c *transactionStream) unacknowledged() keys.Epoch {
	if await := c.txn.Await(); await > c.server.store.Durable() {
		return await
	}
	return 0
}

// operate executes one read or write.
func (c *transactionStream) operate(req *pb.TransactRequest, out *pb.TransactResponse) error {
	switch r := req.Request.(type) {
	case *pb.TransactRequest_Get:
		m, err := txnGet(c.txn, r.Get)
		out.Response = &pb.TransactResponse_Get{Get: m}
		return err
	case *pb.TransactRequest_BatchGet:
		m, err := txnBatchGet(c.row.ctx, c.txn, r.BatchGet, &c.server.limits, c.executor.admitGrowing)
		out.Response = &pb.TransactResponse_BatchGet{BatchGet: m}
		return err
	case *pb.TransactRequest_Scan:
		m, err := txnScan(c.row.ctx, c.txn, r.Scan, c.executor.admitGrowing)
		out.Response = &pb.TransactResponse_Scan{Scan: m}
		return err
	case *pb.TransactRequest_Write:
		m, err := txnWriteAll(c.txn, r.Write)
		out.Response = &pb.TransactResponse_Write{Write: m}
		return err
	case *pb.TransactRequest_DeleteRange:
		m, err := txnDeleteRange(c.row.ctx, c.txn, r.DeleteRange)
		out.Response = &pb.TransactResponse_DeleteRange{DeleteRange: m}
		return err
	case *pb.TransactRequest_Invoke:
		m, err := txnInvoke(c.txn, r.Invoke)
		out.Response = &pb.TransactResponse_Invoke{Invoke: m}
		return err
	case *pb.TransactRequest_Savepoint:
		n, err := c.txn.Savepoint()
		out.Response = &pb.TransactResponse_Savepoint{Savepoint: &pb.SavepointResponse{Savepoint: uint64(n)}}
		return err
	}
	return invalid("request", "is missing, or of a kind that this server does not know")
}

// commit commits the transaction or rolls it back, and ends it. A failed transaction remains open
// until its client rolls it back; the error of its requests says so.
func (c *transactionStream) commit(req *pb.CommitRequest, out *pb.TransactResponse) (ackWait, error) {
	if c.failed != nil {
		return ackWait{}, &txnFailedError{cause: c.failed}
	}
	request, err := c.executor.toRequest(req, recordCommit)
	if err != nil {
		return ackWait{}, err
	}
	if err := c.executor.countMade(c.txn.WriteBytes(), c.awaitRoom); err != nil { // until the executor is released
		return ackWait{}, err
	}
	at, durability := c.txn.At(), c.row.durability
	if c.executor.access, err = c.access.commit(c.txn); err != nil {
		return ackWait{}, c.endFailedLocked(err)
	}
	if s := c.server; s.observer.audit.log != nil {
		if c.spent.note, err = s.noteRequest(c.row.ctx, c.access.operation, audit.ClassWrite, &rowOfTxn, c.txn, nil); err != nil {
			return ackWait{}, c.endFailedLocked(err)
		}
	}
	epoch, err := c.txn.CommitRequest(c.row.ctx, request) // which ends waits only, once the commit has an epoch
	w, err := c.executor.outcome(ackWait{}.revealing(c.txn.Await()), err)
	if before, again, ok := c.executor.before(err, durability); ok {
		c.server.transactions.committed.Add(1)
		c.releaseLocked()
		out.Response = &pb.TransactResponse_Commit{Commit: &pb.CommitResponse{Epoch: uint64(before.Epoch), Deduplicated: true}}
		return again.revealing(w.epoch), nil
	}
	if err != nil {
		return w, c.endFailedLocked(err)
	}
	c.server.transactions.committed.Add(1)
	c.releaseLocked()
	if epoch == at {
		epoch = 0 // nothing was written
	}
	c.at.epoch = uint64(epoch)
	out.Response = &pb.TransactResponse_Commit{Commit: &pb.CommitResponse{Epoch: uint64(epoch)}}
	return ackCommit(epoch, durability).revealing(w.epoch), nil
}

// endFailedLocked ends a transaction whose commit has failed with err, and returns err. What has ended its context rolls it back, and ends the stream
// with the reason.
func (c *transactionStream) endFailedLocked(err error) error {
	if c.row.ctx.Err() == nil {
		c.server.transactions.aborted[abortReason(err)].Add(1)
		c.releaseLocked()
	}
	return err
}

func abortReason(err error) telemetry.AbortReason {
	var conflict *mvcc.ConflictError
	if errors.As(err, &conflict) {
		return telemetry.AbortConflict
	}
	return telemetry.AbortFailed
}

func toTxnOptions(req *pb.BeginRequest) (o mvcc.TxnOptions, err error) {
	o.ReadOnly, o.At = req.GetReadOnly(), keys.Epoch(req.GetSnapshotEpoch())
	if (o.At != 0 || req.GetSnapshotTimeUs() != 0) && !o.ReadOnly {
		return o, errNoSnapshotHere
	}
	if o.At != 0 && req.GetSnapshotTimeUs() != 0 {
		return o, errEpochAndTime
	}
	switch req.GetIsolation() {
	case pb.Isolation_ISOLATION_UNSPECIFIED, pb.Isolation_ISOLATION_SERIALIZABLE:
		o.Isolation = mvcc.IsolationSerializable
	case pb.Isolation_ISOLATION_SNAPSHOT:
		o.Isolation = mvcc.IsolationSnapshot
	default:
		return o, invalid("isolation", "is not known to this server")
	}
	o.Durability, err = toDurability(req.GetDurability())
	return o, err
}

func wireIsolation(i mvcc.Isolation) pb.Isolation {
	if i == mvcc.IsolationSnapshot {
		return pb.Isolation_ISOLATION_SNAPSHOT
	}
	return pb.Isolation_ISOLATION_SERIALIZABLE
}

// transactOperation is the name of a request of a transaction.
func transactOperation(req *pb.TransactRequest) string {
	switch req.Request.(type) {
	case *pb.TransactRequest_Begin:
		return "Begin"
	case *pb.TransactRequest_Get:
		return "Get"
	case *pb.TransactRequest_BatchGet:
		return "BatchGet"
	case *pb.TransactRequest_Scan:
		return "Scan"
	case *pb.TransactRequest_Write:
		return "Write"
	case *pb.TransactRequest_DeleteRange:
		return "DeleteRange"
	case *pb.TransactRequest_Invoke:
		return "Invoke"
	case *pb.TransactRequest_Savepoint:
		return "Savepoint"
	case *pb.TransactRequest_RollbackTo:
		return "RollbackTo"
	case *pb.TransactRequest_Commit:
		return "Commit"
	case *pb.TransactRequest_Rollback:
		return "Rollback"
	}
	return "Unknown"
}

// transactWrites and transactReads say how a request counts. The answer to a read is refused if it
// does not fit, which fails the transaction; a write is not executed then.
func transactWrites(req *pb.TransactRequest) bool {
	switch req.Request.(type) {
	case *pb.TransactRequest_Write, *pb.TransactRequest_DeleteRange, *pb.TransactRequest_Invoke:
		return true
	}
	return false
}

// transactBytes is what a request of so many encoded bytes is admitted with.
func transactBytes(req *pb.TransactRequest, size int) int {
	switch r := req.Request.(type) {
	case *pb.TransactRequest_Write:
		size += len(r.Write.GetMutations()) * elementBytes[kindWrite]
	case *pb.TransactRequest_BatchGet:
		size += len(r.BatchGet.GetKeys()) * elementBytes[kindRead]
	}
	return size
}

func transactReads(req *pb.TransactRequest) bool {
	switch req.Request.(type) {
	case *pb.TransactRequest_Get, *pb.TransactRequest_BatchGet, *pb.TransactRequest_Scan:
		return true
	}
	return false
}
