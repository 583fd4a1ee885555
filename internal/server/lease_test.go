package server

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

func mustGrantLease(t *testing.T, leases pb.LeaseServiceClient, id uint64, ttl time.Duration) {
	t.Helper()
	out, err := leases.GrantLease(testContext(t), &pb.GrantLeaseRequest{Id: id, Ttl: durationpb.New(ttl), Owner: "test"})
	if err != nil || out.Id != id || out.Ttl.AsDuration() != ttl {
		t.Fatalf("%v, %v", out, err)
	}
}

func TestEveryKindOfPutAttachesItsKeyToALease(t *testing.T) {
	h := mustStart(t)
	leases, txns := pb.NewLeaseServiceClient(h.conn), pb.NewTransactionServiceClient(h.conn)
	ctx := testContext(t)
	mutation := func(key string) *pb.Mutation {
		return &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: []byte(key), LeaseId: 7}
	}
	absent := &pb.TxnCondition{Condition: &pb.TxnCondition_Key{Key: &pb.Precondition{
		Key: []byte("absent"), Condition: &pb.Precondition_Exists{},
	}}}
	get := &pb.Operation{Operation: &pb.Operation_Get{Get: &pb.KeyReadRequest{Key: []byte("other")}}}
	puts := map[string]func(key string) error{
		"put": func(key string) error {
			_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte(key), LeaseId: 7})
			return err
		},
		"batch": func(key string) error {
			_, err := h.kv.BatchWrite(ctx, &pb.BatchWriteRequest{Mutations: []*pb.Mutation{mutation(key), mutation(key + "2")}})
			return err
		},
		"execute": func(key string) error {
			_, err := txns.Execute(ctx, &pb.ExecuteRequest{
				Conditions:     []*pb.TxnCondition{absent},
				ThenOperations: []*pb.Operation{{Operation: &pb.Operation_Write{Write: mutation(key)}}},
			})
			return err
		},
		"execute with a read": func(key string) error {
			_, err := txns.Execute(ctx, &pb.ExecuteRequest{
				ThenOperations: []*pb.Operation{get, {Operation: &pb.Operation_Write{Write: mutation(key)}}},
			})
			return err
		},
		"pipeline": func(key string) error {
			stream, err := h.kv.Pipeline(ctx)
			if err != nil {
				return err
			}
			for range 2 { // the second one is decoded into the message of the first
				put := &pb.PutRequest{Key: []byte(key), LeaseId: 7}
				if err := stream.Send(&pb.PipelineRequest{Request: &pb.PipelineRequest_Put{Put: put}}); err != nil {
					return err
				}
			}
			without := &pb.PutRequest{Key: []byte("without")}
			if err := stream.Send(&pb.PipelineRequest{Request: &pb.PipelineRequest_Put{Put: without}}); err != nil {
				return err
			}
			if err := stream.CloseSend(); err != nil {
				return err
			}
			for range 3 {
				out, err := stream.Recv()
				if err != nil {
					return err
				}
				if e := out.GetError(); e != nil {
					return errors.New(e.GetMessage())
				}
			}
			return nil
		},
	}
	for name, put := range puts {
		if name != "pipeline" {
			wantReason(t, put(name), codes.NotFound, pb.ErrorReason_ERROR_REASON_LEASE_NOT_FOUND)
		}
	}
	mustGrantLease(t, leases, 7, time.Hour)
	for name, put := range puts {
		if err := put(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	found, err := leases.GetLease(ctx, &pb.GetLeaseRequest{Id: 7, Keys: 100})
	if err != nil || len(found.Keys) != len(puts)+1 || found.Lease.Owner != "test" {
		t.Fatalf("%v, %v", found, err)
	}
	if _, err := leases.RevokeLease(ctx, &pb.RevokeLeaseRequest{Id: 7}); err != nil {
		t.Fatal(err)
	}
	for name := range puts {
		if out, err := h.kv.Get(ctx, &pb.GetRequest{Key: []byte(name)}); err != nil || out.Found {
			t.Errorf("%s: %v, %v", name, out, err)
		}
	}
	if out, err := h.kv.Get(ctx, &pb.GetRequest{Key: []byte("without")}); err != nil || !out.Found {
		t.Errorf("a put without a lease after one with: %v, %v", out, err)
	}
}

func TestKeepAliveStreamAnswersForEachLease(t *testing.T) {
	h := mustStart(t)
	leases := pb.NewLeaseServiceClient(h.conn)
	mustGrantLease(t, leases, 1, time.Hour)
	mustGrantLease(t, leases, 2, time.Minute)
	stream, err := leases.KeepAlive(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := stream.Send(&pb.KeepAliveRequest{Ids: []uint64{2, 3, 1}}); err != nil {
			t.Fatal(err)
		}
		out, err := stream.Recv()
		if err != nil || len(out.Leases) != 3 || out.Leases[0].TtlMs != 60_000 || out.Leases[1].TtlMs != 0 || out.Leases[2].TtlMs != 3_600_000 {
			t.Fatalf("%v, %v", out, err)
		}
	}
	all, err := leases.ListLeases(testContext(t), &pb.ListLeasesRequest{Limit: 1})
	if err != nil || len(all.Leases) != 1 || all.Leases[0].Id != 1 || !all.More {
		t.Fatalf("%v, %v", all, err)
	}
	if err := stream.Send(&pb.KeepAliveRequest{Ids: make([]uint64, leaseListMax+1)}); err != nil {
		t.Fatal(err)
	}
	_, err = stream.Recv()
	wantReason(t, err, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST)
}

func TestLeaseOfASilentClientEnds(t *testing.T) {
	h := mustStart(t)
	leases := pb.NewLeaseServiceClient(h.conn)
	mustGrantLease(t, leases, 1, time.Second)
	if _, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), LeaseId: 1}); err != nil {
		t.Fatal(err)
	}
	observed, err := pb.NewLockServiceClient(h.conn).ObserveLock(testContext(t), &pb.ObserveLockRequest{Name: []byte("l")})
	if err != nil {
		t.Fatal(err)
	}
	for want := range 3 { // nothing, the holder, nothing
		out, err := observed.Recv()
		if err != nil || (out.Holder.Token != 0) != (want == 1) {
			t.Fatalf("%v, %v", out, err)
		}
		if want == 0 {
			mustLock(t, h, "l", 1)
		}
	}
	if out, err := h.kv.Get(testContext(t), &pb.GetRequest{Key: []byte("k")}); err != nil || out.Found {
		t.Fatalf("%v, %v", out, err)
	}
}

