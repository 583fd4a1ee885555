package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/vfs"
)

// talk is a Transact stream, one request and one answer at a time.
type talk struct {
	t      testing.TB
	stream grpc.BidiStreamingClient[pb.TransactRequest, pb.TransactResponse]
	cancel context.CancelFunc
}

func (h *harness) transactions() pb.TransactionServiceClient {
	return pb.NewTransactionServiceClient(h.conn)
}

func (h *harness) talk(t testing.TB) *talk {
	t.Helper()
	ctx, cancel := context.WithCancel(testContext(t))
	t.Cleanup(cancel)
	stream, err := h.transactions().Transact(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return &talk{t: t, stream: stream, cancel: cancel}
}

// say sends a request and returns its answer; an error in the answer is an error.
func (k *talk) say(req *pb.TransactRequest) (*pb.TransactResponse, error) {
	k.t.Helper()
	if err := k.stream.Send(req); err != nil && !errors.Is(err, io.EOF) {
		k.t.Fatal(err)
	}
	return k.hear()
}

func (k *talk) hear() (*pb.TransactResponse, error) {
	out, err := k.stream.Recv()
	if err != nil {
		return nil, err
	}
	if out.GetError() != nil {
		return nil, status.FromProto(out.GetError()).Err()
	}
	return out, nil
}

func (k *talk) must(req *pb.TransactRequest) *pb.TransactResponse {
	k.t.Helper()
	out, err := k.say(req)
	if err != nil {
		k.t.Fatalf("%v: %v", req, err)
	}
	return out
}

func (k *talk) begin() *pb.BeginResponse {
	k.t.Helper()
	return k.must(beginRequest(new(pb.BeginRequest))).GetBegin()
}

func beginRequest(b *pb.BeginRequest) *pb.TransactRequest {
	return &pb.TransactRequest{Request: &pb.TransactRequest_Begin{Begin: b}}
}

func txnGetRequest(key string) *pb.TransactRequest {
	return &pb.TransactRequest{Request: &pb.TransactRequest_Get{Get: &pb.KeyReadRequest{Key: []byte(key)}}}
}

func txnPutRequest(key, value string) *pb.TransactRequest {
	return &pb.TransactRequest{Request: &pb.TransactRequest_Write{Write: &pb.WriteRequest{Mutations: []*pb.Mutation{
		{Kind: pb.Mutation_KIND_PUT, Key: []byte(key), Value: []byte(value)},
	}}}}
}

var (
	commitRequest    = &pb.TransactRequest{Request: &pb.TransactRequest_Commit{Commit: new(pb.CommitRequest)}}
	rollbackRequest  = &pb.TransactRequest{Request: &pb.TransactRequest_Rollback{Rollback: new(pb.RollbackRequest)}}
	savepointRequest = &pb.TransactRequest{Request: &pb.TransactRequest_Savepoint{Savepoint: new(pb.SavepointRequest)}}
)

func rollbackToRequest(n uint64) *pb.TransactRequest {
	return &pb.TransactRequest{Request: &pb.TransactRequest_RollbackTo{RollbackTo: &pb.RollbackToRequest{Savepoint: n}}}
}

func increment(key string, delta int64) *pb.Invocation {
	return &pb.Invocation{
		Key: []byte(key), Operation: &pb.Invocation_Increment{Increment: &pb.Increment{Delta: delta}}, ReturnOld: true, ReturnNew: true,
	}
}

// Everything a transaction can be asked for, on one stream, and nothing of it seen outside before
// the commit.
func TestOnlyTheTransactionSeesItsWrites(t *testing.T) {
	h := mustStart(t)
	for _, key := range []string{"a", "b", "c", "d"} {
		h.put(t, key, "old "+key)
	}
	k := h.talk(t)
	began := k.begin()
	if began.Id == 0 || began.ReadEpoch != 4 {
		t.Errorf("began %v", began)
	}
	k.must(txnPutRequest("a", "new a"))
	k.must(txnPutRequest("e", "new e"))
	if n := k.must(&pb.TransactRequest{Request: &pb.TransactRequest_DeleteRange{
		DeleteRange: &pb.RangeDeleteRequest{Range: &pb.KeyRange{Start: []byte("b"), End: []byte("d")}},
	}}).GetDeleteRange().Deleted; n != 2 {
		t.Errorf("deleted %d of the range, want 2", n)
	}
	if r := k.must(&pb.TransactRequest{Request: &pb.TransactRequest_Invoke{Invoke: increment("n", 5)}}).GetInvoke(); string(r.New) != "5" || r.OldFound {
		t.Errorf("increment: %v", r)
	}
	if got := k.must(txnGetRequest("a")).GetGet(); string(got.Value) != "new a" || got.ReadEpoch != 4 {
		t.Errorf("own write reads as %v", got)
	}
	batch := k.must(&pb.TransactRequest{Request: &pb.TransactRequest_BatchGet{
		BatchGet: &pb.BatchReadRequest{Keys: [][]byte{[]byte("b"), []byte("d")}},
	}}).GetBatchGet()
	if batch.Results[0].Found || string(batch.Results[1].Value) != "old d" || batch.Results[1].Epoch != 4 {
		t.Errorf("batch get: %v", batch)
	}
	var all []string
	for req := (&pb.RangeReadRequest{Limit: 2}); ; {
		page := k.must(&pb.TransactRequest{Request: &pb.TransactRequest_Scan{Scan: req}}).GetScan()
		for _, e := range page.Entries {
			all = append(all, string(e.Key)+"="+string(e.Value))
		}
		if !page.More {
			break
		}
		req.Range = &pb.KeyRange{Start: append(page.Entries[len(page.Entries)-1].Key, 0)}
	}
	if got, want := fmt.Sprint(all), "[a=new a d=old d e=new e n=5]"; got != want {
		t.Errorf("scan: %s, want %s", got, want)
	}
	if got := h.get(t, "a"); string(got.Value) != "old a" {
		t.Errorf("uncommitted %q was seen outside", got.Value)
	}
	if epoch := k.must(commitRequest).GetCommit().Epoch; epoch != 5 {
		t.Errorf("committed at %d", epoch)
	}
	if got := h.get(t, "a"); string(got.Value) != "new a" || got.Epoch != 5 {
		t.Errorf("after the commit: %v", got)
	}
}

func TestAStreamCarriesOneTransactionAfterAnother(t *testing.T) {
	h := mustStart(t)
	k := h.talk(t)
	for i := range 3 {
		k.begin()
		k.must(txnPutRequest("k", strconv.Itoa(i)))
		k.must(commitRequest)
		if _, n := h.store.Sessions(); n > 1 {
			t.Errorf("%d sessions for one transaction after another", n)
		}
	}
	k.begin()
	if epoch := k.must(commitRequest).GetCommit().Epoch; epoch != 0 {
		t.Errorf("a commit without writes has epoch %d", epoch)
	}
	if err := k.stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := k.hear(); !errors.Is(err, io.EOF) {
		t.Errorf("the stream ended with %v", err)
	}
	if s := h.transactionStats(); s.Started != 4 || s.Committed != 4 || s.Open != 0 {
		t.Errorf("counted %+v", s)
	}
}

func (h *harness) transactionStats() telemetry.TransactionStats { return h.Server.transactions.stats() }

func TestAConflictRollsBackAndTheNextTransactionSeesWhatWon(t *testing.T) {
	h := mustStart(t)
	h.put(t, "k", "0")
	k := h.talk(t)
	k.begin()
	k.must(txnGetRequest("k"))
	winner := h.put(t, "k", "1")
	k.must(txnPutRequest("other", "x"))
	_, err := k.say(commitRequest)
	f := failureOf(t, err)
	f.want(t, codes.Aborted, pb.ErrorReason_ERROR_REASON_CONFLICT, "key", "epoch")
	if f.metadata["key"] != "k" || f.metadata["epoch"] != strconv.FormatUint(winner, 10) || f.retry == 0 {
		t.Errorf("the conflict says %+v", f)
	}
	if began := k.begin(); began.ReadEpoch < winner {
		t.Errorf("the retry reads at %d, before %d", began.ReadEpoch, winner)
	}
	k.must(txnPutRequest("other", "x"))
	k.must(commitRequest)
	if s := h.transactionStats(); s.Aborted[telemetry.AbortConflict] != 1 {
		t.Errorf("counted %+v", s)
	}
}

// Requests may be sent without waiting, so a commit after a failed write must not commit the rest.
func TestACommitAfterAFailedRequestCommitsNothing(t *testing.T) {
	h := mustStart(t)
	k := h.talk(t)
	for _, req := range []*pb.TransactRequest{
		beginRequest(new(pb.BeginRequest)), txnPutRequest("a", "1"), txnPutRequest("", "2"), txnPutRequest("b", "3"), commitRequest,
	} {
		if err := k.stream.Send(req); err != nil {
			t.Fatal(err)
		}
	}
	var reasons []string
	for range 5 {
		if _, err := k.hear(); err != nil {
			reasons = append(reasons, failureOf(t, err).reason)
		} else {
			reasons = append(reasons, "ok")
		}
	}
	if got, want := fmt.Sprint(reasons), "[ok ok KEY_EMPTY TXN_FAILED TXN_FAILED]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if h.get(t, "a").Found || h.get(t, "b").Found {
		t.Error("a part of a failed transaction was committed")
	}
	k.must(rollbackRequest) // the failed commit has left it open, for the rollback that clients send
	_, err := k.say(rollbackRequest)
	failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_TXN_STATE)
	k.begin()
	k.must(rollbackRequest)
}

