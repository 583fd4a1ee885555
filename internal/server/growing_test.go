package server

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/testseed"
)

// fillShare takes a share but for some room, and its large slot, until release is called.
func (h *harness) fillShare(sh share, room uint64) (release func()) {
	w, other := &h.admission.words[sh], new(connection)
	held := admissionOne + w.limit.bytes - room
	w.word.Add(held)
	w.large.take(other, nil, int64(w.limit.bytes)+1) // whatever claims there are; or it is taken
	return func() {
		w.large.drop(other)
		w.word.Add(-held)
	}
}

// TestAnswersAreCountedWhileTheyGrow: of many answers of small values that are made at once, none becomes as large as an answer may be before it is
// counted. One for which there is no room is refused before its values are in memory.
func TestAnswersAreCountedWhileTheyGrow(t *testing.T) {
	const values, size, room = 64, 40 << 10, 512 << 10
	h := mustStart(t, func(c *config.Config) { c.Limits.InflightBytes = 64 * config.MiB })
	h.putLarge(t, values, size)
	ctx := testContext(t)
	var keys [][]byte
	for i := range values {
		keys = append(keys, fmt.Appendf(nil, "large/%03d", i))
	}
	invocations := new(pb.InvokeAllRequest)
	for _, key := range keys {
		invocations.Invocations = append(invocations.Invocations, &pb.Invocation{Key: key, Operation: &pb.Invocation_Touch{Touch: true}, TtlMs: 3_600_000, ReturnOld: true})
	}
	scan := &pb.RangeReadRequest{Range: &pb.KeyRange{Prefix: []byte("large/")}, PageBytes: scanPageBytesMax}
	if _, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("one"), Value: make([]byte, 6*room)}); err != nil {
		t.Fatal(err)
	}
	txns := pb.NewTransactionServiceClient(h.conn)
	for name, read := range map[string]func() error{
		"batch": func() error {
			_, err := h.kv.BatchGet(ctx, &pb.BatchGetRequest{Keys: keys})
			return err
		},
		"invocations": func() error {
			_, err := h.kv.InvokeAll(ctx, invocations)
			return err
		},
		"one-shot transaction": func() error {
			_, err := txns.Execute(ctx, &pb.ExecuteRequest{ThenOperations: []*pb.Operation{{Operation: &pb.Operation_Scan{Scan: scan}}}})
			return err
		},
		"scan of a large value in a transaction": func() error {
			return inTransaction(ctx, txns, &pb.TransactRequest{Request: &pb.TransactRequest_Scan{Scan: &pb.RangeReadRequest{Range: &pb.KeyRange{Prefix: []byte("one")}}}})
		},
		"scan in a transaction": func() error {
			return inTransaction(ctx, txns, &pb.TransactRequest{Request: &pb.TransactRequest_Scan{Scan: scan}})
		},
		"batch in a transaction": func() error {
			return inTransaction(ctx, txns, &pb.TransactRequest{Request: &pb.TransactRequest_BatchGet{BatchGet: &pb.BatchReadRequest{Keys: keys}}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			if err := read(); err != nil {
				t.Fatalf("while there is room: %v", err)
			}
			defer h.fillShare(shareAnswers, room)()
			eventually(t, "the answers before have been sent", func() bool { return h.admission.words[shareAnswers].word.Load()>>admissionShift == 1 })
			taken := uint64(math.MaxUint64)
			for range 3 { // something else in the process may take memory, too
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				err := read()
				runtime.ReadMemStats(&after)
				if status.Code(err) != codes.ResourceExhausted {
					t.Errorf("without room: %v", err)
				}
				taken = min(taken, after.TotalAlloc-before.TotalAlloc)
			}
			most := uint64(4 * room)
			if name == "invocations" { // old values, new ones and the batch, in buffers that double
				most *= 3
			}
			if t.Logf("%d KiB were taken for an answer that is refused", taken>>10); taken > most {
				t.Errorf("want at most %d KiB", most>>10)
			}
		})
	}
}

// TestALargeValueOfAScanIsCountedBeforeItIsRead: there may be many scans that are admitted with a page of a few bytes.
func TestALargeValueOfAScanIsCountedBeforeItIsRead(t *testing.T) {
	const size, room = 3 << 20, 1 << 20
	h := mustStart(t, func(c *config.Config) { c.Limits.InflightBytes = 64 * config.MiB })
	h.putLarge(t, 1, size)
	scan := func() error {
		stream, err := h.kv.Scan(testContext(t), &pb.ScanRequest{PageBytes: 1})
		if err == nil {
			_, err = stream.Recv()
		}
		return err
	}
	if err := scan(); err != nil {
		t.Fatalf("while there is room: %v", err)
	}
	defer h.fillShare(shareScans, room)()
	taken := uint64(math.MaxUint64)
	for range 3 { // something else in the process may take memory, too
		taken = min(taken, allocated(func() {
			if err := scan(); status.Code(err) != codes.ResourceExhausted {
				t.Errorf("without room: %v", err)
			}
		}))
	}
	if taken > size/2 {
		t.Errorf("%d KiB were taken for a value for which there is no room", taken>>10)
	}
}

