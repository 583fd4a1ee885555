package client_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/client/clienttest"
	"github.com/epochkv/epochkv/internal/testseed"
)

var outcomeWrites = flag.Int("outcome.writes", 300, "writes of TestOutcomesOfWritesAreTrue")

// fickleServer executes a write at most once for each id, as the server does. What becomes of an attempt, and of its answer, it draws: either may be
// lost, the attempt may arrive late, and it may be refused before its id is looked up.
type fickleServer struct {
	kvpb.UnimplementedKVServiceServer
	kvpb.UnimplementedTransactionServiceServer

	mu       sync.Mutex
	random   *rand.Rand
	epoch    uint64
	known    map[string]uint64 // epochs of executed requests by their ids; cancelled for those that were fenced off
	executed map[string][]uint64
	late     []func()
}

const cancelled = ^uint64(0)

// attempt draws what becomes of a request.
func attempt[Response any](s *fickleServer, execute func() (Response, error)) (none Response, _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	lost := status.Error(codes.Unavailable, "the connection was lost")
	switch s.random.IntN(14) {
	case 0:
		return none, lost
	case 1:
		_, _ = execute()
		return none, lost
	case 2, 3:
		s.late = append(s.late, func() { _, _ = execute() })
		return none, lost
	case 4:
		_, _ = execute()
		return none, clienttest.NewError(codes.Internal, kvpb.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN, "the log failed")
	case 5:
		return none, clienttest.NewError(codes.ResourceExhausted, kvpb.ErrorReason_ERROR_REASON_DISK_FULL, "disk full")
	case 6, 7:
		return none, clienttest.NewRetryError(codes.ResourceExhausted, kvpb.ErrorReason_ERROR_REASON_MEMORY_FULL, "memory full", time.Microsecond)
	case 8:
		return none, clienttest.NewError(codes.Unavailable, kvpb.ErrorReason_ERROR_REASON_SHUTTING_DOWN, "shutting down")
	case 9:
		reasons := []kvpb.ErrorReason{kvpb.ErrorReason_ERROR_REASON_REQUEST_ID_EXPIRED, kvpb.ErrorReason_ERROR_REASON_REQUEST_ID_IN_FUTURE}
		now := fmt.Sprint(time.Now().UnixMilli())
		return none, clienttest.NewError(codes.FailedPrecondition, reasons[s.random.IntN(2)], "time", "server_time", now)
	}
	return execute()
}

// writeLocked executes a request, once. Now and then its condition does not hold, or it has nothing to write.
func (s *fickleServer) writeLocked(id []byte, value string, conditional bool) (epoch uint64, _ error) {
	switch epoch := s.known[string(id)]; {
	case epoch == cancelled:
		return 0, clienttest.NewError(codes.Aborted, kvpb.ErrorReason_ERROR_REASON_REQUEST_CANCELLED, "cancelled")
	case epoch != 0:
		return epoch, nil
	case conditional && s.random.IntN(3) == 0:
		return 0, clienttest.NewError(codes.FailedPrecondition, kvpb.ErrorReason_ERROR_REASON_PRECONDITION_FAILED, "no")
	case !conditional && s.random.IntN(3) == 0:
		return 0, nil
	}
	s.epoch++
	s.known[string(id)] = s.epoch
	s.executed[value] = append(s.executed[value], s.epoch)
	return s.epoch, nil
}

// Put implements kvpb.KVServiceServer.
func (s *fickleServer) Put(_ context.Context, r *kvpb.PutRequest) (*kvpb.PutResponse, error) {
	return attempt(s, func() (*kvpb.PutResponse, error) {
		epoch, err := s.writeLocked(r.GetRequestId(), string(r.GetValue()), true)
		return &kvpb.PutResponse{Epoch: epoch}, err
	})
}

// Invoke implements kvpb.KVServiceServer.
func (s *fickleServer) Invoke(_ context.Context, r *kvpb.InvokeRequest) (*kvpb.InvokeResponse, error) {
	return attempt(s, func() (*kvpb.InvokeResponse, error) {
		epoch, err := s.writeLocked(r.GetRequestId(), string(r.GetInvocation().GetPutIfAbsent()), false)
		return &kvpb.InvokeResponse{Epoch: epoch, Result: &kvpb.InvokeResult{Applied: epoch != 0}}, err
	})
}

// GetOutcome implements kvpb.TransactionServiceServer.
func (s *fickleServer) GetOutcome(_ context.Context, r *kvpb.GetOutcomeRequest) (*kvpb.GetOutcomeResponse, error) {
	answer := func() (*kvpb.GetOutcomeResponse, error) {
		id := string(r.GetRequestId())
		if s.known[id] == 0 && r.GetFence() {
			s.known[id] = cancelled
		}
		switch epoch := s.known[id]; epoch {
		case 0:
			return &kvpb.GetOutcomeResponse{State: client.NotApplied}, nil
		case cancelled:
			return &kvpb.GetOutcomeResponse{State: client.Cancelled}, nil
		default:
			return &kvpb.GetOutcomeResponse{State: client.Applied, Epoch: epoch}, nil
		}
	}
	return attempt(s, answer)
}

