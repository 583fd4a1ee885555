package wire

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/transport"
)

// The methods of directEcho.
const (
	directPut = iota + 1
	directBatchWrite
	directPipeline
)

var directPaths = map[string]int{
	"/epochkv.v1.KVService/Put": directPut, "/epochkv.v1.KVService/BatchWrite": directBatchWrite, "/epochkv.v1.KVService/Pipeline": directPipeline,
}

// directEcho answers writes from constants over the server's own transport, with the server's limits: in the
// goroutine that reads the connection, or, with a log, after a shared sync of as many bytes as the store's log would have.
type directEcho struct{ log *groupAnswers }

// serveDirectEcho serves until ctx ends. With a directory, writes are durable.
func serveDirectEcho(ctx context.Context, listener net.Listener, dir string) (err error) {
	tune()
	var e directEcho
	if dir != "" {
		file, err := openGroupCommit(dir)
		if err != nil {
			return err
		}
		e.log = newGroupAnswers(file)
		defer func() { err = errors.Join(err, e.log.close()) }()
	}
	t := transport.New(transport.Options{
		Streams: 1024, StreamWindow: 256 << 10, ConnWindow: 1 << 20, HeaderBytes: 8 << 10, HandshakeTimeout: 10 * time.Second,
		KeepaliveTime: 30 * time.Second, KeepaliveTimeout: 10 * time.Second, PingInterval: 10 * time.Second, HandOverAfter: time.Millisecond,
		ProgressTimeout: 30 * time.Second, AcceptFailed: func(error) {},
	}, e, &transport.Services{})
	stop := context.AfterFunc(ctx, t.Close)
	defer stop()
	if err = t.Serve(listener); errors.Is(err, transport.ErrClosed) {
		err = nil
	}
	return err
}

// Connect implements transport.Service.
func (e directEcho) Connect(*transport.Conn) transport.Client { return e }

// Fast implements transport.Client.
func (directEcho) Fast(path string) int { return directPaths[path] }

// Lane implements transport.Client.
func (e directEcho) Lane() transport.Lane { return &echoLane{log: e.log} }

// OpenStream implements transport.Client.
func (directEcho) OpenStream(_, _ string) error { return nil }

// CloseStream implements transport.Client.
func (directEcho) CloseStream() {}

// Receive implements transport.Client.
func (directEcho) Receive(int) error { return nil }

// Received implements transport.Client.
func (directEcho) Received(int) {}

// Cancelled implements transport.Client.
func (directEcho) Cancelled(transport.Request) {}

// Overdue is never true: the answers are small.
func (directEcho) Overdue() bool { return false }

func (directEcho) Unsent(int)            {}
func (directEcho) IsWanted(int) bool     { return false }
func (directEcho) LeastProgress(int) int { return 256 << 10 }

// Closed implements transport.Client.
func (directEcho) Closed(error) {}

// HeadersRefused implements transport.Client.
func (directEcho) HeadersRefused(int) {}

// Status implements transport.Client.
func (directEcho) Status(err error) *status.Status { return status.New(codes.Internal, err.Error()) }

// Messages implements transport.Client.
func (e directEcho) Messages(r transport.Request) (transport.Messages, error) {
	if r.Method() != directPipeline {
		return nil, nil //nolint:nilnil // as the interface says
	}
	p := &echoPipeline{request: r, log: e.log}
	p.in.Request = &p.put
	p.put.Put = new(pb.PutRequest)
	return p, nil
}

var (
	echoedPut   = &pb.PutResponse{Epoch: 1_000_000}
	echoedBatch = &pb.BatchWriteResponse{Epoch: 1_000_000}
)

// echoLane decodes requests into messages that it uses again, as the server does.
type echoLane struct {
	log   *groupAnswers
	put   pb.PutRequest
	batch pb.BatchWriteRequest
}

// Rest implements transport.Lane.
func (*echoLane) Rest() {}