func TestRollbackToASavepointUndoesAFailedRequest(t *testing.T) {
	h := mustStart(t)
	h.put(t, "text", "no number")
	k := h.talk(t)
	k.begin()
	k.must(txnPutRequest("a", "1"))
	n := k.must(savepointRequest).GetSavepoint().Savepoint
	k.must(txnPutRequest("a", "2"))
	_, err := k.say(&pb.TransactRequest{Request: &pb.TransactRequest_Invoke{Invoke: increment("text", 1)}})
	failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_TYPE_ERROR, "key", "index")
	_, err = k.say(txnGetRequest("a"))
	failed := failureOf(t, err)
	failed.want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_TXN_FAILED, "cause")
	if failed.metadata["cause"] != "TYPE_ERROR" {
		t.Errorf("the cause is %q", failed.metadata["cause"])
	}
	_, err = k.say(rollbackToRequest(n + 1))
	failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_NO_SAVEPOINT)
	k.must(rollbackToRequest(n))
	k.must(commitRequest)
	if got := h.get(t, "a"); string(got.Value) != "1" {
		t.Errorf("a is %q", got.Value)
	}
}

func TestWhatATransactionMayNotDo(t *testing.T) {
	h := mustStart(t)
	h.put(t, "k", "v")
	fails := func(code codes.Code, reason pb.ErrorReason, requests ...*pb.TransactRequest) {
		t.Helper()
		k := h.talk(t)
		var err error
		for _, req := range requests {
			_, err = k.say(req)
		}
		if f := failureOf(t, err); f.code != code || f.reason != reason.Reason() {
			t.Errorf("got %v %s, want %v %s", f.code, f.reason, code, reason.Reason())
		}
		k.cancel()
	}
	begin, readOnly := beginRequest(new(pb.BeginRequest)), beginRequest(&pb.BeginRequest{ReadOnly: true})
	fails(codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_TXN_STATE, txnGetRequest("k"))
	fails(codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_TXN_STATE, commitRequest)
	fails(codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_TXN_STATE, begin, begin)
	fails(codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_TXN_READ_ONLY, readOnly, txnPutRequest("k", "w"))
	fails(codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_TXN_READ_ONLY, readOnly, &pb.TransactRequest{
		Request: &pb.TransactRequest_Invoke{Invoke: increment("n", 1)},
	})
	fails(codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_NO_SAVEPOINT, begin, rollbackToRequest(math.MaxUint64))
	fails(codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, beginRequest(&pb.BeginRequest{SnapshotEpoch: 1}))
	fails(codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, beginRequest(&pb.BeginRequest{Isolation: 9}))
	fails(codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, beginRequest(&pb.BeginRequest{Durability: 9}))
	fails(codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, begin, new(pb.TransactRequest))
	fails(codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_BATCH_EMPTY, begin, &pb.TransactRequest{
		Request: &pb.TransactRequest_Write{Write: new(pb.WriteRequest)},
	})
	fails(codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_RANGE, begin, &pb.TransactRequest{
		Request: &pb.TransactRequest_DeleteRange{DeleteRange: new(pb.RangeDeleteRequest)},
	})
	fails(codes.OutOfRange, pb.ErrorReason_ERROR_REASON_SNAPSHOT_IN_FUTURE, beginRequest(&pb.BeginRequest{ReadOnly: true, SnapshotEpoch: 99}))
	eventually(t, "the canceled streams end", func() bool { return h.transactionStats().Open == 0 })
}

