package server

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// mustServeOthers writes and reads on a connection of its own.
func (h *harness) mustServeOthers(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	kv := pb.NewKVServiceClient(h.dial(t))
	if _, err := kv.Put(ctx, &pb.PutRequest{Key: []byte("memory"), Value: []byte("other")}); err != nil {
		t.Errorf("put: %v", err)
	}
	for _, key := range [][]byte{[]byte("memory"), coldKey(0)} {
		if out, err := kv.Get(ctx, &pb.GetRequest{Key: key}); err != nil || !out.Found {
			t.Errorf("get %q: %v, %v", key, out.GetFound(), err)
		}
	}
}

// TestColdReadsOfOneConnectionLeaveSessionsToOthers: a connection whose reads wait for the device, as
// many as it can send, leaves sessions to the requests of others that do not wait.
func TestColdReadsOfOneConnectionLeaveSessionsToOthers(t *testing.T) {
	const sessions = 4 * pipelineReadsMax
	h, _, release := startCold(t, func(c *config.Config) { c.Limits.InflightRequests = sessions })
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	refused := make(chan *pb.PipelineResponse, 2*sessions)
	for range 2 * sessions / pipelineReadsMax {
		stream := h.pipeline(t, ctx)
		for i := range uint64(pipelineReadsMax) {
			mustSend(t, stream, getRequest(i, string(coldKey(1+int(i)%(coldKeys-1)))))
		}
		go func() {
			for out, err := stream.Recv(); err == nil; out, err = stream.Recv() {
				refused <- out
			}
		}()
	}
	eventually(t, "all wait or are refused", func() bool {
		n, _, _ := h.admission.inflight()
		return n+len(refused) == 2*sessions
	})
	h.mustServeOthers(t)
	held := h.admission.sessions.reads.held.Load()
	other := make(chan error, 1)
	go func() {
		_, err := pb.NewKVServiceClient(h.dial(t)).Get(ctx, &pb.GetRequest{Key: coldKey(1)})
		other <- err
	}()
	eventually(t, "a cold read of another connection waits, too", func() bool { return h.admission.sessions.reads.held.Load() == held+1 })
	for range len(refused) {
		if out := <-refused; out.GetError() == nil {
			t.Errorf("%v was not refused", out)
		}
	}
	release()
	if err := <-other; err != nil {
		t.Errorf("the cold read of another connection: %v", err)
	}
	cancel()
	eventually(t, "no session is held", func() bool { return h.admission.sessions.reads.held.Load() == 0 })
}

// TestIdlePipelinesLeaveSessionsToOthers: pipelines of gRPC's own transport have a session each, and one
// connection cannot take them all.
func TestIdlePipelinesLeaveSessionsToOthers(t *testing.T) {
	const sessions = 16
	h := mustStart(t, func(c *config.Config) { c.Limits.InflightRequests, c.Transport = sessions, config.TransportGRPC })
	h.put(t, string(coldKey(0)), "value")
	refused := 0
	for range sessions {
		stream := h.pipeline(t, testContext(t))
		_ = stream.Send(getRequest(1, "memory")) // the end of a refused stream may come first
		if _, err := stream.Recv(); err != nil {
			failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
			refused++
		}
	}
	if refused == 0 {
		t.Error("no pipeline was refused")
	}
	h.mustServeOthers(t)
}

// TestReadsOfGRPCCountTheirSessionsWhileTheyWait: so does a read of gRPC's own transport.
func TestReadsOfGRPCCountTheirSessionsWhileTheyWait(t *testing.T) {
	const sessions, requests, wait = 16, 12, 4
	h, _, release := startCold(t, func(c *config.Config) { c.Limits.InflightRequests, c.Transport = sessions, config.TransportGRPC })
	outcomes := make(chan error, requests)
	for i := range requests {
		go func() {
			var err error
			if i%2 == 0 {
				_, err = h.kv.Get(t.Context(), &pb.GetRequest{Key: coldKey(1 + i)})
			} else {
				_, err = h.kv.BatchGet(t.Context(), &pb.BatchGetRequest{Keys: [][]byte{coldKey(1 + i)}})
			}
			outcomes <- err
		}()
	}
	eventually(t, "all wait or are refused", func() bool {
		n, _, _ := h.admission.inflight()
		return n == wait && len(outcomes) == requests-wait
	})
	h.mustServeOthers(t)
	release()
	read := 0
	for range requests {
		if err := <-outcomes; err == nil {
			read++
		} else {
			failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
		}
	}
	if read != wait {
		t.Errorf("%d reads waited, want a quarter of %d", read, sessions)
	}
}

