package server

import (
	"context"
	"errors"
	"io"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
)

// neededRow is a request and all that it needs: with exactly these rights it is not denied, and without any one of them it is.
type neededRow struct {
	name  string
	needs []auth.Grant
	call  func(ctx context.Context, c *clients) error
}

// clients are the clients of one connection.
type clients struct {
	kv    pb.KVServiceClient
	txn   pb.TransactionServiceClient
	feed  pb.FeedServiceClient
	lease pb.LeaseServiceClient
	lock  pb.LockServiceClient
	admin pb.AdminServiceClient
}

func clientsOf(conn grpc.ClientConnInterface) *clients {
	return &clients{
		pb.NewKVServiceClient(conn), pb.NewTransactionServiceClient(conn), pb.NewFeedServiceClient(conn),
		pb.NewLeaseServiceClient(conn), pb.NewLockServiceClient(conn), pb.NewAdminServiceClient(conn),
	}
}

const leaseOfTests, leaseOfKey = 7, 8 // the second one has the key k

func absent(key string) *pb.Precondition {
	return &pb.Precondition{Key: []byte(key), Condition: &pb.Precondition_Exists{Exists: false}}
}

func prefixRange(prefix string) *pb.KeyRange { return &pb.KeyRange{Prefix: []byte(prefix)} }

func mutation(key string, lease uint64) *pb.Mutation {
	return &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: []byte(key), Value: []byte("v"), LeaseId: lease}
}

func appended(key string) *pb.Invocation {
	return &pb.Invocation{Key: []byte(key), Operation: &pb.Invocation_Append{Append: []byte("1")}, ReturnOld: true}
}

// inPipeline sends one message, and returns the error of its answer.
func inPipeline(m *pb.PipelineRequest) func(context.Context, *clients) error {
	return func(ctx context.Context, c *clients) error {
		stream, err := c.kv.Pipeline(ctx)
		if err != nil {
			return err
		}
		_ = stream.Send(m) // if the stream has ended, Recv has the reason
		out, err := stream.Recv()
		if err == nil && out.GetError() != nil {
			err = status.ErrorProto(out.GetError())
		}
		_ = stream.CloseSend()
		return err
	}
}

// transacted begins a transaction, and sends one operation and a commit.
func transacted(m *pb.TransactRequest) func(context.Context, *clients) error {
	return func(ctx context.Context, c *clients) error {
		stream, err := c.txn.Transact(ctx)
		if err != nil {
			return err
		}
		for _, r := range []*pb.TransactRequest{
			{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{}}}, m, {Request: &pb.TransactRequest_Commit{Commit: &pb.CommitRequest{}}},
		} {
			_ = stream.Send(r) // the same
			out, err := stream.Recv()
			if err != nil {
				return err
			}
			if out.GetError() != nil {
				return status.ErrorProto(out.GetError())
			}
		}
		return nil
	}
}

func executed(r *pb.ExecuteRequest) func(context.Context, *clients) error {
	return func(ctx context.Context, c *clients) error {
		_, err := c.txn.Execute(ctx, r)
		return err
	}
}

func scanned(r *pb.ScanRequest) func(context.Context, *clients) error {
	return func(ctx context.Context, c *clients) error {
		stream, err := c.kv.Scan(ctx, r)
		for err == nil {
			_, err = stream.Recv()
		}
		if errors.Is(err, io.EOF) {
			err = nil
		}
		return err
	}
}

func watched(ranges ...*pb.KeyRange) func(context.Context, *clients) error {
	return func(ctx context.Context, c *clients) error {
		stream, err := c.feed.Watch(ctx)
		if err != nil {
			return err
		}
		_ = stream.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{Ranges: ranges}}})
		out, err := stream.Recv()
		if err == nil && out.GetEnded() != nil {
			err = status.ErrorProto(out.GetEnded().GetError())
		}
		return err
	}
}

func unary[In, Out any](of func(*clients) func(context.Context, In, ...grpc.CallOption) (Out, error), in In) func(context.Context, *clients) error {
	return func(ctx context.Context, c *clients) error {
		_, err := of(c)(ctx, in)
		return err
	}
}

