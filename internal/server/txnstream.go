package server

import (
	"cmp"
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/audit"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// txnService implements TransactionService.
type txnService struct {
	pb.UnimplementedTransactionServiceServer
	*Server
}

// transactionStream is one Transact stream: transactions, one after another.
//
//	receiver goroutine                                       watcher (the handler)
//	Recv ─► lock ─► execute ─► unlock ─► ackWait ─► Send      ends when the receiver has, or when the transaction is ended
//	                   ▲                                     from outside: then it returns the reason, which breaks Recv
//	   timer, operator ┘ lock, roll back, report the reason
//
// Invariants: the session and the transaction are used with mu locked only. Any goroutine that has
// locked mu may roll back an open transaction, so that no transaction is open for longer than its
// timeout, whatever its client does. Between transactions a stream uses no resource of the engine.
// When the receiver ends, an open transaction is rolled back.
type transactionStream struct {
	server *Server
	conn   *connection
	stream grpc.BidiStreamingServer[pb.TransactRequest, pb.TransactResponse]
	peer   string
	origin origin
	ended  chan error // the reason, if the stream is ended from outside
	code   codes.Code // of the last request that ended; the receiver's own
	at     requestEnd // of the request at hand, as far as it is known; the receiver's own
	spent  details    // by the request at hand; mu guards it
	access txnAccess  // the receiver's own, too

	mu       sync.Mutex
	executor *executor // nil: no transaction is open
	txn      *mvcc.Txn
	row      *openTxn
	timer    *time.Timer // for the transaction that is open
	failed   error       // an earlier request of the transaction failed
	over     error       // the reason, once it was sent to ended
	busy     bool        // a request was executed and is not answered yet
}

// Transact implements Transactions.
func (s *txnService) Transact(stream grpc.BidiStreamingServer[pb.TransactRequest, pb.TransactResponse]) error {
	ctx := stream.Context()
	from := origin{stream: s.beginStream(telemetry.MethodTransact, traceparentOf(ctx))}
	return s.serveStreamFrom(ctx, telemetry.MethodTransact, from, func(conn *connection) error {
		if err := s.admit(ctx, conn, kindRead, shareSmallReads, 0); err != nil {
			return err
		}
		s.admission.leave(conn, shareSmallReads, 0) // its requests are admitted one by one
		c := &transactionStream{server: s.Server, conn: conn, stream: stream, origin: from, ended: make(chan error, 1)}
		c.access.begin(s.newAccess(ctx))
		if p, ok := peer.FromContext(ctx); ok {
			c.peer = p.Addr.String()
		}
		received := make(chan error, 1)
		s.drain.receivers.Go(func() { received <- c.receive() })
		return c.watch(received)
	})
}

// watch returns when the stream is over, with the reason. The receiver may then still be in Recv or
// Send, which fail at once.
func (c *transactionStream) watch(received <-chan error) error {
	drain := c.server.drain.begun
	for {
		select {
		case err := <-received:
			return err
		case err := <-c.ended:
			return err
		case <-drain:
			drain = nil // an open transaction may complete
			c.mu.Lock()
			if c.txn == nil && !c.busy { // else the receiver ends the stream after the answer
				c.endLocked(errShuttingDown)
			}
			c.mu.Unlock()
		}
	}
}

// endLocked ends the stream from outside.
func (c *transactionStream) endLocked(why error) {
	if c.over == nil {
		c.over = why
		c.ended <- why
	}
}

// end rolls back the open transaction from outside, and ends the stream.
func (c *transactionStream) end(row *openTxn, why error, reason telemetry.AbortReason) {
	row.stop(why)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.row != row || c.txn == nil {
		return // the transaction has ended by itself meanwhile
	}
	c.abortLocked(reason)
	c.endLocked(why)
}

// expire ends the transaction after its timeout, and otherwise sets the timer again.
func (c *transactionStream) expire(row *openTxn) {
	if total := c.server.transactions.total; time.Since(row.begun) >= total {
		row.stop(&txnTimeoutError{limit: total})
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.row != row || c.txn == nil {
		return
	}
	table := &c.server.transactions
	left := table.total - time.Since(row.begun)
	if left <= 0 {
		c.abortLocked(telemetry.AbortTimeout)
		c.endLocked(&txnTimeoutError{limit: table.total})
		return
	}
	wait := table.idle
	if !row.busy.Load() {
		wait = table.idle - (c.server.clock.now() - time.Duration(row.idleSince.Load()))
	}
	if wait <= 0 {
		c.abortLocked(telemetry.AbortIdle)
		c.endLocked(&txnTimeoutError{idle: true, limit: table.idle})
		return
	}
	c.timer.Reset(min(wait, left))
}

// abortLocked rolls back the open transaction.
func (c *transactionStream) abortLocked(reason telemetry.AbortReason) {
	c.server.transactions.aborted[reason].Add(1)
	c.txn.Rollback()
	c.releaseLocked()
}

// releaseLocked releases the executor of a transaction that has ended.
func (c *transactionStream) releaseLocked() {
	c.timer.Stop()
	c.row.stop(nil)
	c.row.limiter.Close(auth.Transactions)
	c.server.transactions.leave(c.row)
	c.executor.takeDetails(&c.spent)
	c.executor.release()
	c.executor, c.txn, c.row, c.failed = nil, nil, nil, nil
}

// receive serves requests until the client closes its side (nil) or the stream breaks or is ended.
func (c *transactionStream) receive() error {
	defer func() {
		c.mu.Lock()
		if c.txn != nil {
			c.abortLocked(telemetry.AbortDisconnect)
		}
		c.mu.Unlock()
	}()
	for {
		req, err := c.stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		c.requestBegun(req)
		err = c.serve(req)
		c.requestEnded()
		if err != nil {
			return err
		}
	}
}

// requestBegun begins what is reported of a request. Of the requests of a transaction only its commit is counted.
func (c *transactionStream) requestBegun(req *pb.TransactRequest) {
	c.at = requestEnd{method: telemetry.MethodTransact, operation: transactOperation(req), start: c.server.clock.now(), origin: c.origin}
	if c.at.operation == "Commit" {
		c.at.method, c.at.operation = telemetry.MethodCommit, ""
	}
}

// endNote writes the line of a request in the audit log before its answer waits for the client.
func (c *transactionStream) endNote() {
	if c.server.observer.audit.log == nil {
		return
	}
	c.at.code = c.code
	c.mu.Lock()
	d := details{note: c.spent.note}
	c.mu.Unlock()
	c.server.endNote(c.conn, &c.at, &d)
}

// requestEnded reports the end of a request.
func (c *transactionStream) requestEnded() {
	end := c.at
	end.code = c.code
	c.mu.Lock()
	d := c.spent
	c.spent = details{}
	c.mu.Unlock()
	c.server.ended(c.conn, &end, &d)
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

// serve executes and answers one request. An error ends the stream. The request is dropped before the answer, which may wait for its client as long as
// that likes: nothing counts the request then.
func (c *transactionStream) serve(req *pb.TransactRequest) error {
	out := new(pb.TransactResponse)
	size, admission := req.SizeVT(), &c.server.admission
	defer c.access.forget()
	if err := c.access.check(req, size); err != nil {
		if s := c.server; s.observer.audit.log != nil {
			n, _ := s.noteRequest(c.stream.Context(), c.access.operation, "", transactRow, req, err) // it is refused anyway
			c.mu.Lock()
			c.spent.note = n
			c.mu.Unlock()
		}
		admission.decoding.end(req)
		return c.refuse(req, out, err)
	}
	if size >= countedMessageMin {
		size = transactBytes(req, size)
	}
	writes := transactWrites(req)
	sh := shareOf(writes, size)
	full := writes && admission.answersFull(c.conn) || !admission.enter(c.conn, sh, size)
	c.server.admission.decoding.end(req)
	if full {
		return c.refuse(req, out, errOverloaded)
	}
	row, held, w, err := c.execute(req, out)
	admission.leave(c.conn, sh, size)
	if errors.Is(err, errStreamOver) {
		return err
	}
	held, refused := admission.chargeAnswer(held, c.conn, out.SizeVT(), writes || !transactReads(req))
	req.Reset()
	if refused != nil {
		c.mu.Lock()
		c.failLocked(refused)
		c.mu.Unlock()
		err = refused
	}
	if failed := c.acknowledge(w); failed != nil {
		err = failed // instead of an answer or an error that would reveal the commit
	}
	if err := c.answer(out, held, err); err != nil {
		return err
	}
	c.setIdle() // before the look at drain: of the watcher and the receiver, one ends the stream
	if row != nil {
		row.idleSince.Store(int64(c.server.clock.now()))
		row.busy.Store(false)
		return nil
	}
	if c.server.drain.active.Load() {
		return errShuttingDown
	}
	return nil
}

// acknowledge waits until an answer may be sent.
func (c *transactionStream) acknowledge(w ackWait) error {
	if w.ready(c.server.store) {
		return nil
	}
	start := c.server.clock.now()
	err := w.wait(c.stream.Context(), c.server.store)
	end := c.server.clock.now()
	c.at.times.syncing, c.at.times.done = start, end
	c.mu.Lock()
	c.spent.sync += end - start
	c.mu.Unlock()
	return err
}

// refuse answers a request that is not executed. The transaction that is open fails.
func (c *transactionStream) refuse(req *pb.TransactRequest, out *pb.TransactResponse, err error) error {
	req.Reset()
	c.mu.Lock()
	c.failLocked(err)
	c.mu.Unlock()
	return c.answer(out, nil, err)
}

// setIdle says that the request at hand is answered.
func (c *transactionStream) setIdle() {
	c.mu.Lock()
	c.busy = false
	c.mu.Unlock()
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

func (c *transactionStream) answer(out *pb.TransactResponse, held *memoryCharge, err error) error {
	c.code = codes.OK
	if err != nil {
		held.release()
		held = nil
		st := c.server.failed(telemetry.MethodTransact, err)
		c.code = st.Code()
		if ctx := c.stream.Context(); ctx.Err() != nil {
			return ctx.Err()
		}
		out.Response = &pb.TransactResponse_Error{Error: st.Proto()}
	} else {
		c.access.operation.sent(out)
	}
	messageDropped(c.stream.Context())
	c.endNote()
	if err := c.stream.SendMsg(held.of(out)); err != nil {
		held.release()
		return err
	}
	return nil
}

// errStreamOver means that the stream was ended from outside. The handler returns the reason to the
// client.
var errStreamOver = errors.New("the stream has been ended")

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
		c.server.transactions.aborted[telemetry.AbortFailed].Add(1)
		c.releaseLocked()
		return ackWait{}, err
	}
	if s := c.server; s.observer.audit.log != nil {
		if c.spent.note, err = s.noteRequest(c.stream.Context(), c.access.operation, audit.ClassWrite, &rowOfTxn, c.txn, nil); err != nil {
			c.server.transactions.aborted[telemetry.AbortFailed].Add(1)
			c.releaseLocked()
			return ackWait{}, err
		}
	}
	epoch, err := c.txn.CommitRequest(c.stream.Context(), request)
	w, err := c.executor.outcome(ackWait{}.revealing(c.txn.Await()), err)
	if before, again, ok := c.executor.before(err, durability); ok {
		c.server.transactions.committed.Add(1)
		c.releaseLocked()
		out.Response = &pb.TransactResponse_Commit{Commit: &pb.CommitResponse{Epoch: uint64(before.Epoch), Deduplicated: true}}
		return again.revealing(w.epoch), nil
	}
	if err != nil {
		c.server.transactions.aborted[abortReason(err)].Add(1)
		c.releaseLocked()
		return w, err
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
