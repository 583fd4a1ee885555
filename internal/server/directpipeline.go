package server

import (
	"errors"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/transport"
)

// directPipeline is a pipeline of the direct transport: the goroutine that reads the connection
// executes its requests, and its answers wait in the connection's directAcks. It implements
// transport.Messages. It has the invariants of pipeline.
type directPipeline struct {
	pipelineExecution
	client  *directClient
	request transport.Request
	limiter *auth.Limiter // of the user; it counts the open stream
	start   time.Duration
	answers sender

	mu              sync.Mutex // before the connection's; guards what follows
	pipelineAnswers            // that wait for durability or for the device; what the transport has of them counts for the connection
	reads           laterReads
	executing       bool
	used            bool           // a request was executed since the last trim
	trimmed         bool           // none was executed since the buffers were given back
	held            bool           // no request is executed before some answers have been sent
	ended           *status.Status // why no request follows; OK when the client has closed its side, nil while more may come
	finished        bool
}

func (c *directClient) openPipeline(r transport.Request, l *auth.Limiter) directStream {
	s := c.server
	p := &directPipeline{client: c, request: r, limiter: l, start: s.clock.now()}
	p.pipelineExecution.begin(s, c.connection, r.Authorization(), origin{stream: s.beginStream(telemetry.MethodPipeline, r.Traceparent())})
	p.pipelineAnswers.init(&s.admission.waiting, c.owns(ownedWaiting))
	p.ctx = r.Context()
	p.in.init()
	p.answers.init(nil)
	return p
}

// drain implements directStream: the pipeline ends when it has no answer to send.
func (p *directPipeline) drain() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.finishLocked()
}

// Execute implements transport.Messages.
func (p *directPipeline) Execute(tl transport.Lane, message []byte) bool {
	l := tl.(*lane) //nolint:forcetypeassert // there is no other kind
	if !p.begin() {
		return false
	}
	more := p.serve(l, message)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.executing = false
	p.held = !more || p.waiting >= ackQueueMax || p.bytes >= ackQueueBytesMax || p.reads.full() || p.hasEnough(waitingOwn)
	p.finishLocked()
	return !p.held && !p.finished
}

// begin reports whether a request may be executed.
func (p *directPipeline) begin() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.finished {
		return false
	}
	if p.server.drain.active.Load() {
		p.held = true
		p.finishLocked()
		return false
	}
	p.executing, p.used, p.trimmed = true, true, false
	return true
}

// trim gives back the buffers of a pipeline that has executed nothing since the last trim.
func (p *directPipeline) trim() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.executing && !p.used && !p.trimmed {
		p.value, p.trimmed = nil, true
		p.in.reset()
	}
	p.used = false
}

// serve executes a request, and answers it or lets its answer wait. It reports false if the
// pipeline has come to its end.
func (p *directPipeline) serve(l *lane, message []byte) bool {
	a := answer{start: p.server.clock.now()}
	size, large := len(message), len(message) >= countedMessageMin
	if large {
		var err error
		size, err = p.admitEncoded(&a, message)
		if errors.Is(err, errMalformed) {
			return p.endUndecodable(err)
		}
		if err != nil {
			p.refuse(&a, err)
			return true
		}
	}
	if err := p.in.decode(message, size); err != nil {
		if large {
			p.leave(&a)
		}
		return p.endUndecodable(err)
	}
	a.id = p.in.msg.Id
	if err := l.open(); err != nil {
		if large {
			p.leave(&a)
		}
		a.method = methodOfPipelined(&p.in.msg)
		p.refuse(&a, err)
		return true
	}
	p.executor = l.executor
	p.executor.ctx, p.executor.attempt.limit = p.ctx, readCached
	var w ackWait
	var wouldWait bool
	if large {
		w, wouldWait = p.executeAdmitted(&a)
	} else {
		w, wouldWait = p.executeOne(&a)
	}
	switch {
	case wouldWait:
		p.readLater(l, &a, message)
		return true
	case w.ready(p.server.store):
	case p.server.isSync(w.durability):
		a.ackWait, a.details.executed = w, p.server.clock.now()
		a.details.note.giveBack(p.server.observer.audit.log)
		p.keepValue(&a)
		p.await(&a)
		return true
	default: // visibility is a matter of microseconds
		a.details.executed = p.server.clock.now()
		if err := w.wait(p.ctx, p.server.store); err != nil {
			a.err = err
		}
	}
	p.send(&a)
	return true
}

// endUndecodable ends the pipeline at a request that cannot be decoded. It returns false, as serve does.
func (p *directPipeline) endUndecodable(err error) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = status.Convert(undecodable(err))
	return false
}