// TestWritesOfOneConnectionThatReadLeaveSessionsToOthers: deletions of ranges, and other writes that read first, wait for the device. Those of one connection
// leave as many sessions as they have to the writes of others.
func TestWritesOfOneConnectionThatReadLeaveSessionsToOthers(t *testing.T) {
	const sessions, wait = 32, 6
	h, _, release := startCold(t, func(c *config.Config) { c.Limits.InflightRequests = sessions })
	var asking sync.WaitGroup
	var refused atomic.Int64
	defer asking.Wait()
	defer release()
	for i := range 2 * wait {
		asking.Go(func() {
			if _, err := h.kv.DeleteRange(t.Context(), &pb.DeleteRangeRequest{Range: prefixRange(string(coldKey(1 + i)))}); err != nil {
				failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
				refused.Add(1)
			}
		})
	}
	held := &h.admission.sessions.writes.held
	eventually(t, "all wait or are refused", func() bool { return held.Load()+refused.Load() == 2*wait })
	if n := held.Load(); n != wait {
		t.Errorf("%d wait, want half of %d", n, 2*wait)
	}
	h.mustServeOthers(t)
}

// TestWritesThatWaitForMemoryLeaveSessionsToReads: as many writers as there may be requests want memory, and the data file does not
// answer. Those beyond their part of the sessions are refused; no read is.
func TestWritesThatWaitForMemoryLeaveSessionsToReads(t *testing.T) {
	const sessions, writers, wait = 16, 16, 6
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		t.Run(string(transport), func(t *testing.T) {
			h := mustStart(t, func(c *config.Config) { c.Limits.InflightRequests, c.Transport, c.Memory = sessions, transport, 32<<20 })
			h.put(t, "memory", "value")
			until := make(chan struct{})
			release := sync.OnceFunc(func() { close(until) })
			t.Cleanup(release)
			h.faults.Inject(vfs.Rule{Op: vfs.OpMutating, Name: "data.ekv", Sticky: true, Fault: vfs.Slow, Until: until})
			h.store.StopThrottling()
			outcomes, released := make(chan error, writers), atomic.Bool{}
			for i := range writers {
				kv := pb.NewKVServiceClient(h.dialClient(t)) // one may not have all
				go func() {
					req := &pb.PutRequest{Key: fmt.Append(nil, "fill", i), Value: make([]byte, 32<<10), Durability: pb.Durability_DURABILITY_ASYNC}
					_, err := kv.Put(t.Context(), req)
					for err == nil && !released.Load() { // the memory is not full yet
						_, err = kv.Put(t.Context(), req)
					}
					outcomes <- err
				}()
			}
			eventually(t, "as many as may wait do, and the others are refused", func() bool {
				return h.admission.sessions.writes.held.Load() == wait && len(outcomes) == writers-wait
			})
			conn := h.dial(t)
			kv, txns, ctx := pb.NewKVServiceClient(conn), pb.NewTransactionServiceClient(conn), testContext(t)
			get := &pb.Operation{Operation: &pb.Operation_Get{Get: &pb.KeyReadRequest{Key: []byte("memory")}}}
			for range 2 * sessions {
				if out, err := kv.Get(ctx, &pb.GetRequest{Key: get.GetGet().Key}); err != nil || !out.Found {
					t.Fatalf("a get: %v, %v", out, err)
				}
				if out, err := txns.Execute(ctx, &pb.ExecuteRequest{ThenOperations: []*pb.Operation{get}}); err != nil || !out.Succeeded {
					t.Fatalf("an execution that reads: %v, %v", out, err)
				}
			}
			released.Store(true)
			release()
			refused := 0
			for range writers {
				if err := <-outcomes; err != nil {
					failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
					refused++
				}
			}
			if refused != writers-wait {
				t.Errorf("%d of %d writers were refused, want %d", refused, writers, writers-wait)
			}
		})
	}
}