func TestABrokenConnectionFreesItsTransaction(t *testing.T) {
	h := mustStart(t)
	h.put(t, "k", "v")
	conn := h.dial(t)
	stream, err := pb.NewTransactionServiceClient(conn).Transact(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	k := &talk{t: t, stream: stream}
	k.begin()
	k.must(txnPutRequest("k", "w"))
	eventually(t, "the transaction is open, with its snapshot", func() bool { // what expires is looked for in another one, for a moment
		s := h.transactionStats()
		return s.Open == 1 && s.Bytes > 0 && h.store.Stats().Snapshots.Snapshots == 1
	})
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the transaction ends and its snapshot with it", func() bool {
		s := h.transactionStats()
		return s.Open == 0 && s.Bytes == 0 && s.Aborted[telemetry.AbortDisconnect] == 1 && h.store.Stats().Snapshots.Snapshots == 0
	})
	if got := h.get(t, "k"); string(got.Value) != "v" {
		t.Errorf("an abandoned write was committed: %q", got.Value)
	}
}

func TestAnIdleTransactionIsRolledBack(t *testing.T) {
	inTimeOf(t, 500*time.Millisecond, func(timeout time.Duration) error {
		h := mustStart(t, func(c *config.Config) { c.TxnIdleTimeout = timeout })
		k := h.talk(t)
		k.begin()
		for range 4 { // requests keep it alive
			asked := time.Now()
			time.Sleep(timeout * 2 / 5)
			if _, err := k.say(txnPutRequest("k", "v")); err != nil {
				return tooLate(t, asked, timeout, err)
			}
		}
		_, err := k.hear()
		f := failureOf(t, err)
		f.want(t, codes.Aborted, pb.ErrorReason_ERROR_REASON_TXN_TIMEOUT, "limit", "timeout")
		if f.metadata["limit"] != "idle" {
			t.Errorf("the limit is %q", f.metadata["limit"])
		}
		if s := h.transactionStats(); s.Open != 0 || s.Aborted[telemetry.AbortIdle] != 1 {
			t.Errorf("counted %+v", s)
		}
		return nil
	})
}