func neededRows() []neededRow {
	k, lease := []byte("k"), uint64(leaseOfTests)
	r, w, l, b := grant("r", "k"), grant("w", "k"), grant("l", "k"), grant("r", "b")
	rb := []auth.Grant{b}
	get, put := &pb.GetRequest{Key: k}, &pb.PutRequest{Key: k, Value: k, LeaseId: lease, Preconditions: []*pb.Precondition{absent("b")}}
	del := &pb.DeleteRequest{Key: k, Preconditions: []*pb.Precondition{absent("b")}}
	batchGet := &pb.BatchGetRequest{Keys: [][]byte{k, []byte("b")}}
	batchWrite := &pb.BatchWriteRequest{
		Mutations:     []*pb.Mutation{{Kind: pb.Mutation_KIND_DELETE, Key: []byte("d")}, mutation("k", lease)},
		Preconditions: []*pb.Precondition{absent("b")},
	}
	deleteRange := &pb.DeleteRangeRequest{Range: prefixRange("k"), Preconditions: []*pb.Precondition{absent("b")}}
	invoke := &pb.InvokeRequest{Invocation: appended("k"), Preconditions: []*pb.Precondition{absent("b")}}
	invokeAll := &pb.InvokeAllRequest{Invocations: []*pb.Invocation{appended("k"), appended("m")}, Preconditions: []*pb.Precondition{absent("b")}}
	fence := &pb.Precondition{Condition: &pb.Precondition_Fence{Fence: &pb.Fence{Name: []byte("b"), Token: 1}}}
	kvGet := func(c *clients) func(context.Context, *pb.GetRequest, ...grpc.CallOption) (*pb.GetResponse, error) {
		return c.kv.Get
	}
	rows := []neededRow{
		{"get", []auth.Grant{r}, unary(kvGet, get)},
		{"get as a stream", []auth.Grant{r}, func(ctx context.Context, c *clients) error {
			stream, err := c.kv.GetStream(ctx, &pb.GetStreamRequest{Key: k})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		}},
		{"put", []auth.Grant{w, l, b}, unary(func(c *clients) func(context.Context, *pb.PutRequest, ...grpc.CallOption) (*pb.PutResponse, error) {
			return c.kv.Put
		}, put)},
		{"put with a fence", []auth.Grant{w, b}, unary(func(c *clients) func(context.Context, *pb.PutRequest, ...grpc.CallOption) (*pb.PutResponse, error) {
			return c.kv.Put
		}, &pb.PutRequest{Key: k, Preconditions: []*pb.Precondition{fence}})},
		{"delete", []auth.Grant{w, b}, unary(func(c *clients) func(context.Context, *pb.DeleteRequest, ...grpc.CallOption) (*pb.DeleteResponse, error) {
			return c.kv.Delete
		}, del)},
		{"batch get", []auth.Grant{r, b}, unary(func(c *clients) func(context.Context, *pb.BatchGetRequest, ...grpc.CallOption) (*pb.BatchGetResponse, error) {
			return c.kv.BatchGet
		}, batchGet)},
		{"batch write", []auth.Grant{w, l, b, grant("w", "d")}, unary(func(c *clients) func(context.Context, *pb.BatchWriteRequest, ...grpc.CallOption) (*pb.BatchWriteResponse, error) {
			return c.kv.BatchWrite
		}, batchWrite)},
		{"delete range", []auth.Grant{r, w, b}, unary(func(c *clients) func(context.Context, *pb.DeleteRangeRequest, ...grpc.CallOption) (*pb.DeleteRangeResponse, error) {
			return c.kv.DeleteRange
		}, deleteRange)},
		{"invoke", []auth.Grant{r, w, b}, unary(func(c *clients) func(context.Context, *pb.InvokeRequest, ...grpc.CallOption) (*pb.InvokeResponse, error) {
			return c.kv.Invoke
		}, invoke)},
		{"invoke all", []auth.Grant{r, w, b, grant("r", "m"), grant("w", "m")}, unary(func(c *clients) func(context.Context, *pb.InvokeAllRequest, ...grpc.CallOption) (*pb.InvokeAllResponse, error) {
			return c.kv.InvokeAll
		}, invokeAll)},
		{"scan", []auth.Grant{r}, scanned(&pb.ScanRequest{Range: prefixRange("k")})},
		{"scan to the end", []auth.Grant{{Lower: k, Read: true}}, scanned(&pb.ScanRequest{Range: &pb.KeyRange{Start: k}})},
		{"count backwards", []auth.Grant{r}, scanned(&pb.ScanRequest{Range: prefixRange("k"), CountOnly: true, Reverse: true})},
		{"bulk load", []auth.Grant{w, grant("w", "n")}, func(ctx context.Context, c *clients) error {
			stream, err := c.kv.BulkLoad(ctx)
			if err != nil {
				return err
			}
			_ = stream.Send(&pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: k}}}) // an error comes with the answer
			_ = stream.Send(&pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: []byte("n")}}})
			_, err = stream.CloseAndRecv() // without a commit: not denied is enough
			return err
		}},
		{"history of a key", []auth.Grant{r}, unary(func(c *clients) func(context.Context, *pb.HistoryRequest, ...grpc.CallOption) (*pb.HistoryResponse, error) {
			return c.feed.History
		}, &pb.HistoryRequest{Key: k})},
		{"history", []auth.Grant{r}, unary(func(c *clients) func(context.Context, *pb.HistoryRequest, ...grpc.CallOption) (*pb.HistoryResponse, error) {
			return c.feed.History
		}, &pb.HistoryRequest{Range: prefixRange("k")})},
		{"diff", []auth.Grant{r}, unary(func(c *clients) func(context.Context, *pb.DiffRequest, ...grpc.CallOption) (*pb.DiffResponse, error) {
			return c.feed.Diff
		}, &pb.DiffRequest{Range: prefixRange("k"), FromEpoch: 1})},
		{"watch", []auth.Grant{r, b}, watched(prefixRange("k"), prefixRange("b"))},
		{"watch from a key", []auth.Grant{{Lower: k, Read: true}}, watched(&pb.KeyRange{Start: k})},
		{"grant a lease", []auth.Grant{grant("l", "x")}, unary(func(c *clients) func(context.Context, *pb.GrantLeaseRequest, ...grpc.CallOption) (*pb.GrantLeaseResponse, error) {
			return c.lease.GrantLease
		}, &pb.GrantLeaseRequest{Ttl: durationpb.New(1e12)})},
		{"get a lease", []auth.Grant{grant("l", "x")}, unary(func(c *clients) func(context.Context, *pb.GetLeaseRequest, ...grpc.CallOption) (*pb.GetLeaseResponse, error) {
			return c.lease.GetLease
		}, &pb.GetLeaseRequest{Id: lease})},
		{"keep alive", []auth.Grant{grant("l", "x")}, func(ctx context.Context, c *clients) error {
			stream, err := c.lease.KeepAlive(ctx)
			if err == nil {
				_ = stream.Send(&pb.KeepAliveRequest{Ids: []uint64{leaseOfTests}})
				_, err = stream.Recv()
			}
			return err
		}},
		{"list leases", []auth.Grant{action(auth.ActionObserve)}, unary(func(c *clients) func(context.Context, *pb.ListLeasesRequest, ...grpc.CallOption) (*pb.ListLeasesResponse, error) {
			return c.lease.ListLeases
		}, &pb.ListLeasesRequest{})},
		{"acquire a lock", []auth.Grant{l}, unary(func(c *clients) func(context.Context, *pb.AcquireLockRequest, ...grpc.CallOption) (*pb.AcquireLockResponse, error) {
			return c.lock.AcquireLock
		}, &pb.AcquireLockRequest{Name: k, LeaseId: lease})},
		{"release a lock", []auth.Grant{l}, unary(func(c *clients) func(context.Context, *pb.ReleaseLockRequest, ...grpc.CallOption) (*pb.ReleaseLockResponse, error) {
			return c.lock.ReleaseLock
		}, &pb.ReleaseLockRequest{Name: k, Token: 1})},
		{"get a lock", []auth.Grant{r}, unary(func(c *clients) func(context.Context, *pb.GetLockRequest, ...grpc.CallOption) (*pb.GetLockResponse, error) {
			return c.lock.GetLock
		}, &pb.GetLockRequest{Name: k})},
		{"list locks", []auth.Grant{r}, unary(func(c *clients) func(context.Context, *pb.ListLocksRequest, ...grpc.CallOption) (*pb.ListLocksResponse, error) {
			return c.lock.ListLocks
		}, &pb.ListLocksRequest{Start: k, End: []byte("k\x00")})},
		{"observe a lock", []auth.Grant{r}, func(ctx context.Context, c *clients) error {
			stream, err := c.lock.ObserveLock(ctx, &pb.ObserveLockRequest{Name: k})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		}},
		{"execute with a condition", []auth.Grant{b, w}, executed(&pb.ExecuteRequest{
			Conditions:     []*pb.TxnCondition{{Condition: &pb.TxnCondition_Key{Key: absent("b")}}},
			ThenOperations: []*pb.Operation{{Operation: &pb.Operation_Write{Write: mutation("k", 0)}}},
		})},
		{"execute with a range", []auth.Grant{b, w}, executed(&pb.ExecuteRequest{
			Conditions:     []*pb.TxnCondition{{Condition: &pb.TxnCondition_Range{Range: &pb.RangeCondition{Range: prefixRange("b"), Condition: &pb.RangeCondition_Empty{Empty: true}}}}},
			ThenOperations: []*pb.Operation{{Operation: &pb.Operation_Write{Write: mutation("k", 0)}}},
		})},
		{"execute the branch not taken", []auth.Grant{r, b, w}, executed(&pb.ExecuteRequest{
			ThenOperations: []*pb.Operation{{Operation: &pb.Operation_Get{Get: &pb.KeyReadRequest{Key: k}}}},
			ElseOperations: []*pb.Operation{{Operation: &pb.Operation_Scan{Scan: &pb.RangeReadRequest{Range: prefixRange("b")}}}, {Operation: &pb.Operation_Write{Write: mutation("k", 0)}}},
		})},
		{"execute writes", []auth.Grant{r, w, l}, executed(&pb.ExecuteRequest{
			ThenOperations: []*pb.Operation{
				{Operation: &pb.Operation_Write{Write: mutation("k", lease)}},
				{Operation: &pb.Operation_Invoke{Invoke: appended("k")}},
				{Operation: &pb.Operation_DeleteRange{DeleteRange: &pb.RangeDeleteRequest{Range: prefixRange("k")}}},
			},
		})},
		{"transact get", []auth.Grant{r}, transacted(&pb.TransactRequest{Request: &pb.TransactRequest_Get{Get: &pb.KeyReadRequest{Key: k}}})},
		{"transact batch get", []auth.Grant{r, b}, transacted(&pb.TransactRequest{Request: &pb.TransactRequest_BatchGet{BatchGet: &pb.BatchReadRequest{Keys: batchGet.Keys}}})},
		{"transact scan", []auth.Grant{r}, transacted(&pb.TransactRequest{Request: &pb.TransactRequest_Scan{Scan: &pb.RangeReadRequest{Range: prefixRange("k")}}})},
		{"transact write", []auth.Grant{w, l}, transacted(&pb.TransactRequest{Request: &pb.TransactRequest_Write{Write: &pb.WriteRequest{Mutations: []*pb.Mutation{mutation("k", lease)}}}})},
		{"transact delete range", []auth.Grant{r, w}, transacted(&pb.TransactRequest{Request: &pb.TransactRequest_DeleteRange{DeleteRange: &pb.RangeDeleteRequest{Range: prefixRange("k")}}})},
		{"transact invoke", []auth.Grant{r, w}, transacted(&pb.TransactRequest{Request: &pb.TransactRequest_Invoke{Invoke: appended("k")}})},
	}
	for name, m := range map[string]struct {
		needs []auth.Grant
		m     *pb.PipelineRequest
	}{
		"get":          {[]auth.Grant{r}, &pb.PipelineRequest{Request: &pb.PipelineRequest_Get{Get: get}}},
		"put":          {[]auth.Grant{w, l, b}, &pb.PipelineRequest{Request: &pb.PipelineRequest_Put{Put: put}}},
		"delete":       {append(rb, w), &pb.PipelineRequest{Request: &pb.PipelineRequest_Delete{Delete: del}}},
		"batch get":    {append(rb, r), &pb.PipelineRequest{Request: &pb.PipelineRequest_BatchGet{BatchGet: batchGet}}},
		"batch write":  {[]auth.Grant{w, l, b, grant("w", "d")}, &pb.PipelineRequest{Request: &pb.PipelineRequest_BatchWrite{BatchWrite: batchWrite}}},
		"delete range": {[]auth.Grant{r, w, b}, &pb.PipelineRequest{Request: &pb.PipelineRequest_DeleteRange{DeleteRange: deleteRange}}},
		"invoke":       {[]auth.Grant{r, w, b}, &pb.PipelineRequest{Request: &pb.PipelineRequest_Invoke{Invoke: invoke}}},
		"invoke all":   {[]auth.Grant{r, w, b, grant("r", "m"), grant("w", "m")}, &pb.PipelineRequest{Request: &pb.PipelineRequest_InvokeAll{InvokeAll: invokeAll}}},
	} {
		rows = append(rows, neededRow{"pipelined " + name, m.needs, inPipeline(m.m)})
	}
	return rows
}

