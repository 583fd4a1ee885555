package server

import (
	"cmp"
	"context"
	"errors"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/transport"
)

// lane is what one goroutine executes the requests of a direct connection with: an executor from
// the first request of a burst to its end, and messages that are used again. It implements
// transport.Lane.
type lane struct {
	server   *Server
	client   *directClient
	executor *executor    // nil until a request needs one
	waits    bool         // requests may wait: they delay no others
	answer   directAnswer // of the request at hand
	request  any          // the same, decoded
	access   access       // of it

	decoded int // bytes decoded since the messages were last reset as a whole
	get     pb.GetRequest
	put     pb.PutRequest
	delete  pb.DeleteRequest
	batch   pb.BatchWriteRequest
	getOut  *pb.GetResponse
	written pb.PutResponse // the answers of all plain writes have the same encoding
}

// directAnswer is the outcome of a request of the direct transport, and what it waits for.
type directAnswer struct {
	request  transport.Request
	deadline time.Time

	traceparent string // of its metadata

	start   time.Duration
	method  telemetry.Method
	share   share
	encoded int // size of the message
	size    int // with which the request is admitted
	ackWait ackWait
	out     encoder // nil: a plain write of the epoch
	epoch   uint64
	err     error

	deduplicated bool // of a plain write
	repeated     bool // a read that was tried before
	waits        bool // for a sync; see admission.beginWait

	charge *memoryCharge

	details details

	pipeline  *directPipeline // if it is the answer of one; then only request, ackWait and err have meaning
	pipelined *answer
}

// handedOver is the size of the smallest request that another goroutine executes: it would delay
// the other requests of its connection.
const handedOver = 64 << 10

// Execute implements transport.Lane.
func (l *lane) Execute(r transport.Request, message []byte) {
	s, a := l.server, &l.answer
	*a = directAnswer{request: r, deadline: r.Deadline(), traceparent: r.Traceparent(), start: s.clock.now(), method: directMethods[r.Method()-1], encoded: len(message), size: len(message)}
	kind := kindOf(a.method)
	var err error
	if len(message) >= countedMessageMin {
		var c contents
		c, err = contentsOf(message)
		a.size = c.bytes(message, kind)
		if err == nil {
			err = c.check(&s.limits)
		}
		if err == nil && a.method == telemetry.MethodExecute {
			err = c.checkLists(&s.limits)
		}
		if err == nil {
			err = checkFields(message, directInputs[r.Method()-1], &s.limits)
		}
		if errors.Is(err, errMalformed) {
			err = undecodable(err)
		}
	}
	a.share = shareOf(kind.writes(), a.size)
	if err == nil {
		err = s.admitDirect(l.client, a, kind)
	}
	if err != nil {
		l.client.fail(a, err)
		return
	}
	if len(message) >= handedOver || a.method == telemetry.MethodDeleteRange {
		l.handOver(message, func(t task) {
			s.drain.receivers.Go(func() {
				t.run()
				t.after()
			})
		})
		return
	}
	execute, err := l.decode(a.method, message)
	if l.run(execute, err) {
		l.readLater(message)
	}
}

// readLater lets a worker repeat the read at hand, which would wait.
func (l *lane) readLater(message []byte) {
	s, conn := l.server, l.client.connection
	if err := s.admission.holdSession(conn); err != nil {
		l.executor.abandonRead()
		l.answer.err = err
		l.client.answerWith(&l.answer, &l.written)
		return
	}
	l.answer.repeated = true
	l.answer.details.note.giveBack(s.observer.audit.log)
	l.handOver(message, func(t task) {
		s.direct.readers.run(conn, task{
			run: func() {
				defer s.admission.sessions.release(conn)
				t.run()
			},
			after: t.after,
		})
	})
}

// admitDirect is Server.admit without a context: that of a request takes the connection's mutex.
func (s *Server) admitDirect(c *directClient, a *directAnswer, k kind) error {
	if s.connections.refuses(c.connection) {
		return errTooManyConns
	}
	if isPast(a.deadline) {
		s.counters.expired.Add(1)
		return errExpired
	}
	if !s.admission.enterKind(c.connection, k, a.share, a.size) {
		return errOverloaded
	}
	return nil
}

