package server

import (
	"context"
	"errors"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// pipelineExecution executes the requests of one pipeline, in order.
type pipelineExecution struct {
	server   *Server
	conn     *connection
	ctx      context.Context // the stream's
	executor *executor
	access   access
	repeated bool // the request was tried before
	origin   origin

	in      pipelineRequest // the request at hand
	value   []byte          // the value that a get answers with
	written keys.Epoch      // the newest write, which reads must see
}

// executeOne executes the request at hand: a gets its answer, which may be sent when the wait ends.
// It reports true if the request is a read that was tried and would wait: then executeAdmitted of an
// execution that waits repeats it.
func (p *pipelineExecution) executeOne(a *answer) (w ackWait, wouldWait bool) {
	a.method = methodOfPipelined(&p.in.msg)
	kind := kindOf(a.method)
	admitted := p.server.admission.enterKind(p.conn, kind, shareOf(kind.writes(), p.in.size), p.in.size)
	p.server.admission.decoding.end(&p.in)
	if !admitted {
		return p.complete(a, kind, ackWait{}, errOverloaded), false
	}
	return p.executeAdmitted(a)
}

// executeAdmitted is executeOne after admission.
func (p *pipelineExecution) executeAdmitted(a *answer) (w ackWait, wouldWait bool) {
	w, err := ackWait{}, p.check()
	if p.server.observer.audit.log != nil && a.details.note == nil {
		a.details.note, err = p.server.noteRequest(p.ctx, &p.access, classOf(a.method), pipelineRow, &p.in.msg, err)
	}
	if err == nil {
		w, err = p.execute(a)
	}
	if errors.Is(err, mvcc.ErrWouldWait) {
		a.drop()
		return w, true
	}
	w, err = p.executor.outcome(w, err)
	p.executor.takeDetails(&a.details)
	a.size = p.in.size
	p.leave(a)
	return p.complete(a, kindOf(a.method), w, err), false
}

// endOf is how a request ends.
func (p *pipelineExecution) endOf(a *answer, code codes.Code) requestEnd {
	return requestEnd{method: a.method, code: code, start: a.start, size: a.size, epoch: a.committed(), origin: p.origin}
}

// requestEnded reports the end of a request.
func (p *pipelineExecution) requestEnded(a *answer, code codes.Code) {
	end := p.endOf(a, code)
	p.server.ended(p.conn, &end, &a.details)
}

// endNote writes the line of a request in the audit log before its answer waits for the client.
func (p *pipelineExecution) endNote(a *answer, code codes.Code) {
	end := p.endOf(a, code)
	p.server.endNote(p.conn, &end, &a.details)
}

// check compares the request at hand with the rights of its caller.
func (p *pipelineExecution) check() error {
	err := p.access.check(pipelineRow, &p.in.msg)
	if err == nil && p.access.limiter() != nil && !p.repeated {
		err = p.access.take(p.in.size)
	}
	p.executor.access = &p.access
	return err
}

// begin sets the connection, the header and the origin of the requests.
func (p *pipelineExecution) begin(s *Server, conn *connection, header string, o origin) {
	p.server, p.conn, p.origin = s, conn, o
	p.access.gate, p.access.conn, p.access.header = &s.gate, conn, header
}

// pipelineRow is what requests of pipelines need.
var pipelineRow = rpcRows[pb.KVService_Pipeline_FullMethodName]

// abandon ends a request whose answer will not be sent.
func (p *pipelineExecution) abandon(a *answer) {
	a.charge.release()
	p.requestEnded(a, codes.Canceled)
}

// leave ends the admission of the request at hand.
func (p *pipelineExecution) leave(a *answer) {
	p.server.admission.leave(p.conn, shareOf(kindOf(a.method).writes(), p.in.size), p.in.size)
}

// complete ends the execution of the request at hand.
func (p *pipelineExecution) complete(a *answer, kind kind, w ackWait, err error) ackWait {
	if err == nil && kind.answers() {
		if l := p.access.limiter(); l != nil {
			l.Sent(a.bytes())
		}
		a.charge, err = p.server.admission.chargeAnswer(p.executor.takeCharge(), p.conn, a.bytes(), kind.writes())
	}
	p.executor.releaseCharge()
	if w.write {
		p.written = max(p.written, w.epoch) // that of a request which was executed before is older
	}
	if err != nil {
		a.status = p.server.failed(a.method, err) // now, because the error may refer to memory of the request
		a.value = nil
	}
	p.resetLarge() // before sending, whose duration the client decides
	return w
}

// keepValue leaves the buffer of a value to an answer that waits.
func (p *pipelineExecution) keepValue(a *answer) {
	if a.value != nil {
		p.value = nil
	}
}

// execute runs the request, which sees the effects of earlier requests. The answer is either in a,
// or in a message of its own.
func (p *pipelineExecution) execute(a *answer) (ackWait, error) {
	if readsSnapshot(&p.in.msg) {
		if err := p.awaitOwnWrites(); err != nil {
			return ackWait{}, err
		}
	}
	switch r := p.in.msg.Request.(type) {
	case *pb.PipelineRequest_Get:
		var out pb.GetResponse
		w, err := p.executor.get(r.Get, &out, p.valueBuffer())
		p.value = out.Value
		a.found, a.value, a.epoch, a.readEpoch, a.expiresAt = out.Found, out.Value, out.Epoch, out.ReadEpoch, out.ExpiresAtMs
		return w, err
	case *pb.PipelineRequest_Put:
		w, err := p.executor.put(p.ctx, r.Put)
		a.epoch, a.deduplicated = uint64(w.epoch), w.deduplicated
		return w, err
	case *pb.PipelineRequest_Delete:
		w, err := p.executor.delete(p.ctx, r.Delete)
		a.epoch, a.deduplicated = uint64(w.epoch), w.deduplicated
		return w, err
	case *pb.PipelineRequest_BatchWrite:
		w, err := p.executor.batchWrite(p.ctx, r.BatchWrite)
		a.epoch, a.deduplicated = uint64(w.epoch), w.deduplicated
		return w, err
	case *pb.PipelineRequest_BatchGet:
		out := pb.BatchGetResponseFromVTPool()
		w, err := p.executor.batchGet(p.ctx, r.BatchGet, out, p.server)
		a.batchGet = out
		return w, err
	case *pb.PipelineRequest_DeleteRange:
		out := new(pb.DeleteRangeResponse)
		w, err := p.executor.deleteRange(p.ctx, r.DeleteRange, out)
		a.deleteRange = out
		return w, err
	case *pb.PipelineRequest_Invoke:
		a.invoke = new(pb.InvokeResponse)
		return p.executor.invoke(p.ctx, r.Invoke, p.in.size, a.invoke)
	case *pb.PipelineRequest_InvokeAll:
		a.invokeAll = new(pb.InvokeAllResponse)
		return p.executor.invokeAll(p.ctx, r.InvokeAll, p.in.size, a.invokeAll)
	}
	return ackWait{}, invalid("request", "is missing, or of a kind that this server does not know")
}

// methodOfPipelined is the method that a request is counted as.
func methodOfPipelined(m *pb.PipelineRequest) telemetry.Method {
	switch m.Request.(type) {
	case *pb.PipelineRequest_Get:
		return telemetry.MethodGet
	case *pb.PipelineRequest_Put:
		return telemetry.MethodPut
	case *pb.PipelineRequest_Delete:
		return telemetry.MethodDelete
	case *pb.PipelineRequest_BatchGet:
		return telemetry.MethodBatchGet
	case *pb.PipelineRequest_BatchWrite:
		return telemetry.MethodBatchWrite
	case *pb.PipelineRequest_DeleteRange:
		return telemetry.MethodDeleteRange
	case *pb.PipelineRequest_Invoke:
		return telemetry.MethodInvoke
	case *pb.PipelineRequest_InvokeAll:
		return telemetry.MethodInvokeAll
	}
	return telemetry.MethodPipeline
}

// readsSnapshot reports whether a request reads at a snapshot. Other requests see everything that is
// installed.
func readsSnapshot(m *pb.PipelineRequest) bool {
	switch m.Request.(type) {
	case *pb.PipelineRequest_Get, *pb.PipelineRequest_BatchGet, *pb.PipelineRequest_DeleteRange:
		return true
	}
	return false
}

// awaitOwnWrites waits until the earlier writes of the stream are visible, so that the request sees
// them. A commit that has returned becomes visible as soon as the commits with smaller epochs are
// installed. So this is usually one comparison, and otherwise a wait of about a microsecond.
func (p *pipelineExecution) awaitOwnWrites() error {
	if p.written <= p.server.store.Visible() {
		return nil
	}
	return p.server.store.Wait(p.ctx, p.written, mvcc.DurabilityAsync)
}

// resetLarge drops the buffers of a rare huge request or value, because the stream may be idle for
// long after it.
func (p *pipelineExecution) resetLarge() {
	if cap(p.value) > pooledBytesMax {
		p.value = nil
	}
	if p.in.size > pooledBytesMax {
		p.in.reset()
		p.executor.forgetWrite()
		p.executor.request = mvcc.Request{}
	}
}

// valueBuffer is the buffer for the next value.
func (p *pipelineExecution) valueBuffer() []byte {
	if p.value == nil {
		p.value = make([]byte, 0, 256)
	}
	return p.value[:0]
}