// mustLock acquires a lock and returns its token.
func mustLock(t *testing.T, h *harness, name string, id uint64) uint64 {
	t.Helper()
	out, err := pb.NewLockServiceClient(h.conn).AcquireLock(testContext(t), &pb.AcquireLockRequest{Name: []byte(name), LeaseId: id, Value: []byte("v")})
	if err != nil || !out.Acquired || out.Token == 0 {
		t.Fatalf("%v, %v", out, err)
	}
	return out.Token
}

func TestFenceRefusesAWriterThatLostItsLock(t *testing.T) {
	h := mustStart(t)
	leases, locks := pb.NewLeaseServiceClient(h.conn), pb.NewLockServiceClient(h.conn)
	ctx := testContext(t)
	mustGrantLease(t, leases, 1, time.Hour)
	mustGrantLease(t, leases, 2, time.Hour)
	token := mustLock(t, h, "job", 1)
	fence := func(token uint64) []*pb.Precondition {
		return []*pb.Precondition{{Condition: &pb.Precondition_Fence{Fence: &pb.Fence{Name: []byte("job"), Token: token}}}}
	}
	writes := map[string]func([]*pb.Precondition) error{
		"put": func(p []*pb.Precondition) error {
			_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k"), Preconditions: p})
			return err
		},
		"delete": func(p []*pb.Precondition) error {
			_, err := h.kv.Delete(ctx, &pb.DeleteRequest{Key: []byte("k"), Preconditions: p})
			return err
		},
		"batch": func(p []*pb.Precondition) error {
			m := []*pb.Mutation{{Kind: pb.Mutation_KIND_PUT, Key: []byte("k")}}
			_, err := h.kv.BatchWrite(ctx, &pb.BatchWriteRequest{Mutations: m, Preconditions: p})
			return err
		},
		"delete range": func(p []*pb.Precondition) error {
			_, err := h.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Range: &pb.KeyRange{}, Preconditions: p})
			return err
		},
		"invoke": func(p []*pb.Precondition) error {
			i := &pb.Invocation{Key: []byte("n"), Operation: &pb.Invocation_Increment{Increment: &pb.Increment{Delta: 1}}}
			_, err := h.kv.Invoke(ctx, &pb.InvokeRequest{Invocation: i, Preconditions: p})
			return err
		},
	}
	for name, write := range writes {
		if err := write(fence(token)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		wantReason(t, write(fence(token+1)), codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_FENCED)
	}
	short, err := locks.AcquireLock(ctx, &pb.AcquireLockRequest{Name: []byte("job"), LeaseId: 2, Wait: durationpb.New(10 * time.Millisecond)})
	if err != nil || short.Acquired || short.Token != token || short.LeaseId != 1 {
		t.Fatalf("%v, %v", short, err)
	}
	next := make(chan *pb.AcquireLockResponse, 1)
	go func() {
		out, _ := locks.AcquireLock(ctx, &pb.AcquireLockRequest{Name: []byte("job"), LeaseId: 2, Wait: durationpb.New(time.Minute)})
		next <- out
	}()
	if _, err := leases.RevokeLease(ctx, &pb.RevokeLeaseRequest{Id: 1}); err != nil {
		t.Fatal(err)
	}
	out := <-next
	if !out.GetAcquired() || out.Token <= token {
		t.Fatalf("%v after token %d", out, token)
	}
	for _, write := range writes {
		wantReason(t, write(fence(token)), codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_FENCED)
	}
	released, err := locks.ReleaseLock(ctx, &pb.ReleaseLockRequest{Name: []byte("job"), Token: out.Token})
	if err != nil || !released.Released {
		t.Fatalf("%v, %v", released, err)
	}
	if held, err := locks.GetLock(ctx, &pb.GetLockRequest{Name: []byte("job")}); err != nil || held.Holder.GetToken() != 0 {
		t.Fatalf("%v, %v", held, err)
	}
}