// inTimeOf runs a test that must do something within a timeout of the server. On a busy machine that may take longer: then the test is
// repeated with longer ones. It fails if the longest is too short, too.
func inTimeOf(t *testing.T, timeout time.Duration, test func(timeout time.Duration) error) {
	t.Helper()
	err := test(timeout)
	for range 3 { // see tooLate
		if err == nil {
			return
		}
		t.Logf("with %v: %v", timeout, err)
		timeout *= 4
		err = test(timeout)
	}
	if err != nil {
		t.Fatalf("with %v: %v", timeout, err)
	}
}

// tooLate returns an error of something that began at a time and took longer than a timeout. If it took less, the test fails.
func tooLate(t *testing.T, began time.Time, timeout time.Duration, err error) error {
	t.Helper()
	if took := time.Since(began); took < timeout {
		t.Fatalf("after %v of %v: %v", took, timeout, err)
	}
	return err
}

func TestABusyTransactionEndsWithItsTime(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.TxnTimeout = 100 * time.Millisecond })
	k := h.talk(t)
	k.begin()
	for started := time.Now(); ; {
		if _, err := k.say(txnPutRequest("k", "v")); err != nil {
			f := failureOf(t, err)
			f.want(t, codes.Aborted, pb.ErrorReason_ERROR_REASON_TXN_TIMEOUT, "limit", "timeout")
			if f.metadata["limit"] != "total" {
				t.Errorf("the limit is %q", f.metadata["limit"])
			}
			return
		}
		if time.Since(started) > 20*time.Second {
			t.Fatal("the transaction outlived its time")
		}
	}
}

