package server

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/tracing"
)

// slowRequests keeps the slowest requests of the last hour, with where their time went. An entry leaves when it is an hour old,
// or when there is no room for a slower one. Only requests above the threshold get here.
type slowRequests struct {
	// Constant after Open.
	entriesMax int
	bytesMax   int

	mu      sync.Mutex // a leaf
	total   uint64     // requests above the threshold
	entries []slowRequest
}

// slowRequestAge is how long a slow request is kept at most: an operator wants to know of the last hour, and an old
// incident must not hide a new one.
const slowRequestAge = time.Hour

// slowRequest is an entry.
type slowRequest struct {
	ended     time.Time
	took      time.Duration
	method    telemetry.Method
	operation string
	row       *rpcRow
	code      codes.Code
	peer      string
	size      int
	trace     tracing.TraceID // zero: none
	details   details
}

// slowRequestBytes is what an entry takes at most, with its peer.
const slowRequestBytes = 384

func (r *slowRequests) init(c *config.SlowRequests) {
	r.entriesMax, r.bytesMax = c.Entries, int(c.Size)
}

// add keeps a request if it is one of the slowest.
func (r *slowRequests) add(e *slowRequest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.total++
	r.expireLocked(e.ended)
	for len(r.entries) > 0 && r.fullLocked() {
		fastest := 0
		for i := range r.entries {
			if r.entries[i].took < r.entries[fastest].took {
				fastest = i
			}
		}
		if r.entries[fastest].took >= e.took {
			return
		}
		r.entries = slices.Delete(r.entries, fastest, fastest+1)
	}
	if !r.fullLocked() {
		r.entries = append(r.entries, *e)
	}
}

func (r *slowRequests) fullLocked() bool {
	return len(r.entries) >= r.entriesMax || (len(r.entries)+1)*slowRequestBytes > r.bytesMax
}

func (r *slowRequests) expireLocked(now time.Time) {
	r.entries = slices.DeleteFunc(r.entries, func(e slowRequest) bool { return now.Sub(e.ended) > slowRequestAge })
}

// list returns the requests, slowest first, and how many there were since the start.
func (r *slowRequests) list(now time.Time) (all []slowRequest, total uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.expireLocked(now)
	all, total = slices.Clone(r.entries), r.total
	slices.SortStableFunc(all, func(a, b slowRequest) int { return cmp.Compare(b.took, a.took) })
	return all, total
}

func (r *slowRequests) count() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.total
}

// clear removes all entries.
func (r *slowRequests) clear() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.entries = nil
}

// reportSlow keeps a request that took long, and logs it, at most once a minute for each method.
func (s *Server) reportSlow(conn *connection, e *requestEnd, d *details, now time.Duration) {
	r := slowRequest{ended: s.clock.started.Add(now), took: now - e.start, method: e.method, operation: e.operation, row: e.row, code: e.code, size: e.size, trace: e.traceID()}
	if conn != nil {
		r.peer = conn.peer()
	}
	if d != nil {
		r.details = *d
		r.details.note = nil // it may be large, and is of the audit log
		if r.details.executed != 0 {
			r.details.sync += now - r.details.executed
		}
	}
	s.observer.slow.add(&r)
	silent, logs := s.log.count("slow " + r.name())
	if !logs {
		return
	}
	s.log.LogAttrs(context.Background(), slog.LevelWarn, "a request was slow", r.attributes(silent)...)
}

// name is the method, with the operation of a transaction.
func (r *slowRequest) name() string { return requestName(r.method, r.operation, r.row) }

// attributes are those of a log line: where the time went, and nothing that a client has sent.
func (r *slowRequest) attributes(silent uint64) []slog.Attr {
	d := &r.details
	all := []slog.Attr{slog.String("method", r.name()), slog.Duration("took", r.took), slog.String("code", r.code.String()), slog.String("peer", r.peer)}
	for _, part := range []struct {
		name string
		took time.Duration
	}{{"queue", d.queue}, {"latch", d.waits.Latch}, {"memory", d.waits.Memory}, {"pages", d.waits.Pages}, {"sync", d.sync}, {"client", d.client}} {
		if part.took > 0 {
			all = append(all, slog.Duration(part.name, part.took))
		}
	}
	if d.waits.Reads > 0 {
		all = append(all, slog.Uint64("pages_read", d.waits.Reads))
	}
	if d.hasID {
		all = append(all, slog.String("request_id", uuid.UUID(d.id).String()))
	}
	if r.trace.IsValid() {
		all = append(all, slog.String("trace_id", r.trace.String()))
	}
	if silent > 0 {
		all = append(all, slog.Uint64("others_since_last_line", silent))
	}
	return all
}

// SlowRequests implements AdminService.
func (s *adminService) SlowRequests(ctx context.Context, req *pb.SlowRequestsRequest) (*pb.SlowRequestsResponse, error) {
	out := new(pb.SlowRequestsResponse)
	return out, s.serveRead(ctx, telemetry.MethodSlowRequests, func() error {
		slow := &s.observer.slow
		all, total := slow.list(time.Now())
		out.Total, out.Threshold = total, durationpb.New(s.settings.current().SlowRequests.Threshold)
		if n := int(req.GetLimit()); n > 0 && n < len(all) {
			all = all[:n]
		}
		for i := range all {
			out.Requests = append(out.Requests, all[i].message())
		}
		if req.GetClear() {
			slow.clear()
			s.log.Info("an operator clears the slow requests", "entries", len(all))
		}
		return nil
	})
}

func (r *slowRequest) message() *pb.SlowRequest {
	d := &r.details
	m := &pb.SlowRequest{
		Method: r.name(), Ended: timestamppb.New(r.ended), Took: durationpb.New(r.took), Code: r.code.String(), Peer: r.peer, RequestBytes: uint64(r.size),
		Queue: durationpb.New(d.queue), Latch: durationpb.New(d.waits.Latch), Memory: durationpb.New(d.waits.Memory), Sync: durationpb.New(d.sync),
		Pages: durationpb.New(d.waits.Pages), Client: durationpb.New(d.client), PagesRead: d.waits.Reads,
		KeyPrefix: d.key.bytes[:d.key.length:d.key.length],
	}
	if d.hasID {
		m.RequestId = d.id[:]
	}
	if r.trace.IsValid() {
		m.TraceId = r.trace.String()
	}
	return m
}
