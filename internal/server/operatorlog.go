package server

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// operatorLog is the server's log. Beside single events it has incidents, which are not expected, and of
// which clients or a defect may cause any number. The first incident of a kind is logged at once. After that
// there is at most one line a minute, which says how many there were meanwhile. So the log names
// everything once, and no client can fill a disk with it. Lines have the address of the
// client and the error, and nothing else of a request.
type operatorLog struct {
	*slog.Logger
	now func() time.Duration // constant

	mu    sync.Mutex // a leaf
	kinds map[string]*incident
}

// incident is a kind. Code chooses kinds, never a client, so that they are few.
type incident struct {
	next   time.Duration // no line before
	silent uint64        // incidents without a line since the last one
}

// incidentEvery is the interval between two lines of a kind.
const incidentEvery = time.Minute

// incidentErrorMax bounds the text of an error: it may quote what a client has sent.
const incidentErrorMax = 512

func (l *operatorLog) init(log *slog.Logger, now func() time.Duration) {
	l.Logger, l.now, l.kinds = log, now, map[string]*incident{}
}

// incident logs an incident, or counts it for the next line of its kind.
func (l *operatorLog) incident(level slog.Level, kind, message string, err error, args ...any) {
	silent, logs := l.count(kind)
	if !logs {
		return
	}
	text := err.Error()
	if len(text) > incidentErrorMax {
		text = text[:incidentErrorMax] + "..."
	}
	args = append(args, "cause", text)
	if silent > 0 {
		args = append(args, "others_since_last_line", silent)
	}
	l.Log(context.Background(), level, message, args...)
}

// count reports whether an incident of a kind is logged, and how many of it were not.
func (l *operatorLog) count(kind string) (silent uint64, logs bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.kinds[kind]
	if k == nil {
		k = new(incident)
		l.kinds[kind] = k
	}
	now := l.now()
	if now < k.next {
		k.silent++
		return 0, false
	}
	silent, k.next, k.silent = k.silent, now+incidentEvery, 0
	return silent, true
}

// failed is statusOf for the error of a request. An error of which only the server can be the cause
// is an incident: its client sees that something is wrong, and so must the operator.
func (s *Server) failed(method telemetry.Method, err error) *status.Status {
	st := statusOf(s.conceal(err))
	if st.Code() == codes.Internal && isDefect(err) {
		s.log.incident(slog.LevelError, "request "+method.String(), "a request failed for a reason that is not the client's", err, "method", method.String())
	}
	return st
}

// isDefect reports whether an error is one that no reason describes. What has a status is not: gRPC,
// or the code that knows the reason, has made it.
func isDefect(err error) bool {
	_, known := status.FromError(err)
	return !known && contextStatus(err) == nil && classify(err).reason == pb.ErrorReason_ERROR_REASON_INTERNAL
}