func TestRequestsNeedExactlyTheirRights(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		c, ctx := clientsOf(h.conn), testContext(t)
		for _, id := range []uint64{leaseOfTests, leaseOfKey} {
			if _, err := c.lease.GrantLease(ctx, &pb.GrantLeaseRequest{Id: id, Ttl: durationpb.New(1e12)}); err != nil {
				t.Fatal(err)
			}
		}
		for _, row := range neededRows() {
			h.setUsers(map[string][]auth.Grant{"user": row.needs})
			if err := row.call(as(ctx, "user"), c); denied(err) {
				t.Errorf("%s: denied with all that it needs: %v", row.name, err)
			}
			for i := range row.needs {
				less := append(append([]auth.Grant{grant("rwl", "x"), grant("rwl", "c")}, row.needs[:i]...), row.needs[i+1:]...)
				if len(row.needs) == 1 && row.needs[0].Lease {
					less = less[1:1]
				}
				h.setUsers(map[string][]auth.Grant{"user": less})
				if err := row.call(as(ctx, "user"), c); !denied(err) {
					t.Errorf("%s: without %+v: %v", row.name, row.needs[i], err)
				}
			}
			if err := row.call(ctx, c); status.Code(err) != 16 {
				t.Errorf("%s: without credentials: %v", row.name, err)
			}
			if err := row.call(as(ctx, "nobody"), c); status.Code(err) != 16 {
				t.Errorf("%s: with an unknown token: %v", row.name, err)
			}
		}
	})
}