// TestDeletionsOfARangeAreCountedWhileTheyGrow: a request of some bytes makes a batch as large as any, and so do invocations in a transaction. While
// large writes have no room for it, it is refused before it has become so large, and changes nothing.
func TestDeletionsOfARangeAreCountedWhileTheyGrow(t *testing.T) {
	testseed.SkipUnderRace(t)
	const keyCount, room = 20_000, 1 << 20 // a deletion takes some hundred bytes
	const parts, value = 200, 8 << 10      // of the range, and the value of a key in each
	h := mustStart(t, func(c *config.Config) { c.Limits.InflightBytes, c.Limits.BatchSize = 16*config.MiB, 16*config.MiB })
	ctx := testContext(t)
	fill := func() {
		batch := new(pb.BatchWriteRequest)
		for i := range keyCount {
			m := &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "%0100d", i)}
			if i%(keyCount/parts) == 0 {
				m.Value = make([]byte, value)
			}
			batch.Mutations = append(batch.Mutations, m)
		}
		if _, err := h.kv.BatchWrite(ctx, batch); err != nil {
			t.Fatal(err)
		}
	}
	txns := pb.NewTransactionServiceClient(h.conn)
	all := new(pb.KeyRange)
	var deletions, invocations []*pb.Operation
	for i := range parts {
		start := fmt.Appendf(nil, "%0100d", i*keyCount/parts)
		part := &pb.KeyRange{Start: start, End: fmt.Appendf(nil, "%0100d", (i+1)*keyCount/parts)}
		deletions = append(deletions, &pb.Operation{Operation: &pb.Operation_DeleteRange{DeleteRange: &pb.RangeDeleteRequest{Range: part}}})
		touch := &pb.Invocation{Key: start, Operation: &pb.Invocation_Touch{Touch: true}, TtlMs: 3_600_000}
		invocations = append(invocations, &pb.Operation{Operation: &pb.Operation_Invoke{Invoke: touch}})
	}
	for name, change := range map[string]func() error{
		"request": func() error {
			_, err := h.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Range: all})
			return err
		},
		"one-shot transaction": func() error {
			deletion := &pb.Operation{Operation: &pb.Operation_DeleteRange{DeleteRange: &pb.RangeDeleteRequest{Range: all}}}
			_, err := txns.Execute(ctx, &pb.ExecuteRequest{ThenOperations: []*pb.Operation{deletion}})
			return err
		},
		"one-shot transaction, in parts": func() error {
			_, err := txns.Execute(ctx, &pb.ExecuteRequest{ThenOperations: deletions})
			return err
		},
		"one-shot transaction, invocations": func() error {
			_, err := txns.Execute(ctx, &pb.ExecuteRequest{ThenOperations: invocations})
			return err
		},
		"transaction": func() error {
			return inTransaction(ctx, txns, &pb.TransactRequest{Request: &pb.TransactRequest_DeleteRange{DeleteRange: &pb.RangeDeleteRequest{Range: all}}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			fill()
			writes := &h.admission.words[shareLargeWrites]
			eventually(t, "the batch is not counted any more", func() bool { return writes.word.Load() == 0 })
			release := h.fillShare(shareLargeWrites, room)
			others := writes.word.Load()
			if err := change(); status.Code(err) != codes.ResourceExhausted {
				t.Errorf("without room: %v", err)
			}
			eventually(t, "what was refused is not counted any more", func() bool { return writes.word.Load() == others })
			release()
			left := uint64(0)
			for _, page := range h.scan(t, &pb.ScanRequest{CountOnly: true}) {
				left += page.Count
			}
			if left != keyCount {
				t.Errorf("%d keys are left of %d", left, keyCount)
			}
			if err := change(); err != nil {
				t.Errorf("with room: %v", err)
			}
			eventually(t, "the deletion is not counted any more", func() bool { return writes.word.Load() == 0 })
		})
	}
}

// TestAConflictCountsNoValueTwice: what an attempt of a one-shot transaction has read is gone when the next one begins.
func TestAConflictCountsNoValueTwice(t *testing.T) {
	const size, conflicts = 5 << 20, 3
	h := mustStart(t, func(c *config.Config) { c.Limits.InflightBytes = 64 * config.MiB }) // of which answers have 12
	h.putLarge(t, 1, size)
	other, err := h.admission.charge(new(connection), countedBytesMin, true) // one that is alone may have any size
	if err != nil {
		t.Fatal(err)
	}
	defer other.release()
	conn := h.connections.admit(nil)
	defer h.connections.release(conn)
	c, err := h.takeExecutor()
	if err != nil {
		t.Fatal(err)
	}
	defer c.release()
	c.ctx, c.access = peer.NewContext(testContext(t), &peer.Peer{AuthInfo: conn}), h.authorized(t, pb.TransactionService_Execute_FullMethodName)
	attempts := 0
	c.session.AdmitLarge(func(bytes int) error {
		if attempts++; attempts <= conflicts {
			h.put(t, "k", "v")
		}
		return c.admitLarge(bytes)
	})
	list := operations(getOperation("large/000"), getOperation("k"), putOperation("other", "v"))
	_, err = (&txnService{Server: h.Server}).execute(c.ctx, c, &pb.ExecuteRequest{ThenOperations: list}, 0, new(pb.ExecuteResponse))
	if err != nil || attempts != conflicts+1 {
		t.Errorf("attempt %d: %v", attempts, err)
	}
}

// inTransaction sends one request in a transaction of its own, and returns the error in its answer.
func inTransaction(ctx context.Context, txns pb.TransactionServiceClient, request *pb.TransactRequest) error {
	stream, err := txns.Transact(ctx)
	if err != nil {
		return err
	}
	for _, req := range []*pb.TransactRequest{{Request: &pb.TransactRequest_Begin{Begin: new(pb.BeginRequest)}}, request} {
		if err := stream.Send(req); err != nil {
			return err
		}
		out, err := stream.Recv()
		if err != nil {
			return err
		}
		if e := out.GetError(); e != nil {
			return status.ErrorProto(e)
		}
	}
	return errors.Join(stream.Send(&pb.TransactRequest{Request: &pb.TransactRequest_Rollback{Rollback: new(pb.RollbackRequest)}}), stream.CloseSend())
}