func TestWaiterForALockEndsWithItsRequestAndWithTheServer(t *testing.T) {
	h := mustStart(t)
	leases, locks := pb.NewLeaseServiceClient(h.conn), pb.NewLockServiceClient(h.conn)
	mustGrantLease(t, leases, 1, time.Hour)
	mustGrantLease(t, leases, 2, time.Hour)
	mustLock(t, h, "job", 1)
	waits := func(n int) {
		for deadline := time.Now().Add(10 * time.Second); h.leases.Stats().Waiters != n; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%d requests wait, want %d", h.leases.Stats().Waiters, n)
			}
		}
	}
	request := &pb.AcquireLockRequest{Name: []byte("job"), LeaseId: 2, Wait: durationpb.New(time.Hour)}
	ctx, cancel := context.WithCancel(testContext(t))
	done := make(chan error, 1)
	go func() { _, err := locks.AcquireLock(ctx, request); done <- err }()
	waits(1)
	cancel()
	if err := <-done; err == nil {
		t.Fatal("a canceled request has an answer")
	}
	waits(0)
	go func() { _, err := locks.AcquireLock(testContext(t), request); done <- err }()
	stream, err := leases.KeepAlive(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&pb.KeepAliveRequest{Ids: []uint64{1}}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	waits(1)
	if err := h.stop(); err != nil {
		t.Fatal(err)
	}
	wantReason(t, <-done, codes.Unavailable, pb.ErrorReason_ERROR_REASON_SHUTTING_DOWN)
	_, err = stream.Recv()
	wantReason(t, err, codes.Unavailable, pb.ErrorReason_ERROR_REASON_SHUTTING_DOWN)
}