// admitEncoded admits a request before it is decoded, and returns with how many bytes.
func (p *directPipeline) admitEncoded(a *answer, message []byte) (size int, err error) {
	r, err := pipelinedOf(message, pipelineDescriptor)
	if err != nil {
		return 0, err
	}
	a.id, a.method = r.id, r.method
	if err := r.check(&p.server.limits); err != nil {
		return 0, err
	}
	if err := checkFields(message, pipelineDescriptor, &p.server.limits); err != nil {
		return 0, err
	}
	kind := kindOf(a.method)
	size = r.bytes(message, kind)
	if !p.server.admission.enterKind(p.conn, kind, shareOf(kind.writes(), size), size) {
		return 0, errOverloaded
	}
	return size, nil
}

// refuse answers a request that is not executed.
func (p *directPipeline) refuse(a *answer, err error) {
	a.status = p.server.failed(a.method, err)
	p.send(a)
}

// await lets an answer wait in the connection's queue.
func (p *directPipeline) await(a *answer) { p.queue(p.keep(a)) }

// queue lets an answer that was kept wait.
func (p *directPipeline) queue(kept *answer) {
	p.client.await(&directAnswer{request: p.request, ackWait: kept.ackWait, pipeline: p, pipelined: kept})
}

// keep keeps an answer that will be delivered.
func (p *directPipeline) keep(a *answer) *answer {
	kept := keptAnswers.Get().(*answer) //nolint:forcetypeassert // there is no other kind
	*kept = *a
	p.mu.Lock()
	defer p.mu.Unlock()
	p.add(1, a.queuedBytes())
	return kept
}

// keptAnswers are for answers that will wait.
var keptAnswers = sync.Pool{New: func() any { return new(answer) }}

// deliver sends an answer that has waited, or drops it after the pipeline has been cancelled.
func (p *directPipeline) deliver(a *answer, cancelled bool) {
	size := a.queuedBytes()
	switch {
	case !cancelled:
		p.send(a)
	default:
		p.abandon(a)
		if a.alone {
			p.nextAlone()
		}
	}
	*a = answer{}
	keptAnswers.Put(a)
	p.mu.Lock()
	p.add(-1, -size)
	resume := p.resumesLocked(ackQueueMax/2, ackQueueBytesMax/2)
	p.finishLocked()
	p.mu.Unlock()
	if resume {
		p.request.Resume()
	}
}

// resumesLocked ends the time in which no request is executed, if no more than so many answers of so
// many bytes wait.
func (p *directPipeline) resumesLocked(waiting, bytes int) bool {
	resumes := p.held && p.ended == nil && !p.finished && !p.server.drain.active.Load() && p.waiting <= waiting && p.bytes <= bytes && !p.reads.full() && !p.hasEnough(waitingOwn/2)
	if resumes {
		p.held = false
	}
	return resumes
}

// send sends an answer.
func (p *directPipeline) send(a *answer) {
	if a.err != nil {
		a.status = p.server.failed(a.method, a.err)
	}
	code := codes.OK
	if a.status != nil {
		code = a.status.Code()
		a.charge.release()
		a.charge = nil
	}
	a.charge.handOver()
	var release func()
	switch charge := a.charge; {
	case a.alone:
		release = func() {
			charge.release()
			p.nextAlone()
		}
	case charge != nil:
		release = charge.release
	}
	p.answers.mu.Lock()
	p.answers.fill(a)
	if !p.request.Send(&p.answers.msg, release) {
		code = codes.Canceled
	}
	p.answers.forget()
	p.answers.mu.Unlock()
	a.drop()
	p.requestEnded(a, code)
}

// End implements transport.Messages.
func (p *directPipeline) End(st *status.Status) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = st
	p.finishLocked()
}

// finishLocked ends the pipeline if no request follows, or the server drains, and every request that was executed has
// been answered.
func (p *directPipeline) finishLocked() {
	draining := p.server.drain.active.Load()
	if p.finished || p.executing || p.waiting > 0 || p.ended == nil && !draining {
		return
	}
	st := p.ended
	if st == nil {
		st = statusOf(errShuttingDown)
	}
	p.endLocked(st)
}

// endLocked ends the pipeline with a status. It does nothing if the pipeline was cancelled. The transport has the pipeline until its client has taken the
// answers, and trims reach it no more.
func (p *directPipeline) endLocked(st *status.Status) {
	p.finished = true
	p.value, p.in, p.trimmed = nil, pipelineRequest{}, true
	if p.server.direct.streams.take(p.request) != nil {
		p.request.EndStream(st)
		p.observe(st.Code())
	}
}

// observe implements directStream.
func (p *directPipeline) observe(code codes.Code) {
	p.limiter.Close(auth.Streams)
	p.server.counters.streams.Add(-1)
	p.server.ended(p.conn, &requestEnd{method: telemetry.MethodPipeline, code: code, start: p.start, origin: p.origin}, nil)
}