// A stream between transactions holds nothing, and may wait for as long as it likes.
func TestAStreamBetweenTransactionsIsNotTimed(t *testing.T) {
	inTimeOf(t, 20*time.Millisecond, func(timeout time.Duration) error {
		h := mustStart(t, func(c *config.Config) { c.TxnIdleTimeout, c.TxnTimeout = timeout, timeout })
		k := h.talk(t)
		for range 2 {
			asked := time.Now()
			_, err := k.say(beginRequest(new(pb.BeginRequest)))
			if err == nil {
				_, err = k.say(rollbackRequest)
			}
			if err != nil {
				return tooLate(t, asked, timeout, err)
			}
			time.Sleep(3 * timeout)
		}
		return nil
	})
}

// A client that takes no answers must not hold its snapshot longer than others may.
func TestAClientThatDoesNotReadIsEnded(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.TxnTimeout = 200 * time.Millisecond })
	h.put(t, "big", string(make([]byte, 4<<20)))
	k := h.talk(t)
	k.begin()
	for range 8 { // more than the windows hold
		if err := k.stream.Send(txnGetRequest("big")); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the transaction is ended", func() bool {
		s := h.transactionStats()
		return s.Open == 0 && s.Aborted[telemetry.AbortTimeout] == 1
	})
}

func TestAnOperatorSeesAndEndsTransactions(t *testing.T) {
	h := mustStart(t)
	ctx := testContext(t)
	k := h.talk(t)
	began := k.must(beginRequest(&pb.BeginRequest{Isolation: pb.Isolation_ISOLATION_SNAPSHOT})).GetBegin()
	k.must(txnPutRequest("k", "v"))
	list, err := h.admin.ListTransactions(ctx, new(pb.ListTransactionsRequest))
	if err != nil || len(list.Transactions) != 1 {
		t.Fatalf("%v, %v", list, err)
	}
	info := list.Transactions[0]
	if info.Id != began.Id || info.Peer == "" || info.Isolation != pb.Isolation_ISOLATION_SNAPSHOT || info.ReadOnly ||
		info.Requests != 2 || info.Bytes == 0 || info.Age.AsDuration() <= 0 {
		t.Errorf("listed %v", info)
	}
	if _, err := h.admin.EndTransaction(ctx, &pb.EndTransactionRequest{Id: info.Id}); err != nil {
		t.Fatal(err)
	}
	_, err = k.hear()
	failureOf(t, err).want(t, codes.Aborted, pb.ErrorReason_ERROR_REASON_TXN_ENDED)
	_, err = h.admin.EndTransaction(ctx, &pb.EndTransactionRequest{Id: info.Id})
	failureOf(t, err).want(t, codes.NotFound, pb.ErrorReason_ERROR_REASON_TXN_NOT_FOUND)
	if s := h.transactionStats(); s.Aborted[telemetry.AbortOperator] != 1 {
		t.Errorf("counted %+v", s)
	}
}

