package server

import (
	"context"
	"errors"
	"io"
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// scripted is a stream of transactions whose client sends requests one after another. A call between them is made once all before it are served.
type scripted struct {
	discard
	steps []any
}

func (s *scripted) Recv() (*pb.TransactRequest, error) {
	for len(s.steps) > 0 {
		step := s.steps[0]
		s.steps = s.steps[1:]
		switch v := step.(type) {
		case *pb.TransactRequest:
			return v, nil
		case func():
			v()
		}
	}
	return nil, io.EOF
}

func (*scripted) Send(*pb.TransactResponse) error { return nil }

// TestACommitOfAStreamThatHasEndedIsReportedSo: it arrives when the transaction was ended by an operator, and is not executed.
func TestACommitOfAStreamThatHasEndedIsReportedSo(t *testing.T) {
	h, lines := startAudited(t)
	var counted telemetry.Requests
	conn := &connection{shard: counted.Shard()}
	c := &transactionStream{server: h.Server, conn: conn, ended: make(chan error, 1)}
	end := func() { c.row.end(errTxnEnded, telemetry.AbortOperator) }
	c.stream = &scripted{discard{ctx: context.Background()}, []any{beginRequest(new(pb.BeginRequest)), txnPutRequest("k", "v"), end, commitRequest}}
	c.access.begin(h.newAccess(c.stream.Context()))
	h.drain.receivers.Go(func() { _ = c.receive() })
	h.drain.receivers.Wait()
	if h.get(t, "k").Found {
		t.Error("the commit was executed")
	}
	if n := counted.Totals(telemetry.MethodCommit); n.Count != 1 || n.Failed != 1 {
		t.Errorf("counted %+v", n)
	}
	all := lines()
	if len(all) != 1 || all[0].Method != "Commit" || all[0].Code != "Aborted" {
		t.Errorf("lines: %+v", all)
	}
}

// TestAStreamThatWasEndedSaysWhy, also if its receiver has noticed before the watcher.
func TestAStreamThatWasEndedSaysWhy(t *testing.T) {
	h := mustStart(t)
	for range 100 { // of two channels that are ready, select takes any
		c := &transactionStream{server: h.Server, ended: make(chan error, 1)}
		c.endLocked(errTxnEnded)
		received := make(chan error, 1)
		received <- errStreamOver
		if err := c.watch(received); !errors.Is(err, errTxnEnded) {
			t.Fatal(err)
		}
	}
}