func TestLeaseRequestsThatAreWrongAreRefused(t *testing.T) {
	h := mustStart(t)
	leases, locks := pb.NewLeaseServiceClient(h.conn), pb.NewLockServiceClient(h.conn)
	ctx := testContext(t)
	mustGrantLease(t, leases, 1, time.Hour)
	invalid := pb.ErrorReason_ERROR_REASON_INVALID_REQUEST
	_, err := leases.GrantLease(ctx, &pb.GrantLeaseRequest{})
	wantReason(t, err, codes.InvalidArgument, invalid)
	_, err = leases.GrantLease(ctx, &pb.GrantLeaseRequest{Ttl: durationpb.New(time.Minute), Owner: string(make([]byte, 256))})
	wantReason(t, err, codes.InvalidArgument, invalid)
	_, err = leases.GrantLease(ctx, &pb.GrantLeaseRequest{Id: 1, Ttl: durationpb.New(time.Minute)})
	wantReason(t, err, codes.AlreadyExists, pb.ErrorReason_ERROR_REASON_LEASE_EXISTS)
	_, err = leases.RevokeLease(ctx, &pb.RevokeLeaseRequest{Id: 2})
	wantReason(t, err, codes.NotFound, pb.ErrorReason_ERROR_REASON_LEASE_NOT_FOUND)
	_, err = leases.GetLease(ctx, &pb.GetLeaseRequest{Id: 2})
	wantReason(t, err, codes.NotFound, pb.ErrorReason_ERROR_REASON_LEASE_NOT_FOUND)
	_, err = locks.AcquireLock(ctx, &pb.AcquireLockRequest{LeaseId: 1})
	wantReason(t, err, codes.InvalidArgument, invalid)
	_, err = locks.AcquireLock(ctx, &pb.AcquireLockRequest{Name: []byte("l"), LeaseId: 1, Value: make([]byte, 1025)})
	wantReason(t, err, codes.InvalidArgument, invalid)
	_, err = locks.AcquireLock(ctx, &pb.AcquireLockRequest{Name: []byte("l"), LeaseId: 2})
	wantReason(t, err, codes.NotFound, pb.ErrorReason_ERROR_REASON_LEASE_NOT_FOUND)
	_, err = locks.ReleaseLock(ctx, &pb.ReleaseLockRequest{Name: []byte("l")})
	wantReason(t, err, codes.InvalidArgument, invalid)
	_, err = h.kv.Delete(ctx, &pb.DeleteRequest{Key: []byte("k"), Preconditions: []*pb.Precondition{{
		Key: []byte("k"), Condition: &pb.Precondition_Fence{Fence: &pb.Fence{Name: []byte("l"), Token: 1}},
	}}})
	wantReason(t, err, codes.InvalidArgument, invalid)
	_, err = h.kv.BatchWrite(ctx, &pb.BatchWriteRequest{Mutations: []*pb.Mutation{{Kind: pb.Mutation_KIND_DELETE, Key: []byte("k"), LeaseId: 1}}})
	wantReason(t, err, codes.InvalidArgument, invalid)
}

func wantReason(t *testing.T, err error, code codes.Code, reason pb.ErrorReason) {
	t.Helper()
	var metadata []string
	switch reason {
	case pb.ErrorReason_ERROR_REASON_LEASE_NOT_FOUND, pb.ErrorReason_ERROR_REASON_LEASE_EXISTS:
		metadata = []string{"lease"}
	case pb.ErrorReason_ERROR_REASON_FENCED:
		metadata = []string{"key", "token", "index"}
	}
	failureOf(t, err).want(t, code, reason, metadata...)
}

// TestNothingTellsOfALeaseBeforeItIsDurable: a grant whose answer was lost is repeated, kept alive and looked at, and all of that waits for the first
// attempt's record.
func TestNothingTellsOfALeaseBeforeItIsDurable(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		leases, grant := pb.NewLeaseServiceClient(h.conn), &pb.GrantLeaseRequest{Id: 7, Ttl: durationpb.New(time.Hour)}
		h.put(t, "k", "v")
		release := h.holdSyncs(t)
		within := func(d time.Duration, call func(ctx context.Context) error) error {
			ctx, cancel := context.WithTimeout(testContext(t), d)
			defer cancel()
			return call(ctx)
		}
		calls := map[string]func(ctx context.Context) error{
			"grant": func(ctx context.Context) error {
				_, err := leases.GrantLease(ctx, grant)
				return err
			},
			"look": func(ctx context.Context) error {
				_, err := leases.GetLease(ctx, &pb.GetLeaseRequest{Id: 7})
				return err
			},
			"list": func(ctx context.Context) error {
				_, err := leases.ListLeases(ctx, &pb.ListLeasesRequest{})
				return err
			},
			"keep alive": func(ctx context.Context) error {
				stream, err := leases.KeepAlive(ctx)
				if err == nil {
					err = stream.Send(&pb.KeepAliveRequest{Ids: []uint64{7}})
				}
				if err == nil {
					_, err = stream.Recv()
				}
				return err
			},
		}
		if err := within(200*time.Millisecond, calls["grant"]); status.Code(err) != codes.DeadlineExceeded {
			t.Fatal(err)
		}
		for what, call := range calls {
			if err := within(100*time.Millisecond, call); status.Code(err) != codes.DeadlineExceeded {
				t.Errorf("%s: %v", what, err)
			}
		}
		release()
		for what, call := range calls {
			if err := within(time.Minute, call); (err != nil) != (what == "grant") || err != nil && status.Code(err) != codes.AlreadyExists {
				t.Errorf("afterwards, %s: %v", what, err)
			}
		}
	})
}