// TestEndingATransactionEndsItsWalk: a range delete that reads for long from a slow device ends
// with its transaction, by an operator or by its time, and not the other way round.
func TestEndingATransactionEndsItsWalk(t *testing.T) {
	disk := vfs.NewMem()
	h := mustStartOn(t, disk)
	if _, err := h.bulk(t, 10_000, 1000, true); err != nil {
		t.Fatal(err)
	}
	if err := h.stop(); err != nil {
		t.Fatal(err)
	}
	for name, timeout := range map[string]time.Duration{"operator": time.Minute, "time": 500 * time.Millisecond} {
		h := mustStartOn(t, disk, func(c *config.Config) { c.TxnTimeout = timeout })
		slow := h.faults.Inject(vfs.Rule{Op: vfs.OpRead, Name: "*.ekv", Fault: vfs.Slow, Delay: 50 * time.Millisecond}) // many seconds for all of it
		id, before, ended := h.beginWalk(t)
		want := pb.ErrorReason_ERROR_REASON_TXN_TIMEOUT
		if name == "operator" {
			want = pb.ErrorReason_ERROR_REASON_TXN_ENDED
			if _, err := h.admin.EndTransaction(testContext(t), &pb.EndTransactionRequest{Id: id}); err != nil {
				t.Fatal(err)
			}
		}
		err := <-ended
		read := h.store.Stats().Storage.Pages.PagesRead - before
		slow.Remove()
		if f := failureOf(t, err); f.reason != want.Reason() {
			t.Errorf("%s: %v", name, err)
		}
		if read > 1000 {
			t.Errorf("%s: the walk went on for %d pages", name, read)
		}
		if err := h.stop(); err != nil {
			t.Error(err)
		}
	}
}

// beginWalk begins a transaction that deletes all keys. On a busy machine its time may be over before it reads: then there is another one.
func (h *harness) beginWalk(t *testing.T) (id, before uint64, ended chan error) {
	t.Helper()
	pagesRead := func() uint64 { return h.store.Stats().Storage.Pages.PagesRead }
	eventually(t, "the walk reads", func() bool {
		k := h.talk(t)
		begin, err := k.say(beginRequest(new(pb.BeginRequest)))
		if err != nil {
			t.Fatal(err)
		}
		before, ended = pagesRead(), make(chan error, 1)
		go func() {
			_, err := k.say(&pb.TransactRequest{Request: &pb.TransactRequest_DeleteRange{DeleteRange: &pb.RangeDeleteRequest{Range: new(pb.KeyRange)}}})
			ended <- err
		}()
		for id = begin.GetBegin().GetId(); pagesRead() == before; time.Sleep(time.Millisecond) {
			if len(ended) > 0 {
				failureOf(t, <-ended).want(t, codes.Aborted, pb.ErrorReason_ERROR_REASON_TXN_TIMEOUT)
				return false
			}
		}
		return true
	})
	return id, before, ended
}

func TestTransactionLimitsAtTheLimitAndPastIt(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Limits.Transactions, c.Limits.TxnSize = 2, 1*config.KiB })
	first, second, third := h.talk(t), h.talk(t), h.talk(t)
	first.begin()
	second.begin()
	_, err := third.say(beginRequest(new(pb.BeginRequest)))
	f := failureOf(t, err)
	f.want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_TXNS)
	if f.retry == 0 {
		t.Error("no advice to retry")
	}
	const entry = 44 // what a write holds beside its key and value
	first.must(txnPutRequest("k", string(make([]byte, 1023-entry))))
	first.must(commitRequest)
	third.begin()
	_, err = second.say(txnPutRequest("k", string(make([]byte, 1024-entry))))
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_TXN_TOO_LARGE, "limit", "size", "unit")
	second.must(rollbackRequest)
}

