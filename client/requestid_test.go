package client_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/client/clienttest"
)

func TestAttemptsOfAWriteHaveOneID(t *testing.T) {
	s, c := start(t)
	broken := status.Error(codes.Unavailable, "connection reset")
	s.FailNext(broken, broken)
	if _, err := c.Put(t.Context(), []byte("k"), []byte("v")); err != nil {
		t.Fatal(err)
	}
	ids := s.RequestIDs()
	if len(ids) != 3 || ids[0] == "" || ids[0] != ids[1] || ids[1] != ids[2] {
		t.Errorf("three attempts had the ids %x", ids)
	}
	if _, err := c.Put(t.Context(), []byte("k"), []byte("v")); err != nil {
		t.Fatal(err)
	}
	if again := s.RequestIDs(); again[3] == ids[0] {
		t.Error("the next write has the same id")
	}
	own := c.NewRequestID()
	if _, err := c.Put(t.Context(), []byte("k"), []byte("v"), client.As(own)); err != nil {
		t.Fatal(err)
	}
	if ids := s.RequestIDs(); ids[4] != string(own[:]) {
		t.Errorf("the id is %x, not the given one", ids[4])
	}
}

// TestClientTakesTheTimeOfTheServer: an id that is refused for its time is made again with the server's time, and so are all later
// ones.
func TestClientTakesTheTimeOfTheServer(t *testing.T) {
	for _, reason := range []kvpb.ErrorReason{
		kvpb.ErrorReason_ERROR_REASON_REQUEST_ID_IN_FUTURE, kvpb.ErrorReason_ERROR_REASON_REQUEST_ID_EXPIRED,
	} {
		s, c := start(t)
		there := time.Now().Add(-time.Hour).UnixMilli()
		s.FailNext(clienttest.NewError(codes.FailedPrecondition, reason, "time", "server_time", strconv.FormatInt(there, 10)))
		for range 2 {
			if _, err := c.Put(t.Context(), []byte("k"), nil); err != nil {
				t.Fatalf("%v: %v", reason, err)
			}
		}
		for i, id := range s.RequestIDs()[1:] {
			at := int64(0)
			for _, b := range []byte(id[:6]) {
				at = at<<8 | int64(b)
			}
			if off := at - there; off < 0 || off > time.Minute.Milliseconds() {
				t.Errorf("%v: id %d is %d ms off the server's time", reason, i, off)
			}
		}
	}
}

// TestPipelineTakesTheTimeOfTheServer for later ids, though it repeats nothing; so does a question for an outcome.
func TestPipelineTakesTheTimeOfTheServer(t *testing.T) {
	there := time.Now().Add(-time.Hour).UnixMilli()
	refused := clienttest.NewError(codes.FailedPrecondition, kvpb.ErrorReason_ERROR_REASON_REQUEST_ID_IN_FUTURE, "time", "server_time", strconv.FormatInt(there, 10))
	for name, use := range map[string]func(*client.Client){
		"write": func(c *client.Client) {
			p := mustPipeline(t, c, 4)
			_ = p.Put([]byte("k"), nil, nil, client.As(c.NewRequestID())) // Close returns its error
			_ = p.Close()
		},
		"outcome": func(c *client.Client) { _, _, _ = c.Outcome(t.Context(), c.NewRequestID(), true) },
	} {
		s, c := start(t)
		if name == "write" {
			s.FailNext(nil) // the pipeline
		}
		s.FailNext(refused)
		use(c)
		id, at := c.NewRequestID(), int64(0)
		for _, b := range id[:6] {
			at = at<<8 | int64(b)
		}
		if off := at - there; off < 0 || off > time.Minute.Milliseconds() {
			t.Errorf("%s: the next id is %d ms off the server's time", name, off)
		}
	}
}

// TestRefusedTimeOfALaterAttemptIsUnknown: an earlier attempt may have been executed, so the id must not be replaced.
func TestRefusedTimeOfALaterAttemptIsUnknown(t *testing.T) {
	s, c := start(t)
	s.FailNext(status.Error(codes.Unavailable, "connection reset"), clienttest.NewError(codes.FailedPrecondition,
		kvpb.ErrorReason_ERROR_REASON_REQUEST_ID_EXPIRED, "time", "server_time", strconv.FormatInt(time.Now().UnixMilli(), 10)))
	_, err := c.Put(t.Context(), []byte("k"), nil)
	var e *client.Error
	if !errors.As(err, &e) || !e.OutcomeUnknown() || len(s.RequestIDs()) != 2 {
		t.Fatalf("%v after %d attempts", err, len(s.RequestIDs()))
	}
}