// handOver executes a request in another goroutine, with a lane of its own. Admission bounds them.
func (l *lane) handOver(message []byte, do func(task)) {
	other := l.client.Lane().(*lane) //nolint:forcetypeassert // there is no other kind
	other.answer, other.executor, other.waits = l.answer, l.giveExecutor(), true
	execute, err := other.decode(l.answer.method, message)
	request := other.answer.request
	do(task{
		run: func() {
			other.answer.details.queue = l.server.clock.now() - other.answer.start
			other.run(execute, err)
			other.Rest()
		},
		after: request.Flush,
	})
}

// giveExecutor leaves the executor of the burst, with what the request at hand has in it, to another
// lane or pipeline. The next request takes another one.
func (l *lane) giveExecutor() *executor {
	e := l.executor
	l.executor = nil
	return e
}

// run executes a decoded request and answers it, or lets its answer wait. It reports true if the
// request is a read that would wait, and must be repeated by a lane that may.
func (l *lane) run(execute executeFunc, err error) (wouldWait bool) {
	s, c, a := l.server, l.client, &l.answer
	if err == nil {
		err = l.check()
	}
	if err == nil {
		err = l.open()
	}
	if err == nil {
		ctx := a.request.Context()
		l.executor.ctx, l.executor.access = ctx, &l.access
		if l.executor.attempt.limit = readCached; l.waits {
			l.executor.attempt.limit = readAny
		}
		w, failed := execute(ctx, l, a)
		if errors.Is(failed, mvcc.ErrWouldWait) {
			return true
		}
		a.ackWait, err = l.executor.outcome(w, failed)
		l.executor.takeDetails(&a.details)
		if err == nil && a.out != nil {
			l.access.sent(a.out)
			a.charge, err = s.admission.chargeAnswer(l.executor.takeCharge(), c.connection, a.out.SizeVT(), kindOf(a.method).writes())
		}
		l.executor.releaseCharge()
	}
	if a.err = err; err != nil {
		a.out = nil
	}
	switch {
	case a.ackWait.ready(s.store):
	case s.isSync(a.ackWait.durability):
		if refused := s.admission.beginWait(c.connection, a.share); refused != nil {
			a.out, a.err = nil, refused
			break
		}
		if a.out == encoder(l.getOut) {
			l.getOut = new(pb.GetResponse) // the answer keeps the other
		}
		s.admission.shrink(c.connection, a.share, a.size, a.encoded) // the next request reuses the messages
		a.size = a.encoded
		a.details.executed = s.clock.now()
		a.details.note.giveBack(s.observer.audit.log)
		a.waits = true
		c.await(a)
		return false
	default: // visibility is a matter of microseconds
		a.details.executed = s.clock.now()
		a.err = cmp.Or(a.ackWait.wait(a.request.Context(), s.store), a.err)
	}
	c.answerWith(a, &l.written)
	return false
}

// check compares the request with the rights of its caller.
func (l *lane) check() error {
	x, a := &l.access, &l.answer
	x.gate, x.conn, x.header = &l.server.gate, l.client.connection, a.request.Authorization()
	row := directRows[a.request.Method()-1]
	err := x.check(row, l.request)
	if l.server.observer.audit.log != nil && a.details.note == nil {
		a.details.note, err = l.server.noteRequest(a.request.Context(), x, classOf(a.method), row, l.request, err)
	}
	if err == nil && x.limiter() != nil && !a.repeated {
		err = x.take(a.encoded)
	}
	return err
}

// open takes an executor for the burst.
func (l *lane) open() (err error) {
	if l.executor == nil {
		l.executor, err = l.server.takeExecutor()
	}
	return err
}

// executeFunc executes a decoded request.
type executeFunc func(ctx context.Context, l *lane, a *directAnswer) (ackWait, error)