// Execute implements transport.Lane.
func (l *echoLane) Execute(r transport.Request, message []byte) {
	size, answer := recordOverhead, transport.Message(echoedPut)
	var err error
	if r.Method() == directPut {
		l.put.ResetVT()
		err = l.put.UnmarshalVT(message)
		size += operationOverhead + len(l.put.Key) + len(l.put.Value)
	} else {
		answer = echoedBatch
		l.batch.ResetVT()
		err = l.batch.UnmarshalVT(message)
		for _, m := range l.batch.Mutations {
			size += operationOverhead + len(m.Key) + len(m.Value)
		}
	}
	switch {
	case err != nil:
		r.Fail(status.New(codes.Internal, err.Error()))
	case l.log == nil:
		r.Answer(answer, nil)
	default:
		l.log.add(size, pendingAnswer{request: r, answer: answer})
	}
}

// echoPipeline answers the puts of a stream.
type echoPipeline struct {
	request transport.Request
	log     *groupAnswers
	in      pb.PipelineRequest
	put     pb.PipelineRequest_Put
	out     pb.PipelineResponse
}

var echoedPipelined = &pb.PipelineResponse_Put{Put: echoedPut}

// Execute implements transport.Messages.
func (p *echoPipeline) Execute(_ transport.Lane, message []byte) bool {
	resetRequest(&p.in)
	if err := p.in.UnmarshalVT(message); err != nil {
		p.request.EndStream(status.New(codes.Internal, err.Error()))
		return false
	}
	if p.log == nil {
		p.out.Id, p.out.Response = p.in.Id, echoedPipelined
		p.request.Send(&p.out, nil)
		return true
	}
	put := p.in.GetPut()
	p.log.add(recordOverhead+operationOverhead+len(put.GetKey())+len(put.GetValue()), pendingAnswer{request: p.request, id: p.in.Id, pipelined: true})
	return true
}

// End implements transport.Messages.
func (p *echoPipeline) End(st *status.Status) {
	if p.log == nil || st.Code() != codes.OK {
		p.request.EndStream(st)
		return
	}
	p.log.add(0, pendingAnswer{request: p.request, ends: true})
}

// pendingAnswer is an answer that waits for the sync.
type pendingAnswer struct {
	request   transport.Request
	answer    transport.Message // of a unary request
	id        uint64
	pipelined bool
	ends      bool // the stream ends
}

// groupAnswers is groupCommit for answers that no goroutine waits for: one goroutine writes and syncs what came during the last
// sync, and answers it.
type groupAnswers struct {
	file  *groupCommit
	ended chan struct{}

	mu      sync.Mutex // guards what follows
	more    sync.Cond
	records []byte
	waiting []pendingAnswer
	closed  bool
}

func newGroupAnswers(file *groupCommit) *groupAnswers {
	g := &groupAnswers{file: file, ended: make(chan struct{})}
	g.more.L = &g.mu
	go g.run()
	return g
}

func (g *groupAnswers) close() error {
	g.mu.Lock()
	g.closed = true
	g.more.Signal()
	g.mu.Unlock()
	<-g.ended
	return g.file.close()
}

func (g *groupAnswers) add(size int, p pendingAnswer) {
	g.mu.Lock()
	g.records = appendZeros(g.records, size)
	g.waiting = append(g.waiting, p)
	first := len(g.waiting) == 1
	g.mu.Unlock()
	if first {
		g.more.Signal()
	}
}

func (g *groupAnswers) run() {
	defer close(g.ended)
	var records []byte
	var ready []pendingAnswer
	var out pb.PipelineResponse
	for {
		g.mu.Lock()
		for len(g.waiting) == 0 && !g.closed {
			g.more.Wait()
		}
		if g.closed {
			g.mu.Unlock()
			return
		}
		records, g.records = g.records, records[:0]
		ready, g.waiting = g.waiting, ready[:0]
		g.mu.Unlock()
		err := g.file.write(records)
		for i := range ready {
			ready[i].send(err, &out)
		}
		for i := range ready {
			ready[i].request.Flush()
		}
		clear(ready)
	}
}

func (p *pendingAnswer) send(err error, out *pb.PipelineResponse) {
	switch {
	case p.ends:
		p.request.EndStream(status.New(codes.OK, ""))
	case err != nil && p.pipelined:
		p.request.EndStream(status.New(codes.Internal, err.Error()))
	case err != nil:
		p.request.Fail(status.New(codes.Internal, err.Error()))
	case p.pipelined:
		out.Id, out.Response = p.id, echoedPipelined
		p.request.Send(out, nil)
	default:
		p.request.Answer(p.answer, nil)
	}
}
