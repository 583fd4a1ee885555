package server

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/audit"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/config"
)

// whileRevoked sends requests of alice that wait after they were checked, because wait has been called. Then her rights are taken away, others commit
// what the requests would read, and the requests go on. None of them may be answered.
func whileRevoked(t *testing.T, h *harness, requests map[string]func(context.Context, *clients) error, wait func() (goOn func())) {
	t.Helper()
	h.setUsers(only(grant("rwl", "k"), action(auth.ActionObserve|auth.ActionOperate)))
	c, root, k := clientsOf(h.conn), as(testContext(t), "root"), []byte("k")
	_, err := c.lease.GrantLease(root, &pb.GrantLeaseRequest{Id: leaseOfTests, Ttl: durationpb.New(time.Hour)})
	must(t, err)
	_, err = c.kv.Put(root, &pb.PutRequest{Key: k, Value: k, LeaseId: leaseOfTests})
	must(t, err)
	goOn := wait()
	answers := map[string]chan error{}
	for name, request := range requests {
		answered := make(chan error, 1)
		answers[name] = answered
		go func() { answered <- request(as(testContext(t), "alice"), c) }()
	}
	time.Sleep(50 * time.Millisecond) // most wait now; the outcome is the same if one does not
	h.setUsers(only(grant("rwl", "j")))
	h.holdLatch(t, "k/secret")()
	_, err = h.leases.Acquire(t.Context(), 1, k, leaseOfTests, k, false)
	must(t, err)
	goOn()
	defer func() { // it was not revoked
		_, err := h.leases.Lease(t.Context(), leaseOfTests)
		must(t, err)
	}()
	for name, answered := range answers {
		if err := <-answered; !denied(err) && status.Code(err) != codes.NotFound { // of a lease of which a key may not be read
			t.Errorf("%s: %v", name, err)
		}
	}
}

func locksListed(ctx context.Context, c *clients) error {
	_, err := c.lock.ListLocks(ctx, &pb.ListLocksRequest{Start: []byte("k"), End: []byte("l")})
	return err
}

func keysOfLease(ctx context.Context, c *clients) error {
	_, err := c.lease.GetLease(ctx, &pb.GetLeaseRequest{Id: leaseOfTests, Keys: 10})
	return err
}

// TestRequestsThatHaveWaitedShowNothingThatCameAfterTheirRight: they wait for room in the audit log. Others wait for a device.
func TestRequestsThatHaveWaitedShowNothingThatCameAfterTheirRight(t *testing.T) {
	key, secret := []byte("k"), []byte("k/secret")
	get := &pb.GetRequest{Key: secret}
	batch := &pb.BatchGetRequest{Keys: [][]byte{key, secret}}
	reads := []*pb.Operation{{Operation: &pb.Operation_Get{Get: &pb.KeyReadRequest{Key: secret}}}}
	increment := &pb.Invocation{Key: secret, Operation: &pb.Invocation_Increment{Increment: &pb.Increment{Delta: 1}}} // of what will be no number
	requests := map[string]func(context.Context, *clients) error{
		"get": func(ctx context.Context, c *clients) error {
			_, err := c.kv.Get(ctx, get)
			return err
		},
		"get stream": func(ctx context.Context, c *clients) error {
			stream, err := c.kv.GetStream(ctx, &pb.GetStreamRequest{Key: secret})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		},
		"batch get": func(ctx context.Context, c *clients) error {
			_, err := c.kv.BatchGet(ctx, batch)
			return err
		},
		"pipelined get":       inPipeline(&pb.PipelineRequest{Request: &pb.PipelineRequest_Get{Get: get}}),
		"pipelined batch get": inPipeline(&pb.PipelineRequest{Request: &pb.PipelineRequest_BatchGet{BatchGet: batch}}),
		"history": func(ctx context.Context, c *clients) error {
			_, err := c.feed.History(ctx, &pb.HistoryRequest{Key: secret})
			return err
		},
		"diff": func(ctx context.Context, c *clients) error {
			_, err := c.feed.Diff(ctx, &pb.DiffRequest{Range: prefixRange("k"), FromEpoch: 1})
			return err
		},
		"scan":          scanned(&pb.ScanRequest{Range: prefixRange("k")}),
		"locks":         locksListed,
		"keys of lease": keysOfLease,
		"lock": func(ctx context.Context, c *clients) error {
			_, err := c.lock.GetLock(ctx, &pb.GetLockRequest{Name: key})
			return err
		},
		"leases": func(ctx context.Context, c *clients) error {
			_, err := c.lease.ListLeases(ctx, &pb.ListLeasesRequest{})
			return err
		},
		"execute": executed(&pb.ExecuteRequest{ThenOperations: reads}),
		"execute otherwise": executed(&pb.ExecuteRequest{
			Conditions:     []*pb.TxnCondition{{Condition: &pb.TxnCondition_Key{Key: absent("k")}}},
			ThenOperations: []*pb.Operation{{Operation: &pb.Operation_Write{Write: mutation("k", 0)}}}, ElseOperations: reads,
		}),
		"operation that fails":  executed(&pb.ExecuteRequest{ThenOperations: []*pb.Operation{{Operation: &pb.Operation_Invoke{Invoke: increment}}}}),
		"commit that conflicts": transacted(&pb.TransactRequest{Request: &pb.TransactRequest_Invoke{Invoke: increment}}),
		"status": func(ctx context.Context, c *clients) error {
			_, err := c.admin.Status(ctx, &pb.StatusRequest{})
			return err
		},
		"configuration": func(ctx context.Context, c *clients) error {
			_, err := c.admin.GetConfig(ctx, &pb.GetConfigRequest{})
			return err
		},
		"checkpoint": func(ctx context.Context, c *clients) error {
			_, err := c.admin.Checkpoint(ctx, &pb.CheckpointRequest{})
			return err
		},
		"lease revoked": func(ctx context.Context, c *clients) error {
			_, err := c.lease.RevokeLease(ctx, &pb.RevokeLeaseRequest{Id: leaseOfTests})
			return err
		},
		"nothing to delete": func(ctx context.Context, c *clients) error {
			_, err := c.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Range: prefixRange("kk")})
			return err
		},
	}
	onBothTransports(t, func(t *testing.T, h *harness) {
		whileRevoked(t, h, requests, func() func() {
			log, most := h.observer.audit.log, int(h.config.Audit.QueueSize)
			must(t, log.Admit(t.Context(), nil, most))
			return func() { log.Release(most) }
		})
	}, func(c *config.Config) {
		c.Audit.File, c.Audit.Classes, c.Audit.Full = filepath.Join(t.TempDir(), "audit.log"), "read,write", audit.FullBlock
		c.Retention = time.Minute
	})
}