// TestTransactionsThatAreRefusedKeepNothing: most of them are refused what they have no room for, and none is rolled back by its client. Others go on
// meanwhile.
func TestTransactionsThatAreRefusedKeepNothing(t *testing.T) {
	const txns, size = 20, 256 << 10
	small, reads := new(pb.WriteRequest), new(pb.BatchReadRequest)
	for i := range size / 64 { // each takes as much in memory
		small.Mutations = append(small.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "%05d", i)})
	}
	for i := range size / 256 {
		reads.Keys = append(reads.Keys, fmt.Appendf(nil, "%0250d", i))
	}
	for name, row := range map[string]struct {
		request *pb.TransactRequest
		alone   pb.ErrorReason // why it is refused to one alone, if it is
		most    config.Size    // of one
	}{
		"a write": {txnPutRequest("k", string(make([]byte, size))), 0, 2 * size},
		"a write that one may not have": {
			&pb.TransactRequest{Request: &pb.TransactRequest_Write{Write: small}}, pb.ErrorReason_ERROR_REASON_TXN_TOO_LARGE, size / 2,
		},
		"reads": {&pb.TransactRequest{Request: &pb.TransactRequest_BatchGet{BatchGet: reads}}, 0, 2 * size},
	} {
		t.Run(name, func(t *testing.T) {
			h := mustStart(t, func(c *config.Config) { c.Limits.TxnSize = row.most })
			memory := &h.Server.transactions.memory
			memory.shared.bytes, memory.besideMax = size+size/8, size+size/8 // one fits beside the share
			var all []*talk
			for range txns {
				all = append(all, h.talk(t))
				all[len(all)-1].begin()
			}
			all[1].must(savepointRequest)
			each := func(i int) {
				_, err := all[i].say(row.request)
				if reason := row.alone; reason != 0 {
					failureOf(t, err).want(t, codes.InvalidArgument, reason, "limit", "size", "unit")
				} else if i > 0 {
					failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_TXNS)
				}
			}
			if invariants.Enabled { // the heap has more: the keys of each client's last request (access.claim)
				for i := range txns {
					each(i)
				}
			} else {
				mustKeepLittle(t, txns, size, each)
			}
			if n, most := memory.bytes.Load(), memory.besideMax; n > most {
				t.Errorf("the transactions have %d bytes, of at most %d", n, most)
			}
			if _, err := all[1].say(rollbackToRequest(1)); row.alone != 0 { // to what was given up
				failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_NO_SAVEPOINT)
				_, err = all[1].say(commitRequest)
				failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_TXN_FAILED, "cause")
			}
			other := h.talk(t) // has room for what is small
			other.begin()
			other.must(txnGetRequest("k"))
			other.must(commitRequest)
		})
	}
}

func TestADrainWaitsForAnOpenTransaction(t *testing.T) {
	h := mustStart(t)
	k, idle := h.talk(t), h.talk(t)
	k.begin()
	idle.begin()
	idle.must(rollbackRequest)
	var stopped sync.WaitGroup
	stopped.Go(func() { _ = h.stop() })
	_, err := idle.hear()
	failureOf(t, err).want(t, codes.Unavailable, pb.ErrorReason_ERROR_REASON_SHUTTING_DOWN)
	k.must(txnPutRequest("k", "v"))
	if epoch := k.must(commitRequest).GetCommit().Epoch; epoch != 1 {
		t.Errorf("committed at %d", epoch)
	}
	_, err = k.hear()
	failureOf(t, err).want(t, codes.Unavailable, pb.ErrorReason_ERROR_REASON_SHUTTING_DOWN)
	stopped.Wait()
}

// Timers, operators and clients that leave meet transactions at every moment of their lives.
func TestTransactionsEndedFromOutsideAtAnyMoment(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.TxnIdleTimeout, c.TxnTimeout = 3*time.Millisecond, 5*time.Millisecond })
	var clients sync.WaitGroup
	for n := range 8 {
		clients.Go(func() {
			for i := range 40 {
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i%7)*time.Millisecond+time.Millisecond)
				stream, err := h.transactions().Transact(ctx)
				if err != nil {
					cancel()
					continue
				}
				k := &talk{t: t, stream: stream}
				for range 3 {
					_ = stream.Send(beginRequest(new(pb.BeginRequest)))
					_ = stream.Send(txnPutRequest("k"+strconv.Itoa(n), "v"))
					_ = stream.Send(txnGetRequest("k"))
					time.Sleep(time.Duration(i%4) * time.Millisecond)
					_ = stream.Send(commitRequest)
				}
				for {
					if _, err := k.hear(); err != nil && (status.Code(err) == codes.Canceled || status.Code(err) == codes.DeadlineExceeded || len(status.Convert(err).Details()) == 0 || ctx.Err() != nil) {
						break
					}
				}
				cancel()
			}
		})
	}
	clients.Wait()
	eventually(t, "nothing is left", func() bool {
		s := h.transactionStats()
		ended := s.Committed
		for _, n := range s.Aborted {
			ended += n
		}
		return s.Open == 0 && s.Bytes == 0 && ended == s.Started
	})
}
