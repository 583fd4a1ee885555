package server

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// clockAfter waits until the clock of the server shows a time after that of everything so far, and returns the time before.
func clockAfter(t *testing.T, h *harness) uint64 {
	t.Helper()
	first, err := h.admin.Clock(testContext(t), &pb.ClockRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for {
		now, err := h.admin.Clock(testContext(t), &pb.ClockRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if now.GetTimeUs() > first.GetTimeUs()+5000 {
			return first.GetTimeUs() + 2500
		}
		time.Sleep(time.Millisecond)
	}
}

// TestReadsAtATime: gets, batches of gets, scans and read-only transactions read the state of a time, and say which epoch it was.
func TestReadsAtATime(t *testing.T) {
	h := mustStart(t, retaining)
	ctx, key := testContext(t), []byte("k")
	put := func(value string) uint64 {
		t.Helper()
		done, err := h.kv.Put(ctx, &pb.PutRequest{Key: key, Value: []byte(value)})
		if err != nil {
			t.Fatal(err)
		}
		return done.GetEpoch()
	}
	put("old")
	at := clockAfter(t, h)
	put("new")
	got, err := h.kv.Get(ctx, &pb.GetRequest{Key: key, SnapshotTimeUs: at})
	if err != nil || string(got.GetValue()) != "old" {
		t.Fatalf("get: %v, %v", got, err)
	}
	again, err := h.kv.Get(ctx, &pb.GetRequest{Key: key, SnapshotEpoch: got.GetReadEpoch()})
	if err != nil || string(again.GetValue()) != "old" {
		t.Fatalf("get at its epoch: %v, %v", again, err)
	}
	batch, err := h.kv.BatchGet(ctx, &pb.BatchGetRequest{Keys: [][]byte{key}, SnapshotTimeUs: at})
	if err != nil || string(batch.GetResults()[0].GetValue()) != "old" || batch.GetReadEpoch() != got.GetReadEpoch() {
		t.Fatalf("batch: %v, %v", batch, err)
	}
	scan, err := h.kv.Scan(ctx, &pb.ScanRequest{SnapshotTimeUs: at})
	if err != nil {
		t.Fatal(err)
	}
	if page, err := scan.Recv(); err != nil || string(page.GetEntries()[0].GetValue()) != "old" || page.GetReadEpoch() != got.GetReadEpoch() {
		t.Fatalf("scan: %v, %v", page, err)
	}
	_, err = h.kv.Get(ctx, &pb.GetRequest{Key: key, SnapshotTimeUs: at + uint64(time.Hour.Microseconds())})
	failureOf(t, err).want(t, codes.OutOfRange, pb.ErrorReason_ERROR_REASON_SNAPSHOT_IN_FUTURE, "time_us", "now_us")
	_, err = h.kv.Get(ctx, &pb.GetRequest{Key: key, SnapshotTimeUs: 1})
	failureOf(t, err).want(t, codes.OutOfRange, pb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE, "time_us", "oldest", "oldest_time_us")
	_, err = h.kv.Get(ctx, &pb.GetRequest{Key: key, SnapshotTimeUs: at, SnapshotEpoch: 1})
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST)
}

// TestReadsAtATimeCountWhatTheyReadOfTheLog: the record of a large commit is in memory as a whole while the log is asked when it was. Every read at a
// time counts it as a part of an answer, and is refused while answers have no room.
func TestReadsAtATimeCountWhatTheyReadOfTheLog(t *testing.T) {
	h := mustStart(t, retaining)
	ctx, feed := testContext(t), pb.NewFeedServiceClient(h.conn)
	h.mustPut(t, "k", "small")
	time.Sleep(2 * time.Millisecond) // it has an older time than the next, in whole milliseconds
	h.mustPut(t, "large", string(make([]byte, 2<<20)))
	past, err := feed.History(ctx, &pb.HistoryRequest{Key: []byte("large"), KeysOnly: true})
	if err != nil || len(past.GetVersions()) != 1 {
		t.Fatal(past, err)
	}
	at := past.GetVersions()[0].GetTimeUs()
	h.mustPut(t, "k", "small, too")
	key, txns := []byte("k"), pb.NewTransactionServiceClient(h.conn)
	reads := map[string]func() error{
		"get": func() error {
			_, err := h.kv.Get(ctx, &pb.GetRequest{Key: key, SnapshotTimeUs: at})
			return err
		},
		"batch of gets": func() error {
			_, err := h.kv.BatchGet(ctx, &pb.BatchGetRequest{Keys: [][]byte{key}, SnapshotTimeUs: at})
			return err
		},
		"get in parts": func() error {
			s, err := h.kv.GetStream(ctx, &pb.GetStreamRequest{Key: key, SnapshotTimeUs: at})
			if err == nil {
				_, err = s.Recv()
			}
			return err
		},
		"scan": func() error {
			s, err := h.kv.Scan(ctx, &pb.ScanRequest{Range: prefixRange("k"), SnapshotTimeUs: at})
			if err == nil {
				_, err = s.Recv()
			}
			return err
		},
		"transaction": func() error {
			s, err := txns.Transact(ctx)
			if err != nil {
				return err
			}
			defer func() { _ = s.CloseSend() }()
			if err := s.Send(&pb.TransactRequest{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{ReadOnly: true, SnapshotTimeUs: at}}}); err != nil {
				return err
			}
			out, err := s.Recv()
			if err == nil && out.GetError() != nil {
				err = status.ErrorProto(out.GetError())
			}
			return err
		},
		"history": func() error {
			_, err := feed.History(ctx, &pb.HistoryRequest{Key: key, ToTimeUs: at})
			return err
		},
	}
	for name, read := range reads {
		if err := read(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	eventually(t, "the answers have been sent", func() bool { return h.admission.words[shareAnswers].word.Load() == 0 })
	defer h.fillShare(shareAnswers, 0)()
	for name, read := range reads {
		if err := read(); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("%s while answers have no room: %v", name, err)
		}
	}
}
