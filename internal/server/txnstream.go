package server

import (
	"errors"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
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
			if errors.Is(err, errStreamOver) {
				return <-c.ended // which endLocked has filled before
			}
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
	total := c.server.transactions.total
	late := time.AfterFunc(total-time.Since(row.begun), func() { row.stop(&txnTimeoutError{limit: total}) })
	c.mu.Lock() // which a request may have for longer than that
	defer c.mu.Unlock()
	late.Stop()
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