func TestRequestIDsHaveAText(t *testing.T) {
	_, c := start(t)
	id := c.NewRequestID()
	if again, err := client.ParseRequestID(id.String()); err != nil || again != id {
		t.Errorf("%v, %v", again, err)
	}
	for _, bad := range []string{"", "x", "c4b2f4e2-8a51-4b46-9b0e-0d8f9d3c7a11"} {
		if _, err := client.ParseRequestID(bad); err == nil {
			t.Errorf("%q is an id", bad)
		}
	}
}

// outcomes is the part of a losing server that knows what became of requests.
type outcomes struct {
	mu    sync.Mutex
	state map[string]kvpb.OutcomeState
}

// execute notes that a request is executed. It reports false if it was cancelled.
func (o *outcomes) execute(id []byte) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.state[string(id)] == client.Cancelled {
		return false
	}
	o.state[string(id)] = client.Applied
	return true
}

// GetOutcome implements kvpb.TransactionServiceServer.
func (s *losingServer) GetOutcome(_ context.Context, r *kvpb.GetOutcomeRequest) (*kvpb.GetOutcomeResponse, error) {
	if s.silent {
		return nil, status.Error(codes.Unavailable, "still down")
	}
	s.outcomes.mu.Lock()
	defer s.outcomes.mu.Unlock()
	state := s.outcomes.state[string(r.GetRequestId())]
	if state == 0 {
		state = client.NotApplied
	}
	if state == client.NotApplied && r.GetFence() {
		state = client.Cancelled
		s.outcomes.state[string(r.GetRequestId())] = state
	}
	return &kvpb.GetOutcomeResponse{State: state, Epoch: 8}, nil
}

// Execute implements kvpb.TransactionServiceServer: the first attempt is lost, and the second one, or all of them, are refused
// before their id is looked up, or the second one writes nothing.
func (s *losingServer) Execute(_ context.Context, r *kvpb.ExecuteRequest) (*kvpb.ExecuteResponse, error) {
	n := s.attempts.Add(1)
	if n > 1 && s.full {
		n = 2
	}
	switch n {
	case 1:
		if !s.before {
			s.outcomes.execute(r.GetRequestId())
		}
		return nil, status.Error(codes.Unavailable, "the connection was lost")
	case 2:
		if s.empty {
			return new(kvpb.ExecuteResponse), nil
		}
		return nil, clienttest.NewError(codes.ResourceExhausted, kvpb.ErrorReason_ERROR_REASON_DISK_FULL, "disk full")
	}
	return &kvpb.ExecuteResponse{Epoch: 8, Succeeded: true, Deduplicated: true}, nil
}

// TestRefusalAfterALostAttemptDoesNotHideItsOutcome: a refusal says nothing about an attempt before it. The client asks for the
// outcome, and fences the lost attempt off, before it calls the write not executed.
func TestRefusalAfterALostAttemptDoesNotHideItsOutcome(t *testing.T) {
	execute := func(c *client.Client, id client.RequestID) error {
		_, err := c.Execute(t.Context(), client.Plan{}, client.As(id))
		return err
	}
	t.Run("executed", func(t *testing.T) {
		_, c := startLosing(t, 0)
		if err := execute(c, c.NewRequestID()); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("executed, and refused for ever", func(t *testing.T) {
		s, c := startLosing(t, 0)
		s.full = true
		e := new(client.Error)
		if err := execute(c, c.NewRequestID()); !errors.As(err, &e) || !e.OutcomeUnknown() || e.Reason != kvpb.ErrorReason_ERROR_REASON_DISK_FULL {
			t.Fatal(err)
		}
	})
	t.Run("not executed", func(t *testing.T) {
		s, c := startLosing(t, 0)
		s.before = true
		id := c.NewRequestID()
		e := new(client.Error)
		if err := execute(c, id); !errors.As(err, &e) || e.OutcomeUnknown() || e.Reason != kvpb.ErrorReason_ERROR_REASON_DISK_FULL {
			t.Fatal(err)
		}
		if s.outcomes.execute(id[:]) {
			t.Fatal("the lost attempt could still be executed")
		}
	})
	t.Run("nothing to write", func(t *testing.T) {
		s, c := startLosing(t, 0)
		s.before, s.empty = true, true
		id := c.NewRequestID()
		if err := execute(c, id); err != nil {
			t.Fatal(err)
		}
		if s.outcomes.execute(id[:]) {
			t.Fatal("the lost attempt could still be executed, and write")
		}
	})
	t.Run("silence", func(t *testing.T) {
		s, c := startLosing(t, 0)
		s.before, s.silent = true, true
		e := new(client.Error)
		if err := execute(c, c.NewRequestID()); !errors.As(err, &e) || !e.OutcomeUnknown() {
			t.Fatal(err)
		}
	})
}