// TestLocksThatWaitLeaveSessionsToOthers: requests for leases and locks are not admitted as others are. More of them than there are
// sessions wait in their commits: here for a latch, as for memory or the commit pause of a bulk load. Another client has leases and locks, too.
func TestLocksThatWaitLeaveSessionsToOthers(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.put(t, string(coldKey(0)), "value")
		conn := h.dial(t)
		mustGrantLease(t, pb.NewLeaseServiceClient(conn), 1, time.Hour)
		release := h.holdLatchOf(t, keys.Append(nil, keys.SpaceSystem, append([]byte{keys.SystemLock}, "lock"...)))
		var working sync.WaitGroup
		defer working.Wait()
		defer release()
		locks := pb.NewLockServiceClient(conn)
		var refused atomic.Int64
		sessions := sessionsMax(&h.config.Limits)
		for range 2 * sessions {
			working.Go(func() {
				if _, err := locks.AcquireLock(t.Context(), &pb.AcquireLockRequest{Name: []byte("lock"), LeaseId: 1}); err != nil {
					failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
					refused.Add(1)
				}
			})
		}
		eventually(t, "as many as one client may have wait, and the others are refused", func() bool {
			return refused.Load() == int64(2*sessions-leaseSessionsMax(h.config.Limits.InflightRequests)*3/4)
		})
		other, ctx := h.dialFrom(t, "127.0.0.2"), testContext(t)
		mustGrantLease(t, pb.NewLeaseServiceClient(other), 2, time.Hour)
		locks = pb.NewLockServiceClient(other)
		for range 3 {
			h.mustServeOthers(t)
			out, err := locks.AcquireLock(ctx, &pb.AcquireLockRequest{Name: []byte("another"), LeaseId: 2})
			if err == nil {
				_, err = locks.ReleaseLock(ctx, &pb.ReleaseLockRequest{Name: []byte("another"), Token: out.Token})
			}
			if err != nil {
				t.Errorf("another client: %v", err)
			}
		}
	}, func(c *config.Config) { c.Limits.InflightRequests, c.Limits.Transactions = 16, 1 })
}

// TestReadsOfThePastLeaveRoomToOthers: as many reads of the past as there may be requests want pages, and the device does not answer.
func TestReadsOfThePastLeaveRoomToOthers(t *testing.T) {
	const requests = 16
	h, _, _ := startCold(t, func(c *config.Config) { c.Limits.InflightRequests, c.Retention = requests, time.Hour })
	ctx, cancel := context.WithCancel(t.Context())
	var asking sync.WaitGroup
	defer asking.Wait()
	defer cancel()
	var refused atomic.Int64
	for range 2 * requests {
		c := pb.NewFeedServiceClient(h.dialClient(t))
		asking.Go(func() {
			if _, err := c.History(ctx, &pb.HistoryRequest{Range: prefixRange("cold/")}); err != nil && ctx.Err() == nil {
				failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
				refused.Add(1)
			}
		})
	}
	eventually(t, "as many as may wait do, and the others are refused", func() bool {
		n, _, _ := h.admission.inflight()
		return n == requests/2/pastSessions && refused.Load() == 2*requests-requests/2/pastSessions
	})
	for range 3 {
		h.mustServeOthers(t)
	}
}

