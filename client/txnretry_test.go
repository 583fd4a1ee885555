package client_test

import (
	"errors"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

// losingServer loses its connection when a commit arrives, so many times: before or after it has
// executed the commit, which the client cannot know.
type losingServer struct {
	kvpb.UnimplementedTransactionServiceServer
	lose     atomic.Int64
	executed atomic.Int64 // commits with a write
	before   bool         // the connection is lost before the commit is executed
	silent   bool         // it does not answer what became of a commit
	outcomes outcomes
	attempts atomic.Int64 // of Execute
	empty    bool         // the second one writes nothing
	full     bool         // all after the first one are refused
}

func (s *losingServer) Transact(stream grpc.BidiStreamingServer[kvpb.TransactRequest, kvpb.TransactResponse]) error {
	wrote := false
	for {
		request, err := stream.Recv()
		if err != nil {
			return err // the client has ended the stream
		}
		response := new(kvpb.TransactResponse)
		switch request.GetRequest().(type) {
		case *kvpb.TransactRequest_Begin:
			wrote = false
			response.Response = &kvpb.TransactResponse_Begin{Begin: &kvpb.BeginResponse{Id: 1, ReadEpoch: 7}}
		case *kvpb.TransactRequest_Get:
			response.Response = &kvpb.TransactResponse_Get{Get: &kvpb.GetResponse{Found: true, Value: []byte("v"), Epoch: 7}}
		case *kvpb.TransactRequest_Write:
			wrote = true
			response.Response = &kvpb.TransactResponse_Write{Write: new(kvpb.WriteResponse)}
		case *kvpb.TransactRequest_Commit:
			lost := s.lose.Add(-1) >= 0
			if wrote && !(lost && s.before) && s.outcomes.execute(request.GetCommit().GetRequestId()) {
				s.executed.Add(1)
			}
			if lost {
				return status.Error(codes.Unavailable, "the connection was lost")
			}
			response.Response = &kvpb.TransactResponse_Commit{Commit: &kvpb.CommitResponse{Epoch: 8}}
		default:
			return status.Errorf(codes.Unimplemented, "%T", request.GetRequest())
		}
		if err := stream.Send(response); err != nil {
			return err
		}
	}
}

func startLosing(t *testing.T, losses int64) (*losingServer, *client.Client) {
	t.Helper()
	s := new(losingServer)
	s.outcomes.state = map[string]kvpb.OutcomeState{}
	s.lose.Store(losses)
	c := serveFake(t, func(g *grpc.Server) { kvpb.RegisterTransactionServiceServer(g, s) })
	return s, c
}

func TestReadOnlyTransactionIsRepeatedAfterItsCommitWasLost(t *testing.T) {
	for name, run := range map[string]func(*client.Client, func(*client.Txn) error) error{
		"View": func(c *client.Client, do func(*client.Txn) error) error { return c.View(t.Context(), do) },
		"Update with ReadOnly": func(c *client.Client, do func(*client.Txn) error) error {
			return c.Update(t.Context(), do, client.ReadOnly())
		},
		"Update with ReadAt": func(c *client.Client, do func(*client.Txn) error) error {
			return c.Update(t.Context(), do, client.ReadAt(7))
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, c := startLosing(t, 2)
			runs := 0
			err := run(c, func(tx *client.Txn) error {
				runs++
				_, err := tx.Get([]byte("k"))
				return err
			})
			if err != nil || runs != 3 {
				t.Errorf("after 2 lost answers and %d runs: %v", runs, err)
			}
		})
	}
}

// TestUpdateAsksWhatBecameOfItsCommit loses the connection during the commit, after and before it was executed: the function runs
// again only if it was not.
func TestUpdateAsksWhatBecameOfItsCommit(t *testing.T) {
	for _, before := range []bool{false, true} {
		s, c := startLosing(t, 1)
		s.before = before
		runs, want := 0, 1
		if before {
			want = 2
		}
		err := c.Update(t.Context(), func(tx *client.Txn) error {
			runs++
			return tx.Put([]byte("k"), []byte("v"))
		})
		if executed := s.executed.Load(); err != nil || runs != want || executed != 1 {
			t.Errorf("lost before the commit %v: %d runs, %d commits, %v", before, runs, executed, err)
		}
	}
}

// TestUpdateIsNotRepeatedAfterItsCommitMayHaveHappened: the server does not answer what became of the commit, so the function must not
// run twice.
func TestUpdateIsNotRepeatedAfterItsCommitMayHaveHappened(t *testing.T) {
	s, c := startLosing(t, 1)
	s.silent = true
	runs := 0
	err := c.Update(t.Context(), func(tx *client.Txn) error {
		runs++
		return tx.Put([]byte("k"), []byte("v"))
	})
	var e *client.Error
	if !errors.As(err, &e) || !e.OutcomeUnknown() {
		t.Errorf("the answer to the commit was lost: %v", err)
	}
	if executed := s.executed.Load(); runs != 1 || executed != 1 {
		t.Errorf("%d runs, %d commits", runs, executed)
	}
}
