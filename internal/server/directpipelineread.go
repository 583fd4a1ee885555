package server

// laterReads are the reads of a pipeline that were tried, and are repeated by workers. Reads of small
// values wait for the device at the same time, while the pipeline goes on. Batches, and reads of
// large values, are repeated one after the other, each once the answer before it has been sent, or
// waits for durability among less than ackQueueBytesMax. The pipeline rests meanwhile. So flow
// control bounds their answers, as it does if they need not be repeated. The pipeline's mutex guards
// them.
type laterReads struct {
	small int          // repeated at the moment
	alone []*laterRead // the first is repeated at the moment, or its answer is on its way
}

// pipelineReadsMax is how many reads of small values one pipeline repeats at a time.
const pipelineReadsMax = readersMax / 2

// full reports whether the pipeline executes no more requests.
func (r *laterReads) full() bool { return r.small >= pipelineReadsMax || len(r.alone) > 0 }

// laterRead is a read that is repeated.
type laterRead struct {
	execution pipelineExecution
	answer    *answer
	counted   int // bytes of the answer that the pipeline has counted
}

// readLater repeats the read at hand, which would wait, or refuses it.
func (p *directPipeline) readLater(l *lane, a *answer, message []byte) {
	if err := p.server.admission.holdSession(p.conn); err != nil {
		l.executor.abandonRead()
		p.leave(a)
		p.complete(a, kindRead, ackWait{}, err)
		p.send(a)
		return
	}
	a.details.note.giveBack(p.server.observer.audit.log) // it waits for the device, and perhaps for the client to take what was read before
	e := l.giveExecutor()
	r := &laterRead{execution: pipelineExecution{ctx: p.ctx, executor: e}, answer: p.keep(a), counted: a.queuedBytes()}
	r.execution.begin(p.server, p.conn, p.access.header, p.origin)
	r.execution.repeated = true
	r.execution.in.init()
	_ = r.execution.in.decode(message, p.in.size) // it was decoded before
	if e.attempt.large || r.execution.in.msg.GetBatchGet() != nil {
		p.readAlone(r)
		return
	}
	e.attempt.limit = readSmall
	p.mu.Lock()
	p.reads.small++
	p.mu.Unlock()
	p.server.direct.readers.run(p.conn, task{func() { p.readSmall(r) }, p.request.Flush})
}

// readSmall repeats a read, unless its value is large.
func (p *directPipeline) readSmall(r *laterRead) {
	again := p.read(r)
	p.mu.Lock()
	p.reads.small--
	p.mu.Unlock()
	if again {
		p.readAlone(r)
	} else {
		p.answerRead(r)
	}
}

// readAlone repeats a read once those before it have been answered. In the large slot it does not wait for that, because the client decides when it is.
func (p *directPipeline) readAlone(r *laterRead) {
	size := r.execution.in.size
	slot := &p.server.admission.words[shareOf(false, size)].large
	p.mu.Lock()
	first := len(p.reads.alone) == 0
	refused := !first && slot.holds(p.conn, int64(size))
	if !refused {
		r.execution.executor.attempt.limit, r.answer.alone = readAny, true
		p.reads.alone = append(p.reads.alone, r)
	}
	p.mu.Unlock()
	switch {
	case refused:
		p.refuseLater(r)
	case first:
		p.startAlone(r)
	}
}

// refuseLater refuses a read that was to be repeated.
func (p *directPipeline) refuseLater(r *laterRead) {
	p.server.admission.refused.Add(1)
	r.execution.executor.abandonRead()
	r.execution.leave(r.answer)
	r.execution.complete(r.answer, kindRead, ackWait{}, errOverloaded)
	p.endRead(r)
	p.answerRead(r)
}

func (p *directPipeline) startAlone(r *laterRead) {
	p.server.direct.readers.run(p.conn, task{
		run: func() {
			p.read(r)
			p.answerRead(r)
		},
		after: p.request.Flush,
	})
}

// nextAlone goes on after the answer of a read that was repeated alone. Its caller may hold the
// connection's mutex, before which the pipeline's is taken.
func (p *directPipeline) nextAlone() {
	p.server.drain.receivers.Go(func() {
		p.mu.Lock()
		p.reads.alone[0] = nil // which has the value that was read
		p.reads.alone = p.reads.alone[1:]
		var next *laterRead
		if len(p.reads.alone) > 0 {
			next = p.reads.alone[0]
		}
		resume := p.resumesLocked(ackQueueMax-1, ackQueueBytesMax-1)
		p.mu.Unlock()
		switch {
		case next != nil:
			p.startAlone(next)
		case resume:
			p.request.Resume()
		}
	})
}

// read executes a read. It reports true if the read must be repeated alone.
func (p *directPipeline) read(r *laterRead) (again bool) {
	if d := &r.answer.details; d.queue == 0 {
		d.queue = p.server.clock.now() - r.answer.start
	}
	r.answer.ackWait, again = r.execution.executeAdmitted(r.answer)
	if !again {
		p.endRead(r)
	}
	return again
}

// endRead gives back what a read has executed with.
func (p *directPipeline) endRead(r *laterRead) {
	r.execution.executor.release()
	p.server.admission.sessions.release(p.conn)
}

// answerRead answers a read, or lets its answer wait. The caller flushes.
func (p *directPipeline) answerRead(r *laterRead) {
	p.mu.Lock()
	p.add(0, r.answer.queuedBytes()-r.counted)
	room := p.bytes < ackQueueBytesMax
	p.mu.Unlock()
	if !r.answer.ackWait.ready(p.server.store) {
		r.answer.details.executed = p.server.clock.now()
		next := room && r.answer.alone
		r.answer.alone = r.answer.alone && !next
		p.queue(r.answer)
		if next {
			p.nextAlone()
		}
		return
	}
	p.deliver(r.answer, false)
}