// Rest implements transport.Lane.
func (l *lane) Rest() {
	if l.executor != nil {
		l.executor.release()
		l.executor = nil
	}
	if cap(l.getOut.Value) > pooledBytesMax {
		l.getOut.Value = nil
	}
	if l.decoded > resetEvery { // a lane may rest for long
		l.forgetDecoded()
	}
	l.client, l.answer, l.waits, l.request = nil, directAnswer{}, false, nil
	l.access.conn, l.access.header, l.access.request, l.access.invoked, l.access.caller, l.access.table = nil, "", nil, nil, nil, 0
	l.server.direct.lanes.Put(l)
}

// forgetDecoded drops the messages that are reused.
func (l *lane) forgetDecoded() {
	l.decoded = 0
	l.get, l.put, l.delete, l.batch = pb.GetRequest{}, pb.PutRequest{}, pb.DeleteRequest{}, pb.BatchWriteRequest{}
}

// answer answers a request that has waited. The answer of a plain write is encoded in written, which is used again.
func (c *directClient) answer(a *directAnswer, written *pb.PutResponse) {
	if a.pipeline != nil {
		a.pipelined.err = a.err
		a.pipeline.deliver(a.pipelined, false)
		return
	}
	c.answerWith(a, written)
}

// answerWith answers a request, and ends its admission.
func (c *directClient) answerWith(a *directAnswer, written *pb.PutResponse) {
	s := c.server
	code := codes.OK
	if a.err != nil {
		a.charge.release()
		code = c.send(a, s.failed(a.method, a.err))
	} else {
		out := a.out
		if out == nil {
			written.Epoch, written.Deduplicated = a.epoch, a.deduplicated
			out = written
		}
		var release func()
		if a.charge != nil {
			release = a.charge.release
			a.charge.handOver()
		}
		if !a.request.Answer(out, release) {
			code = codes.Canceled
		}
	}
	c.leave(a)
	c.ended(a, code)
}

// leave ends the admission of a request.
func (c *directClient) leave(a *directAnswer) {
	if a.waits {
		c.server.admission.endWait(c.connection, a.share)
	}
	c.server.admission.leave(c.connection, a.share, a.size)
}

// committed is the epoch of a request's commit; 0 if it has none.
func (a *directAnswer) committed() uint64 {
	if a.epoch == 0 && a.out != nil {
		return commitEpoch(a.out)
	}
	return a.epoch
}

// ended reports the end of a request.
func (c *directClient) ended(a *directAnswer, code codes.Code) {
	c.server.ended(c.connection, &requestEnd{method: a.method, code: code, start: a.start, size: a.encoded, epoch: a.committed(), origin: origin{traceparent: a.traceparent}}, &a.details)
}

// drop ends a request that the client has cancelled.
func (c *directClient) drop(a *directAnswer) {
	if a.pipeline != nil {
		a.pipeline.deliver(a.pipelined, true)
		return
	}
	a.charge.release()
	c.leave(a)
	c.ended(a, codes.Canceled)
}

// fail answers a request that was not admitted.
func (c *directClient) fail(a *directAnswer, err error) {
	c.ended(a, c.send(a, statusOf(err)))
}

func (c *directClient) send(a *directAnswer, st *status.Status) codes.Code {
	if !a.request.Fail(st) {
		return codes.Canceled
	}
	return st.Code()
}

// errDecode is a message that cannot be decoded, as gRPC says it.
var errDecode = errors.New("grpc: failed to unmarshal the received message")

func undecodable(err error) error { return status.Errorf(codes.Internal, "%v: %v", errDecode, err) }

