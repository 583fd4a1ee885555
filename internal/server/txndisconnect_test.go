package server

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// transactionSteps are the requests of a transaction that takes everything that a transaction can
// hold.
func transactionSteps(n int, begin *pb.BeginRequest) []*pb.TransactRequest {
	key := fmt.Sprint("own/", n)
	all := &pb.KeyRange{Prefix: []byte("large/")}
	savepoint := &pb.TransactRequest{Request: &pb.TransactRequest_Savepoint{Savepoint: new(pb.SavepointRequest)}}
	return []*pb.TransactRequest{
		beginRequest(begin),
		txnGetRequest("shared"),
		{Request: &pb.TransactRequest_Scan{Scan: &pb.RangeReadRequest{Range: all}}},
		txnPutRequest(key, string(make([]byte, 100<<10))),
		savepoint,
		{Request: &pb.TransactRequest_DeleteRange{DeleteRange: &pb.RangeDeleteRequest{Range: &pb.KeyRange{Prefix: []byte("small/")}}}},
		{Request: &pb.TransactRequest_Invoke{Invoke: increment("counter", 1)}},
		rollbackToRequest(1),
		txnPutRequest("shared", key),
		commitRequest,
	}
}

// TestTransactionsThatEndAtAnyStepLeaveNothing: clients cancel, close their connection, let the
// deadline pass or are ended by an operator after each step of a transaction, and in the middle of
// it, commits that wait for the disk and that conflict included. Afterwards nothing is held: no
// snapshot, no session, no latch, no byte; and what each of them wrote is there completely or not at
// all.
func TestTransactionsThatEndAtAnyStepLeaveNothing(t *testing.T) {
	seed := testseed.Base(t)
	h := mustStart(t, func(c *config.Config) { c.Limits.InflightBytes = 80 * config.MiB })
	h.putLarge(t, 10, 100<<10)
	h.put(t, "shared", "v")
	for i := range 100 {
		h.put(t, fmt.Sprintf("small/%03d", i), "v")
	}
	slow := h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Delay: 2 * time.Millisecond})
	var clients sync.WaitGroup
	const rounds = 60
	for n := range 6 {
		clients.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(n)))
			for range rounds {
				h.endAtAStep(t, n, random)
			}
		})
	}
	clients.Wait()
	slow.Remove()
	eventually(t, "nothing is held", func() bool {
		s, e := h.transactionStats(), h.store.Stats()
		requests, bytes, answers := h.admission.inflight()
		return s.Open == 0 && s.Bytes == 0 && e.Snapshots.Snapshots == 0 && e.SessionsOpen == 0 && requests == 0 && bytes == 0 && answers == 0 &&
			h.receiving.reserved() == 0 && h.counters.streams.Load() == 0
	})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	writer := ""
	if v := string(h.get(t, "shared").Value); v != "v" {
		writer = v
	}
	for n := range 6 {
		key := fmt.Sprint("own/", n)
		if got := h.get(t, key); writer == key && (!got.Found || len(got.Value) != 100<<10) {
			t.Errorf("half of the transaction of %s was committed", key)
		}
		if _, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte(key), Value: []byte("v")}); err != nil {
			t.Errorf("a latch is held: %v", err)
		}
	}
	if got := h.get(t, "counter"); got.Found {
		t.Error("what was rolled back to the savepoint was committed")
	}
	if n := len(h.scanPrefix(ctx, t, "small/")); n != 100 {
		t.Errorf("%d of 100 keys are left of a deletion that was rolled back", n)
	}
	if err := h.store.Checkpoint(ctx); err != nil {
		t.Error(err)
	}
}

func (h *harness) scanPrefix(ctx context.Context, t *testing.T, prefix string) (entries []*pb.Entry) {
	t.Helper()
	stream, err := h.kv.Scan(ctx, &pb.ScanRequest{Range: &pb.KeyRange{Prefix: []byte(prefix)}})
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range mustRecvAll(t, stream) {
		entries = append(entries, page.Entries...)
	}
	return entries
}

// endAtAStep runs a transaction up to any step, and ends it in any way, after the answers or before.
func (h *harness) endAtAStep(t *testing.T, n int, random *rand.Rand) {
	timeout := 5 * time.Second
	way := random.IntN(4)
	if way == 0 {
		timeout = time.Duration(random.IntN(10_000)) * time.Microsecond
	}
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	conn := h.conn
	if way == 1 {
		conn = h.dial(t)
	}
	stream, err := pb.NewTransactionServiceClient(conn).Transact(ctx)
	if err != nil {
		return // the deadline has passed
	}
	begin := &pb.BeginRequest{Isolation: pb.Isolation(random.IntN(3)), Durability: pb.Durability_DURABILITY_SYNC}
	steps := transactionSteps(n, begin)
	steps = steps[:1+random.IntN(len(steps))]
	reads := random.IntN(2) == 0
	var id uint64
	for _, r := range steps {
		if stream.Send(r) != nil {
			break
		}
		if reads {
			out, err := stream.Recv()
			if err != nil {
				break
			}
			if b := out.GetBegin(); b != nil {
				id = b.Id
			}
		}
	}
	time.Sleep(time.Duration(random.IntN(3000)) * time.Microsecond)
	switch way {
	case 1:
		_ = conn.Close()
	case 2:
		_, _ = h.admin.EndTransaction(ctx, &pb.EndTransactionRequest{Id: id}) // it may have ended
	}
	cancel()
}
