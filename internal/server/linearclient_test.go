package server

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/sim"
)

// linearClient sends the requests of one client of a history over the wire.
type linearClient struct {
	*linear
	id           int
	rng          *rand.Rand
	kv           pb.KVServiceClient
	transactions pb.TransactionServiceClient
}

func registerKey(n int) string      { return fmt.Sprintf("register/%d", n) }
func registerOf(key string) (n int) { return int(key[len(key)-1] - '0') }

// statusAfter says whether an error is about a request that was executed.
func statusAfter(o *sim.RegisterOp, err error) sim.Status {
	switch reason := reasonOf(status.Convert(err)); reason {
	case pb.ErrorReason_ERROR_REASON_PRECONDITION_FAILED.Reason():
		if o.Kind == sim.CompareAndSet {
			return sim.Committed // and did not apply
		}
	case pb.ErrorReason_ERROR_REASON_OVERLOADED.Reason(), pb.ErrorReason_ERROR_REASON_MEMORY_FULL.Reason(),
		pb.ErrorReason_ERROR_REASON_SHUTTING_DOWN.Reason(), pb.ErrorReason_ERROR_REASON_READ_ONLY.Reason(),
		pb.ErrorReason_ERROR_REASON_EXPIRED_BEFORE_START.Reason(), pb.ErrorReason_ERROR_REASON_CONFLICT.Reason():
		return sim.Aborted
	}
	return sim.Unknown
}

func reasonOf(s *status.Status) string {
	for _, d := range s.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info.Reason
		}
	}
	return ""
}

// context is of one request or stream: mostly patient, sometimes with a deadline that may pass, sometimes cancelled.
func (c *linearClient) context() (context.Context, context.CancelFunc) {
	soon := time.Duration(c.rng.IntN(3000)) * time.Microsecond
	switch c.rng.IntN(12) {
	case 0:
		return context.WithTimeout(context.Background(), soon)
	case 1:
		ctx, cancel := context.WithCancel(context.Background())
		time.AfterFunc(soon, cancel)
		return ctx, cancel
	}
	return context.WithTimeout(context.Background(), time.Minute)
}

// next makes up an operation. Values are numbers that no other write has.
func (c *linearClient) next() *sim.RegisterOp {
	n := c.rng.IntN(linearKeys)
	o := &sim.RegisterOp{Client: c.id, Key: registerKey(n), Value: sim.RegisterValue(c.numbers.Add(1))}
	switch p := c.rng.IntN(20); {
	case p < 8:
		o.Kind = sim.Get
	case p < 13:
		o.Kind = sim.Put
	case p < 14:
		o.Kind = sim.Delete
	case p < 15:
		o.Kind = sim.Increment
	default:
		o.Kind = sim.CompareAndSet
		if value := c.values[n].Load(); value != nil {
			o.Expect = *value
		}
	}
	if o.Kind == sim.Put {
		c.values[n].Store(&o.Value)
	}
	return o
}

func (c *linearClient) durability() pb.Durability {
	if c.lossy || c.rng.IntN(2) == 0 {
		return pb.Durability_DURABILITY_SYNC
	}
	return pb.Durability_DURABILITY_ASYNC
}

// unary sends one request after another.
func (c *linearClient) unary() {
	for range linearRounds {
		ctx, cancel := c.context()
		switch o := c.next(); {
		case o.Kind == sim.Get && c.rng.IntN(3) == 0:
			c.batchGet(ctx, o)
		case o.Kind == sim.CompareAndSet && c.rng.IntN(2) == 0:
			c.execute(ctx, o)
		default:
			o.Call = c.now()
			c.complete(o, c.call(ctx, o))
		}
		cancel()
	}
}

// call sends the request that a pipeline would send.
func (c *linearClient) call(ctx context.Context, o *sim.RegisterOp) (err error) {
	answer := new(pb.PipelineResponse)
	switch r := c.request(o).Request.(type) {
	case *pb.PipelineRequest_Get:
		var out *pb.GetResponse
		out, err = c.kv.Get(ctx, r.Get)
		answer.Response = &pb.PipelineResponse_Get{Get: out}
	case *pb.PipelineRequest_Put:
		var out *pb.PutResponse
		out, err = c.kv.Put(ctx, r.Put)
		answer.Response = &pb.PipelineResponse_Put{Put: out}
	case *pb.PipelineRequest_Delete:
		var out *pb.DeleteResponse
		out, err = c.kv.Delete(ctx, r.Delete)
		answer.Response = &pb.PipelineResponse_Delete{Delete: out}
	case *pb.PipelineRequest_Invoke:
		var out *pb.InvokeResponse
		out, err = c.kv.Invoke(ctx, r.Invoke)
		answer.Response = &pb.PipelineResponse_Invoke{Invoke: out}
	}
	if err != nil {
		return err
	}
	return note(o, answer)
}