// decode decodes the message of a method, and returns what executes it.
func (l *lane) decode(method telemetry.Method, message []byte) (executeFunc, error) {
	if l.decoded+len(message) > resetEvery {
		l.forgetDecoded()
	}
	l.decoded += len(message)
	var err error
	var execute executeFunc
	switch method {
	case telemetry.MethodGet:
		reuseGet(&l.get)
		err, execute, l.request = l.get.UnmarshalVT(message), executeGet, &l.get
	case telemetry.MethodPut:
		reusePut(&l.put)
		err, execute, l.request = l.put.UnmarshalVT(message), executePut, &l.put
	case telemetry.MethodDelete:
		l.delete.ResetVT()
		err, execute, l.request = l.delete.UnmarshalVT(message), executeDelete, &l.delete
	case telemetry.MethodBatchWrite:
		l.batch.ResetVT()
		err, execute, l.request = l.batch.UnmarshalVT(message), executeBatchWrite, &l.batch
	default:
		execute, l.request, err = decodeRare(method, message)
	}
	if err != nil {
		return nil, undecodable(err)
	}
	return execute, nil
}

// decodeRare decodes into a message of its own.
func decodeRare(method telemetry.Method, message []byte) (execute executeFunc, request any, err error) {
	switch method {
	case telemetry.MethodBatchGet:
		return rare(message, func(ctx context.Context, l *lane, in *pb.BatchGetRequest, out *pb.BatchGetResponse) (ackWait, error) {
			out.Results = newResults(min(len(in.Keys), l.server.limits.BatchOps))
			return l.executor.batchGet(ctx, in, out, l.server)
		})
	case telemetry.MethodDeleteRange:
		return rare(message, func(ctx context.Context, l *lane, in *pb.DeleteRangeRequest, out *pb.DeleteRangeResponse) (ackWait, error) {
			return l.executor.deleteRange(ctx, in, out)
		})
	case telemetry.MethodInvoke:
		return rare(message, func(ctx context.Context, l *lane, in *pb.InvokeRequest, out *pb.InvokeResponse) (ackWait, error) {
			return l.executor.invoke(ctx, in, l.answer.size, out)
		})
	case telemetry.MethodInvokeAll:
		return rare(message, func(ctx context.Context, l *lane, in *pb.InvokeAllRequest, out *pb.InvokeAllResponse) (ackWait, error) {
			return l.executor.invokeAll(ctx, in, l.answer.size, out)
		})
	}
	return rare(message, func(ctx context.Context, l *lane, in *pb.ExecuteRequest, out *pb.ExecuteResponse) (ackWait, error) {
		return (&txnService{Server: l.server}).execute(ctx, l.executor, in, l.answer.size, out)
	})
}

// rare decodes a message into a new one, and returns what executes it into a new answer.
func rare[In, Out any, I interface {
	*In
	UnmarshalVT(data []byte) error
}, O interface {
	*Out
	encoder
}](message []byte, execute func(context.Context, *lane, I, O) (ackWait, error)) (_ executeFunc, request any, err error) {
	in := I(new(In))
	return func(ctx context.Context, l *lane, a *directAnswer) (ackWait, error) {
		out := O(new(Out))
		a.out = out
		return execute(ctx, l, in, out)
	}, in, in.UnmarshalVT(message)
}

func executeGet(_ context.Context, l *lane, a *directAnswer) (ackWait, error) {
	if l.getOut.Value == nil {
		l.getOut.Value = make([]byte, 0, 256)
	}
	a.out = l.getOut
	return l.executor.get(&l.get, l.getOut, l.getOut.Value[:0])
}

func executePut(ctx context.Context, l *lane, a *directAnswer) (ackWait, error) {
	w, err := l.executor.put(ctx, &l.put)
	a.epoch, a.deduplicated = uint64(w.epoch), w.deduplicated
	return w, err
}

func executeDelete(ctx context.Context, l *lane, a *directAnswer) (ackWait, error) {
	w, err := l.executor.delete(ctx, &l.delete)
	a.epoch, a.deduplicated = uint64(w.epoch), w.deduplicated
	return w, err
}

func executeBatchWrite(ctx context.Context, l *lane, a *directAnswer) (ackWait, error) {
	w, err := l.executor.batchWrite(ctx, &l.batch)
	a.epoch, a.deduplicated = uint64(w.epoch), w.deduplicated
	return w, err
}