// Transact implements kvpb.TransactionServiceServer.
func (s *fickleServer) Transact(stream grpc.BidiStreamingServer[kvpb.TransactRequest, kvpb.TransactResponse]) error {
	value := ""
	for {
		request, err := stream.Recv()
		if err != nil {
			return err // the client has ended the stream
		}
		response := new(kvpb.TransactResponse)
		switch request.GetRequest().(type) {
		case *kvpb.TransactRequest_Begin:
			response.Response = &kvpb.TransactResponse_Begin{Begin: &kvpb.BeginResponse{Id: 1, ReadEpoch: 7}}
		case *kvpb.TransactRequest_Write:
			value = string(request.GetWrite().GetMutations()[0].GetValue())
			response.Response = &kvpb.TransactResponse_Write{Write: new(kvpb.WriteResponse)}
		case *kvpb.TransactRequest_Rollback:
			response.Response = &kvpb.TransactResponse_Rollback{Rollback: new(kvpb.RollbackResponse)}
		case *kvpb.TransactRequest_Commit:
			of := value
			committed, err := attempt(s, func() (*kvpb.CommitResponse, error) {
				epoch, err := s.writeLocked(request.GetCommit().GetRequestId(), of, true)
				return &kvpb.CommitResponse{Epoch: epoch}, err
			})
			if s, ok := status.FromError(err); err != nil && ok && len(s.Details()) > 0 {
				response.Response = &kvpb.TransactResponse_Error{Error: s.Proto()}
			} else if err != nil {
				return err
			} else {
				response.Response = &kvpb.TransactResponse_Commit{Commit: committed}
			}
		default:
			return status.Errorf(codes.Unimplemented, "%T", request.GetRequest())
		}
		if err := stream.Send(response); err != nil {
			return err
		}
	}
}

// arrive executes what is late, and returns the epochs at which a value was written.
func (s *fickleServer) arrive(value string) []uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.random.Shuffle(len(s.late), func(i, j int) { s.late[i], s.late[j] = s.late[j], s.late[i] })
	for _, execute := range s.late {
		execute()
	}
	s.late = nil
	return s.executed[value]
}

// TestOutcomesOfWritesAreTrue: a write without an error was executed, once and at the epoch that is returned, or had nothing to write. One with an
// error was not executed, and never is, unless the error says that this is unknown.
func TestOutcomesOfWritesAreTrue(t *testing.T) {
	seed := testseed.Base(t)
	s := &fickleServer{random: rand.New(rand.NewPCG(seed, 1)), known: map[string]uint64{}, executed: map[string][]uint64{}}
	c := serveFake(t, func(g *grpc.Server) {
		kvpb.RegisterKVServiceServer(g, s)
		kvpb.RegisterTransactionServiceServer(g, s)
	}, client.WithRetry(client.Retry{Attempts: 4, Base: time.Microsecond, Max: time.Microsecond}))
	writes := []func(value []byte) (client.Epoch, error){
		func(v []byte) (client.Epoch, error) { return c.Put(t.Context(), []byte("k"), v) },
		func(v []byte) (client.Epoch, error) {
			return c.Put(t.Context(), []byte("k"), v, client.As(c.NewRequestID()))
		},
		func(v []byte) (client.Epoch, error) {
			_, epoch, err := c.Invoke(t.Context(), client.PutIfAbsent([]byte("k"), v))
			return epoch, err
		},
		func(v []byte) (client.Epoch, error) {
			tx, err := c.Begin(t.Context())
			if err == nil {
				_ = tx.Put([]byte("k"), v) // Commit has its error
				return tx.Commit()
			}
			return 0, err
		},
	}
	seen := map[string]int{}
	for i := range *outcomeWrites {
		value, kind := fmt.Sprint("value ", i), i%len(writes)
		epoch, err := writes[kind]([]byte(value))
		executed := s.arrive(value)
		outcome, right := "unknown", len(executed) <= 1
		if e := new(client.Error); err == nil && epoch == 0 {
			outcome, right = "nothing", len(executed) == 0
		} else if err == nil {
			outcome, right = "written", len(executed) == 1 && executed[0] == uint64(epoch)
		} else if errors.As(err, &e) && !e.OutcomeUnknown() {
			outcome, right = "refused", len(executed) == 0
		}
		if !right {
			t.Fatalf("seed %d, write %d of kind %d is %s: epoch %d, %v; executed at %d", seed, i, kind, outcome, epoch, err, executed)
		}
		seen[outcome]++
	}
	t.Log(seen)
	for _, outcome := range []string{"unknown", "nothing", "written", "refused"} {
		if seen[outcome] == 0 {
			t.Errorf("no write was %s: this tests less than it says", outcome)
		}
	}
}