// TestListsThatHaveWaitedShowNothingThatCameAfterTheirRight: they wait for the lists of others.
func TestListsThatHaveWaitedShowNothingThatCameAfterTheirRight(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		whileRevoked(t, h, map[string]func(context.Context, *clients) error{"locks": locksListed, "keys of lease": keysOfLease}, func() func() {
			kinds := []chan struct{}{h.lists.turns[listStored], h.lists.turns[listLocks]}
			for _, turns := range kinds {
				for range cap(turns) {
					turns <- struct{}{}
				}
			}
			return func() {
				for _, turns := range kinds {
					for range cap(turns) {
						<-turns
					}
				}
			}
		})
	})
}

// TestAListOfWatchesThatHasWaitedShowsNoRangeThatCameAfterTheRightToIt: the list itself needs another right, which stays.
func TestAListOfWatchesThatHasWaitedShowsNoRangeThatCameAfterTheRightToIt(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.setUsers(only(grant("r", "k"), action(auth.ActionObserve)))
		turns := h.lists.turns[listMemory]
		for range cap(turns) {
			turns <- struct{}{}
		}
		answered := make(chan *pb.ListWatchesResponse, 1)
		go func() {
			out, err := h.admin.ListWatches(as(testContext(t), "alice"), &pb.ListWatchesRequest{})
			if err != nil {
				t.Error(err)
			}
			answered <- out
		}()
		time.Sleep(20 * time.Millisecond) // it waits now; the outcome is the same if not
		h.setUsers(only(action(auth.ActionObserve)))
		stream, err := clientsOf(h.conn).feed.Watch(as(testContext(t), "root"))
		must(t, err)
		must(t, stream.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{WatchId: 1, Ranges: []*pb.KeyRange{prefixRange("k")}}}}))
		_, err = stream.Recv()
		must(t, err)
		for range cap(turns) {
			<-turns
		}
		if out := <-answered; len(out.GetWatches()) != 1 || len(out.Watches[0].Ranges) > 0 {
			t.Errorf("got %v", out)
		}
	})
}

// TestAnOutcomeThatWasAskedForAsAnAdministratorIsNotTold: after that right was taken away.
func TestAnOutcomeThatWasAskedForAsAnAdministratorIsNotTold(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.setUsers(only(grant("rwl", ""), action(auth.ActionsAll)))
		id, c := newRequestID(t), clientsOf(h.conn)
		_, err := c.kv.Put(as(testContext(t), "root"), &pb.PutRequest{Key: []byte("k"), RequestId: id})
		must(t, err)
		log, most := h.observer.audit.log, int(h.config.Audit.QueueSize)
		must(t, log.Admit(t.Context(), nil, most))
		asked := make(chan error, 1)
		go func() {
			_, err := c.txn.GetOutcome(as(testContext(t), "alice"), &pb.GetOutcomeRequest{RequestId: id})
			asked <- err
		}()
		time.Sleep(50 * time.Millisecond) // it waits now; the outcome is the same if not
		h.setUsers(only(grant("rwl", "")))
		log.Release(most)
		failureOf(t, <-asked).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_REQUEST_ID_REUSED)
	}, func(c *config.Config) {
		c.Audit.File, c.Audit.Classes, c.Audit.Full = filepath.Join(t.TempDir(), "audit.log"), "read,write", audit.FullBlock
	})
}

// TestListsOfOpenTransactionsThatHaveWaitedShowNoneThatBeganAfterTheirRight: of those and of snapshots, with the addresses of their clients.
func TestListsOfOpenTransactionsThatHaveWaitedShowNoneThatBeganAfterTheirRight(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.setUsers(only(action(auth.ActionObserve)))
		turns := h.lists.turns[listMemory]
		for range cap(turns) {
			turns <- struct{}{}
		}
		answers := map[string]chan error{"transactions": make(chan error, 1), "snapshots": make(chan error, 1)}
		alice := as(testContext(t), "alice")
		go func() {
			_, err := h.admin.ListTransactions(alice, &pb.ListTransactionsRequest{})
			answers["transactions"] <- err
		}()
		go func() {
			_, err := h.admin.ListSnapshots(alice, &pb.ListSnapshotsRequest{})
			answers["snapshots"] <- err
		}()
		time.Sleep(20 * time.Millisecond) // they wait now; the outcome is the same if not
		h.setUsers(only())
		stream, err := clientsOf(h.conn).txn.Transact(as(testContext(t), "root"))
		must(t, err)
		must(t, stream.Send(&pb.TransactRequest{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{}}}))
		_, err = stream.Recv()
		must(t, err)
		for range cap(turns) {
			<-turns
		}
		for name, answered := range answers {
			if err := <-answered; !denied(err) {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}