// request is an operation on the wire.
func (c *linearClient) request(o *sim.RegisterOp) *pb.PipelineRequest {
	key, durability := []byte(o.Key), c.durability()
	invoke := &pb.Invocation{Key: key, ReturnOld: true, ReturnNew: true}
	switch o.Kind {
	case sim.Get:
		return &pb.PipelineRequest{Request: &pb.PipelineRequest_Get{Get: &pb.GetRequest{Key: key}}}
	case sim.Delete:
		return &pb.PipelineRequest{Request: &pb.PipelineRequest_Delete{Delete: &pb.DeleteRequest{Key: key, Durability: durability}}}
	case sim.Put:
		return &pb.PipelineRequest{Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: key, Value: []byte(o.Value), Durability: durability}}}
	case sim.Increment:
		invoke.Operation = &pb.Invocation_Increment{Increment: &pb.Increment{Delta: 1}}
	case sim.CompareAndSet:
		if c.rng.IntN(2) == 0 {
			return &pb.PipelineRequest{Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{
				Key: key, Value: []byte(o.Value), Durability: durability, Preconditions: []*pb.Precondition{expected(o)},
			}}}
		}
		invoke.Operation = &pb.Invocation_CompareAndSet{CompareAndSet: &pb.CompareAndSet{Expect: []byte(o.Expect), Value: []byte(o.Value)}}
	}
	return &pb.PipelineRequest{Request: &pb.PipelineRequest_Invoke{Invoke: &pb.InvokeRequest{Invocation: invoke, Durability: durability}}}
}

func expected(o *sim.RegisterOp) *pb.Precondition {
	return &pb.Precondition{Key: []byte(o.Key), Condition: &pb.Precondition_ValueEquals{ValueEquals: []byte(o.Expect)}}
}

// note records what an answer says.
func note(o *sim.RegisterOp, answer *pb.PipelineResponse) error {
	switch r := answer.Response.(type) {
	case *pb.PipelineResponse_Get:
		noteGet(o, r.Get)
		o.Epoch, o.ReadEpoch = r.Get.Epoch, r.Get.ReadEpoch
	case *pb.PipelineResponse_Put:
		o.Epoch, o.Applied = r.Put.Epoch, true
	case *pb.PipelineResponse_Delete:
		o.Epoch = r.Delete.Epoch
	case *pb.PipelineResponse_Invoke:
		result := r.Invoke.Result
		o.Epoch, o.Applied, o.Seen, o.Found, o.Old = r.Invoke.Epoch, result.Applied, true, result.OldFound, string(result.Old)
		if old, _ := strconv.Atoi(o.Old); o.Kind == sim.Increment && string(result.New) != strconv.Itoa(old+1) {
			o.Old = fmt.Sprintf("%s, which incremented is %s", result.Old, result.New) // fits no order
		}
	case *pb.PipelineResponse_Error:
		return status.ErrorProto(r.Error)
	}
	return nil
}

func noteGet(o *sim.RegisterOp, r *pb.GetResponse) {
	o.Seen, o.Found, o.Old = true, r.Found, string(r.Value)
}

// batchGet reads the key of o and another at one epoch.
func (c *linearClient) batchGet(ctx context.Context, o *sim.RegisterOp) {
	other := &sim.RegisterOp{Client: c.id, Kind: sim.Get, Key: registerKey((registerOf(o.Key) + 1) % linearKeys)}
	both := []*sim.RegisterOp{o, other}
	o.Call = c.now()
	other.Call = o.Call
	out, err := c.kv.BatchGet(ctx, &pb.BatchGetRequest{Keys: [][]byte{[]byte(o.Key), []byte(other.Key)}})
	for i, o := range both {
		if err == nil {
			o.Seen, o.Found, o.Old, o.Epoch = true, out.Results[i].Found, string(out.Results[i].Value), out.Results[i].Epoch
		}
		c.complete(o, err)
	}
}

// execute compares and sets in a transaction that also reads.
func (c *linearClient) execute(ctx context.Context, o *sim.RegisterOp) {
	get := &pb.Operation{Operation: &pb.Operation_Get{Get: &pb.KeyReadRequest{Key: []byte(o.Key)}}}
	put := &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: []byte(o.Key), Value: []byte(o.Value)}
	r := &pb.ExecuteRequest{
		Conditions:     []*pb.TxnCondition{{Condition: &pb.TxnCondition_Key{Key: expected(o)}}},
		ThenOperations: []*pb.Operation{get, {Operation: &pb.Operation_Write{Write: put}}},
		ElseOperations: []*pb.Operation{get},
		Durability:     c.durability(),
	}
	o.Call = c.now()
	out, err := c.transactions.Execute(ctx, r)
	if err == nil {
		noteGet(o, out.Results[0].GetGet())
		o.Epoch, o.Applied = out.Epoch, out.Succeeded
	}
	c.complete(o, err)
}

// pipelines opens one stream after another, and sends a few bursts of requests over each.
func (c *linearClient) pipelines() {
	for sent := 0; sent < linearRounds; {
		sent += c.pipeline()
	}
}

// pipeline is one stream. Requests without an answer are unknown, unless the server says that it has answered all.
func (c *linearClient) pipeline() (sent int) {
	ctx, cancel := c.context()
	defer cancel()
	stream, err := c.kv.Pipeline(ctx)
	if err != nil {
		return 1
	}
	number, pending := int(c.streams.Add(1)), map[uint64]*sim.RegisterOp{}
	for range 1 + c.rng.IntN(4) {
		for range 1 + c.rng.IntN(8) {
			sent++
			o := c.next()
			o.Stream, o.Sequence, o.Call = number, sent, c.now()
			r := c.request(o)
			r.Id = uint64(sent)
			pending[r.Id] = o
			if stream.Send(r) != nil {
				break // Recv has the error
			}
		}
		for len(pending) > 0 {
			answer, err := stream.Recv()
			if err != nil {
				for _, o := range pending {
					c.complete(o, err)
				}
				return sent
			}
			o := pending[answer.Id]
			delete(pending, answer.Id)
			c.complete(o, note(o, answer))
		}
	}
	return sent
}
