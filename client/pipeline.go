package client

import (
	"context"
	"errors"
	"io"
	"sync"

	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// inFlightDefault keeps a server at the other end of a fast network busy: more gained nothing on
// one machine.
const inFlightDefault = 1024

// Pipeline keeps many requests in flight over one stream. Its methods send a request and return at
// once, or, if the pipeline is full, when another request is answered. The request's done function
// gets the answer.
//
// Writes take effect in the order of the calls. A read sees the writes that were sent before it.
//
// The pipeline's own goroutine calls done functions one at a time, in the order in which answers
// arrive. They must not block, and must not call methods of the pipeline. Without a done function
// only an error is kept, which Flush and Close return.
//
// If the connection breaks, every request without an answer fails with an error whose
// OutcomeUnknown is true, and the pipeline cannot be used any more. A write that was sent may still be
// executed then, also after a later write of the program: give writes an id with As, and end the old
// ones with Client.Outcome and its fence, before you repeat them. Methods may be called from many
// goroutines.
type Pipeline struct {
	// Constant after Pipeline.
	client *Client
	stream grpc.BidiStreamingClient[kvpb.PipelineRequest, kvpb.PipelineResponse]
	cancel context.CancelFunc
	ended  chan struct{} // closed by the receiver when it has failed or answered everything

	// free has the slots without a request, which bounds the requests in flight. A slot's number is
	// the id of its request on the wire.
	free chan uint64

	sending sync.Mutex // held while a message is sent: a stream accepts one at a time

	mu      sync.Mutex // taken after sending, never before
	closed  bool
	slots   []func(*kvpb.PipelineResponse, error)
	busy    int           // slots in use
	idle    chan struct{} // closed while busy is zero; replaced when it rises from zero
	failed  error         // why the stream ended early
	dropped error         // the first error of a request without a done function
}

// PipelineOptions change a pipeline.
type PipelineOptions struct {
	// InFlight bounds the requests that wait for an answer; 0 means 1024.
	InFlight int
}

// Pipeline opens a pipeline. It ends with Close or with ctx, which bounds the pipeline as a whole.
func (c *Client) Pipeline(ctx context.Context, o PipelineOptions) (*Pipeline, error) {
	if o.InFlight <= 0 {
		o.InFlight = inFlightDefault
	}
	ctx, cancel := context.WithCancel(ctx)
	stream, err := c.kv.Pipeline(ctx)
	if err != nil {
		cancel()
		return nil, newError(err)
	}
	p := &Pipeline{
		client: c,
		stream: stream,
		cancel: cancel,
		ended:  make(chan struct{}),
		free:   make(chan uint64, o.InFlight),
		slots:  make([]func(*kvpb.PipelineResponse, error), o.InFlight),
		idle:   make(chan struct{}),
	}
	close(p.idle)
	for id := range p.slots {
		p.free <- uint64(id)
	}
	go p.receive() // ends with the stream; Close waits for it
	return p, nil
}

// Get reads key.
func (p *Pipeline) Get(key []byte, done func(Value, error), options ...ReadOption) error {
	o := newReadOptions(options)
	request := &kvpb.PipelineRequest{Request: &kvpb.PipelineRequest_Get{
		Get: &kvpb.GetRequest{Key: key, SnapshotEpoch: uint64(o.at), SnapshotTimeUs: o.time},
	}}
	if done == nil {
		return p.send(request, nil)
	}
	return p.send(request, func(r *kvpb.PipelineResponse, err error) { done(valueOf(r.GetGet()), err) })
}

// BatchGet reads keys at one epoch, as many as one answer holds; see Value.Unread.
func (p *Pipeline) BatchGet(keys [][]byte, done func([]Value, error), options ...ReadOption) error {
	o := newReadOptions(options)
	request := &kvpb.PipelineRequest{Request: &kvpb.PipelineRequest_BatchGet{
		BatchGet: &kvpb.BatchGetRequest{Keys: keys, SnapshotEpoch: uint64(o.at), SnapshotTimeUs: o.time},
	}}
	if done == nil {
		return p.send(request, nil)
	}
	return p.send(request, func(r *kvpb.PipelineResponse, err error) { done(valuesOf(r.GetBatchGet()), err) })
}

// Put sets key to value.
func (p *Pipeline) Put(key, value []byte, done func(Epoch, error), options ...WriteOption) error {
	o := newWriteOptions(options)
	request := &kvpb.PipelineRequest{Request: &kvpb.PipelineRequest_Put{Put: putRequest(key, value, &o)}}
	return p.sendWrite(request, done)
}

// Delete removes key.
func (p *Pipeline) Delete(key []byte, done func(Epoch, error), options ...WriteOption) error {
	o := newWriteOptions(options)
	request := &kvpb.PipelineRequest{Request: &kvpb.PipelineRequest_Delete{Delete: deleteRequest(key, &o)}}
	return p.sendWrite(request, done)
}

// Write applies a batch atomically. The batch may be reused when Write returns.
func (p *Pipeline) Write(b *Batch, done func(Epoch, error), options ...WriteOption) error {
	o := newWriteOptions(options)
	request := &kvpb.PipelineRequest{Request: &kvpb.PipelineRequest_BatchWrite{BatchWrite: b.request(&o)}}
	return p.sendWrite(request, done)
}

// Flush waits until no request is in flight, and returns the first error that no done function got.
func (p *Pipeline) Flush(ctx context.Context) error {
	p.mu.Lock()
	idle := p.idle
	p.mu.Unlock()
	select {
	case <-idle:
	case <-ctx.Done():
		return ctx.Err()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.errLocked()
}

// Close waits for the outstanding answers, ends the stream, and returns the first error that no
// done function got. The pipeline's context bounds the wait.
func (p *Pipeline) Close() error {
	p.sending.Lock()
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	_ = p.stream.CloseSend() // may be repeated; if the stream is broken, the receiver reports it
	p.sending.Unlock()
	<-p.ended
	p.cancel()
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.errLocked()
}

func (p *Pipeline) errLocked() error {
	if p.dropped != nil {
		return p.dropped
	}
	return p.failed
}

func (p *Pipeline) sendWrite(request *kvpb.PipelineRequest, done func(Epoch, error)) error {
	if done == nil {
		return p.send(request, nil)
	}
	return p.send(request, func(r *kvpb.PipelineResponse, err error) { done(epochOf(r), err) })
}

// send waits for a free slot and sends the request. If it returns an error, done is not called.
func (p *Pipeline) send(request *kvpb.PipelineRequest, done func(*kvpb.PipelineResponse, error)) error {
	select {
	case request.Id = <-p.free:
	case <-p.ended:
		return p.endError()
	}
	p.sending.Lock()
	defer p.sending.Unlock()
	if err := p.takeSlot(request.GetId(), done); err != nil {
		return err
	}
	if err := p.stream.Send(request); err != nil {
		return p.unsent(request.GetId(), err)
	}
	return nil
}

// unsent handles a failed Send. io.EOF means that the stream is broken; the receiver then answers
// all slots, this one too. Any other error is about this message alone, which was not sent.
func (p *Pipeline) unsent(id uint64, err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	if p.releaseSlot(id) == nil {
		return nil // the receiver was faster: the stream broke and done has been called
	}
	p.answered()
	return newError(err)
}

// takeSlot registers a request before it is sent, since its answer may come before Send returns.
func (p *Pipeline) takeSlot(id uint64, done func(*kvpb.PipelineResponse, error)) error {
	if done == nil {
		done = p.keepError
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failed != nil {
		return p.failed
	}
	if p.closed {
		return ErrPipelineClosed
	}
	if p.busy == 0 {
		p.idle = make(chan struct{})
	}
	p.busy++
	p.slots[id] = done
	return nil
}

// releaseSlot frees a slot and returns its done function, or nil.
func (p *Pipeline) releaseSlot(id uint64) func(*kvpb.PipelineResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if id >= uint64(len(p.slots)) || p.slots[id] == nil {
		return nil
	}
	done := p.slots[id]
	p.slots[id] = nil
	p.free <- id // never blocks: the channel has room for all slots
	return done
}

// answered counts a request as answered after its done function has run, so that Flush returns only
// then.
func (p *Pipeline) answered() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.busy--
	if p.busy == 0 {
		close(p.idle)
	}
}

// receive hands answers to done functions until the stream ends.
func (p *Pipeline) receive() {
	defer close(p.ended)
	for {
		response, err := p.stream.Recv()
		if err != nil {
			p.fail(err)
			return
		}
		done := p.releaseSlot(response.GetId())
		if done == nil {
			p.cancel()
			p.fail(grpcstatus.Errorf(codes.Internal, "answer to request %d, which is not in flight", response.GetId()))
			return
		}
		done(response, p.responseError(response.GetError()))
		p.answered()
	}
}

// fail ends the pipeline: later requests are refused, and requests in flight get the error. After
// Close, the end of the stream without requests in flight is not an error.
func (p *Pipeline) fail(err error) {
	p.mu.Lock()
	orderly := p.closed && p.busy == 0 && errors.Is(err, io.EOF)
	if errors.Is(err, io.EOF) {
		err = grpcstatus.Error(codes.Unavailable, "the server ended the pipeline")
	}
	e := newError(err)
	if !orderly {
		p.failed = e
	}
	p.mu.Unlock()
	for id := range p.slots {
		if done := p.releaseSlot(uint64(id)); done != nil {
			done(nil, e)
			p.answered()
		}
	}
}

func (p *Pipeline) endError() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failed != nil {
		return p.failed
	}
	return ErrPipelineClosed
}

func (p *Pipeline) keepError(_ *kvpb.PipelineResponse, err error) {
	if err == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dropped == nil {
		p.dropped = err
	}
}

// responseError takes the server's time from a refusal of a request id, so that the next id has it.
func (p *Pipeline) responseError(s *status.Status) error {
	if s == nil {
		return nil
	}
	e := newError(grpcstatus.FromProto(s).Err())
	p.client.adjustClock(e)
	return e
}

func epochOf(r *kvpb.PipelineResponse) Epoch {
	switch answer := r.GetResponse().(type) {
	case *kvpb.PipelineResponse_Put:
		return Epoch(answer.Put.GetEpoch())
	case *kvpb.PipelineResponse_Delete:
		return Epoch(answer.Delete.GetEpoch())
	case *kvpb.PipelineResponse_BatchWrite:
		return Epoch(answer.BatchWrite.GetEpoch())
	}
	return 0
}
