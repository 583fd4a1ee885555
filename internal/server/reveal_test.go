package server

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/vfs"
)

// heldSyncs makes the log's syncs wait until release is called.
func (h *harness) heldSyncs(t testing.TB) (release func()) {
	t.Helper()
	rule := h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Delay: 250 * time.Millisecond})
	return rule.Remove
}

// TestErrorsNeverRevealWhatACrashCouldTakeBack: while the sync of a SYNC put is held still, no
// error tells of the put: it arrives after the sync, and with a shorter deadline the client learns
// of the deadline and of nothing else.
func TestErrorsNeverRevealWhatACrashCouldTakeBack(t *testing.T) {
	absent := func(key string) []*pb.Precondition {
		return []*pb.Precondition{{Key: []byte(key), Condition: &pb.Precondition_Exists{Exists: false}}}
	}
	present := func(key string) []*pb.Precondition {
		return []*pb.Precondition{{Key: []byte(key), Condition: &pb.Precondition_Exists{Exists: true}}}
	}
	const async = pb.Durability_DURABILITY_ASYNC
	for name, attempt := range map[string]func(context.Context, *harness, string) error{
		"compare-and-set": func(ctx context.Context, h *harness, key string) error {
			_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte(key), Preconditions: absent(key), Durability: async})
			return err
		},
		"compare-and-set that succeeds": func(ctx context.Context, h *harness, key string) error {
			_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("other"), Preconditions: present(key), Durability: async})
			return err
		},
		"delete range": func(ctx context.Context, h *harness, key string) error {
			_, err := h.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Range: &pb.KeyRange{Prefix: []byte(key)}, Durability: async})
			return err
		},
		"invoke": func(ctx context.Context, h *harness, key string) error {
			_, err := h.kv.Invoke(ctx, &pb.InvokeRequest{Invocation: increment(key, 1), Durability: async})
			return err
		},
		"execute, directly": func(ctx context.Context, h *harness, key string) error {
			_, err := pb.NewTransactionServiceClient(h.conn).Execute(ctx, &pb.ExecuteRequest{
				Conditions:     []*pb.TxnCondition{{Condition: &pb.TxnCondition_Key{Key: absent(key)[0]}}},
				ThenOperations: []*pb.Operation{{Operation: &pb.Operation_Write{Write: &pb.Mutation{Kind: 1, Key: []byte("other")}}}},
				Durability:     async,
			})
			return err
		},
		"execute, with an operation that fails": func(ctx context.Context, h *harness, key string) error {
			_, err := pb.NewTransactionServiceClient(h.conn).Execute(ctx, &pb.ExecuteRequest{
				ThenOperations: []*pb.Operation{{Operation: &pb.Operation_Invoke{Invoke: increment(key, 1)}}},
				Durability:     async,
			})
			return err
		},
		"pipeline": func(ctx context.Context, h *harness, key string) error {
			stream, err := h.kv.Pipeline(ctx)
			if err != nil {
				return err
			}
			request := &pb.PipelineRequest{Id: 1, Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte(key), Preconditions: absent(key)}}}
			if err := stream.Send(request); err != nil {
				return err
			}
			got, err := stream.Recv()
			if err != nil {
				return err
			}
			return status.FromProto(got.GetError()).Err()
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := mustStart(t)
			h.put(t, "other", "v")
			for try, timeout := range []time.Duration{60 * time.Millisecond, 20 * time.Second} {
				key := []string{"short", "long"}[try]
				release := h.heldSyncs(t)
				done, before := make(chan error, 1), h.store.Visible()
				go func() {
					_, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte(key), Value: []byte("text"), Durability: pb.Durability_DURABILITY_SYNC})
					done <- err
				}()
				eventually(t, "the put is visible", func() bool { return h.store.Visible() > before })
				durable := uint64(h.store.Visible())
				ctx, cancel := context.WithTimeout(testContext(t), timeout)
				err := attempt(ctx, h, key)
				cancel()
				if told := uint64(h.store.Durable()) < durable; told && status.Code(err) != codes.DeadlineExceeded {
					t.Errorf("told before it was durable: %v", err)
				}
				if try == 1 && status.Code(err) == codes.DeadlineExceeded {
					t.Error(err)
				}
				release()
				if err := <-done; err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestTransactionsErrorsNeverRevealWhatACrashCouldTakeBack: nor do the conflicts of interactive
// transactions.
func TestTransactionsErrorsNeverRevealWhatACrashCouldTakeBack(t *testing.T) {
	h := mustStart(t)
	stream, err := pb.NewTransactionServiceClient(h.conn).Transact(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	ask := func(r *pb.TransactRequest) *pb.TransactResponse {
		t.Helper()
		if err := stream.Send(r); err != nil {
			t.Fatal(err)
		}
		out, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	ask(&pb.TransactRequest{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{Durability: pb.Durability_DURABILITY_ASYNC}}})
	ask(&pb.TransactRequest{Request: &pb.TransactRequest_Write{Write: &pb.WriteRequest{Mutations: []*pb.Mutation{{Kind: 1, Key: []byte("k")}}}}})
	release := h.heldSyncs(t)
	defer release()
	done, before := make(chan error, 1), h.store.Visible()
	go func() {
		_, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Durability: pb.Durability_DURABILITY_SYNC})
		done <- err
	}()
	eventually(t, "the put is visible", func() bool { return h.store.Visible() > before })
	e := h.store.Visible()
	got := ask(&pb.TransactRequest{Request: &pb.TransactRequest_Commit{Commit: &pb.CommitRequest{}}})
	if got.GetError().GetCode() != int32(codes.Aborted) || h.store.Durable() < e {
		t.Errorf("durable is %d of %d when the client learns %v", h.store.Durable(), e, got)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// TestPipelineGoesOnWhileAnErrorWaits: other requests of the stream are answered while an error
// waits for the disk.
func TestPipelineGoesOnWhileAnErrorWaits(t *testing.T) {
	h := mustStart(t)
	h.put(t, "calm", "v")
	eventually(t, "durable", func() bool { return h.store.Durable() == h.store.Visible() })
	stream := h.pipeline(t, testContext(t))
	release := h.heldSyncs(t)
	defer release()
	mustSend(t, stream,
		putRequest(1, "k", "v", pb.Durability_DURABILITY_SYNC),
		&pb.PipelineRequest{Id: 2, Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte("k"), Preconditions: []*pb.Precondition{
			{Key: []byte("k"), Condition: &pb.Precondition_Exists{Exists: false}},
		}}}},
		getRequest(3, "calm"), putRequest(4, "l", "v", pb.Durability_DURABILITY_ASYNC))
	var order []uint64
	for range 4 {
		got := mustRecv(t, stream)
		order = append(order, got.Id)
		if got.Id == 2 && got.GetError().GetCode() != int32(codes.FailedPrecondition) {
			t.Errorf("got %v", got)
		}
	}
	if order[0] != 3 || order[1] != 4 {
		t.Errorf("answered in the order %v", order)
	}
}
