package clienttest

import (
	"context"

	"google.golang.org/grpc/codes"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// transactions is the part of the contract about what became of requests. It knows writes of a key and batches, and keeps their ids forever.
type transactions struct {
	kvpb.UnimplementedTransactionServiceServer
	s *Server
}

// fenced is the epoch of a request that was cancelled.
const fenced = ^uint64(0)

// attemptLocked is the epoch at which the request was executed by an earlier attempt, zero for the first one, or why it is not executed.
func (s *Server) attemptLocked(id []byte) (uint64, error) {
	epoch := s.executed[string(id)]
	if epoch == fenced {
		return 0, NewError(codes.Aborted, kvpb.ErrorReason_ERROR_REASON_REQUEST_CANCELLED, "the request was cancelled")
	}
	return epoch, nil
}

// GetOutcome implements kvpb.TransactionServiceServer.
func (t transactions) GetOutcome(_ context.Context, r *kvpb.GetOutcomeRequest) (*kvpb.GetOutcomeResponse, error) {
	s := t.s
	if err := s.enter("GetOutcome"); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	id := string(r.GetRequestId())
	if s.executed[id] == 0 && r.GetFence() {
		s.executed[id] = fenced
	}
	switch epoch := s.executed[id]; epoch {
	case 0:
		return &kvpb.GetOutcomeResponse{State: kvpb.OutcomeState_OUTCOME_STATE_NOT_APPLIED}, nil
	case fenced:
		return &kvpb.GetOutcomeResponse{State: kvpb.OutcomeState_OUTCOME_STATE_CANCELLED}, nil
	default:
		return &kvpb.GetOutcomeResponse{State: kvpb.OutcomeState_OUTCOME_STATE_APPLIED, Epoch: epoch}, nil
	}
}

// CutPipeline lets the next pipeline take so many requests. The one after them is kept, and the client loses its connection. ExecuteKept executes
// it: a connection may die without the server noticing, and requests wait in it.
func (s *Server) CutPipeline(after int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cutPipeline = after + 1
}

// ExecuteKept executes the requests of connections that CutPipeline has cut.
func (s *Server) ExecuteKept(ctx context.Context) {
	s.mu.Lock()
	kept := s.kept
	s.kept = nil
	s.mu.Unlock()
	for _, request := range kept {
		s.answer(ctx, request) // which the client does not get
	}
}

// keep reports whether the connection ends with this request.
func (s *Server) keep(request *kvpb.PipelineRequest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cutPipeline == 0 {
		return false
	}
	if s.cutPipeline--; s.cutPipeline > 0 {
		return false
	}
	s.kept = append(s.kept, request)
	return true
}

// ExecutedIDs are the ids of the writes that were executed.
func (s *Server) ExecutedIDs() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ids []string
	for id, epoch := range s.executed {
		if epoch != fenced {
			ids = append(ids, id)
		}
	}
	return ids
}