// TestOpenTransactionsLeaveSessionsToOthers: as many transactions, scans, reads that wait for the device and writes as
// there may be have their sessions at the same time. Requests that do not wait are served, and what is beyond a limit
// is refused at once, with the reason.
func TestOpenTransactionsLeaveSessionsToOthers(t *testing.T) {
	const requests, transactions = 16, 24
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		t.Run(string(transport), func(t *testing.T) {
			h, _, release := startCold(t, func(c *config.Config) {
				c.Limits.InflightRequests, c.Limits.Transactions, c.Transport = requests, transactions, transport
			})
			ctx := testContext(t)
			begin := func() error {
				ctx, cancel := context.WithCancel(ctx)
				t.Cleanup(cancel)
				stream, err := pb.NewTransactionServiceClient(h.dialClient(t)).Transact(ctx) // one may not have all
				if err != nil {
					return err
				}
				_, err = (&talk{t: t, stream: stream, cancel: cancel}).say(beginRequest(new(pb.BeginRequest)))
				return err
			}
			for range transactions {
				if err := begin(); err != nil {
					t.Fatalf("a transaction: %v", err)
				}
			}
			var waiting sync.WaitGroup
			for range requests / 4 {
				waiting.Go(func() {
					stream, err := pb.NewKVServiceClient(h.dialClient(t)).Scan(ctx, &pb.ScanRequest{Range: &pb.KeyRange{Start: []byte("cold/")}})
					for err == nil {
						_, err = stream.Recv()
					}
				})
			}
			for i := range requests / 2 {
				waiting.Go(func() { _, _ = pb.NewKVServiceClient(h.dialClient(t)).Get(ctx, &pb.GetRequest{Key: coldKey(1 + i)}) })
			}
			eventually(t, "scans and reads wait for the device", func() bool {
				n, _, _ := h.admission.inflight()
				return n == requests/4+requests/2 && h.admission.sessions.reads.held.Load() == requests/2
			})
			writes := requests * 3 / 8
			for range writes - 1 { // as writes that wait for memory do
				x, err := h.store.Session()
				if err != nil || h.admission.holdWrite(owned{}) != nil {
					t.Fatalf("a write that waits: %v", err)
				}
				t.Cleanup(x.Close)
			}
			for range 3 {
				h.mustServeOthers(t)
			}
			failureOf(t, begin()).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_TXNS)
			_, err := pb.NewKVServiceClient(h.dial(t)).Get(ctx, &pb.GetRequest{Key: coldKey(20)})
			failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
			scan, err := pb.NewKVServiceClient(h.dial(t)).Scan(ctx, &pb.ScanRequest{Range: &pb.KeyRange{Start: []byte("cold/")}})
			if err == nil {
				_, err = scan.Recv()
			}
			failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_OVERLOADED)
			release()
			waiting.Wait()
			for range writes - 1 {
				h.admission.sessions.writes.release(owned{}, 1)
			}
		})
	}
}

// TestTransactionsThatBeginCount: a transaction that begins has a session before it is in the table, so that many that
// begin at once could have more sessions than there are transactions.
func TestTransactionsThatBeginCount(t *testing.T) {
	b, conn := txnTable{countMax: 2, open: map[uint64]*openTxn{}}, new(connection)
	reserve := func(want int) {
		t.Helper()
		got := 0
		for range 3 {
			if b.reserve(conn) == nil {
				got++
			}
		}
		if got != want {
			t.Errorf("%d of three transactions may begin, want %d", got, want)
		}
	}
	reserve(2)
	b.cancel(conn)
	first := &openTxn{id: 1, conn: conn}
	b.enter(first)
	reserve(1)
	b.cancel(conn)
	b.leave(first)
	reserve(2)
	if n := conn.owned[ownedTxns].Load(); n != 2 {
		t.Errorf("%d are counted for the connection", n)
	}
}

// TestNoConnectionHasAllTransactions: others can always begin some, the fewer the more connections take what they can.
func TestNoConnectionHasAllTransactions(t *testing.T) {
	b := txnTable{countMax: 1024, open: map[uint64]*openTxn{}}
	take := func(conn *connection) (got int) {
		for b.reserve(conn) == nil {
			got++
		}
		return got
	}
	greedy := make([]*connection, 5)
	for i, want := range []int{896, 64, 32, 16, 8} {
		greedy[i] = new(connection)
		if got := take(greedy[i]); got != want {
			t.Errorf("connection %d has %d transactions, want %d", i, got, want)
		}
	}
	b.cancel(greedy[0])
	if b.reserve(greedy[0]) == nil {
		t.Error("the first one has another one of the last eighth")
	}
	if b.reserve(new(connection)) != nil {
		t.Error("a stranger has none")
	}
}
