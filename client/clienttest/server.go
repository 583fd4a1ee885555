// Package clienttest runs a small EpochKV server in the process of a test: an ordered map in memory
// with the real wire contract. It is for tests of programs that use the client: it starts in a
// millisecond, stores nothing on disk, and fails on command.
//
// It follows the contract in everything that a client can see with one request at a time, snapshots
// and preconditions included, but it keeps every version forever, has one lock, and limits only
// keys and values.
package clienttest

import (
	"bytes"
	"context"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/durationpb"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

const (
	keyBytesMax   = 2 << 10
	valueBytesMax = 16 << 20
	pageBytes     = 1 << 20
)

// Server is a running fake server.
type Server struct {
	kvpb.UnimplementedKVServiceServer
	kvpb.UnimplementedAdminServiceServer

	// Endpoint is the address at which it listens.
	Endpoint string
	// Health answers the health protocol; tests may set it.
	Health *health.Server

	started time.Time

	mu       sync.Mutex
	epoch    uint64
	versions map[string][]version // oldest first
	faults   []error
	cutScan  int // pages after which scans break; 0: never
	calls    map[string]int
	ids      []string // of the writes, every attempt
	diskFree uint64

	executed    map[string]uint64 // epochs of requests, by their ids
	cutPipeline int               // requests until a pipeline breaks; 0: none does
	kept        []*kvpb.PipelineRequest
}

type version struct {
	epoch   uint64
	deleted bool
	value   []byte
}

// Start runs a server until the test ends.
func Start(t testing.TB) *Server {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{
		Endpoint: listener.Addr().String(),
		Health:   health.NewServer(),
		started:  time.Now(),
		versions: map[string][]version{},
		calls:    map[string]int{},
		executed: map[string]uint64{},
	}
	g := grpc.NewServer(grpc.MaxRecvMsgSize(72<<20), grpc.UnaryInterceptor(s.noteRequestID))
	kvpb.RegisterKVServiceServer(g, s)
	kvpb.RegisterAdminServiceServer(g, s)
	kvpb.RegisterTransactionServiceServer(g, transactions{s: s})
	healthpb.RegisterHealthServer(g, s.Health)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = g.Serve(listener) // ends with Stop, which is not an error
	}()
	t.Cleanup(func() {
		g.Stop()
		<-served
	})
	return s
}

// FailNext makes the next len(errs) requests, of any kind, end with these errors before they are
// executed. A nil error lets a request pass.
func (s *Server) FailNext(errs ...error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = append(s.faults, errs...)
}

// CutScansAfter makes every scan's connection break after so many pages; 0 turns it off.
func (s *Server) CutScansAfter(pages int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cutScan = pages
}

// SetDiskFree sets the free space of the disk that the status reports.
func (s *Server) SetDiskFree(bytes uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.diskFree = bytes
}

// Calls is how often a method was called, by its name in the contract.
func (s *Server) Calls(method string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[method]
}

// RequestIDs are the request ids of all writes so far, every attempt of each.
func (s *Server) RequestIDs() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.ids)
}

func (s *Server) noteRequestID(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if r, ok := req.(interface{ GetRequestId() []byte }); ok {
		s.mu.Lock()
		s.ids = append(s.ids, string(r.GetRequestId()))
		s.mu.Unlock()
	}
	return handler(ctx, req)
}

// enter counts a call and returns the fault with which it ends.
func (s *Server) enter(method string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[method]++
	if len(s.faults) == 0 {
		return nil
	}
	fault := s.faults[0]
	s.faults = s.faults[1:]
	return fault
}

// newestLocked is the version of key that a reader at epoch sees, or nil. Epoch zero is the newest.
func (s *Server) newestLocked(key []byte, epoch uint64) *version {
	versions := s.versions[string(key)]
	for i := len(versions) - 1; i >= 0; i-- {
		if v := &versions[i]; epoch == 0 || v.epoch <= epoch {
			if v.deleted {
				return nil
			}
			return v
		}
	}
	return nil
}

// keysLocked lists what r holds at epoch, in order.
func (s *Server) keysLocked(r *kvpb.KeyRange, epoch uint64) [][]byte {
	var keys [][]byte
	for k := range s.versions {
		if key := []byte(k); inRange(key, r) && s.newestLocked(key, epoch) != nil {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, bytes.Compare)
	return keys
}

func inRange(key []byte, r *kvpb.KeyRange) bool {
	return bytes.HasPrefix(key, r.GetPrefix()) && bytes.Compare(key, r.GetStart()) >= 0 &&
		(len(r.GetEnd()) == 0 || bytes.Compare(key, r.GetEnd()) < 0)
}

func (s *Server) installLocked(key []byte, v version) {
	s.versions[string(key)] = append(s.versions[string(key)], v)
}

func (s *Server) status() *kvpb.StatusResponse {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &kvpb.StatusResponse{
		Build:       &kvpb.Build{Version: "fake", GoVersion: "go", Platform: "test/test"},
		Uptime:      durationpb.New(time.Since(s.started)),
		Health:      &kvpb.Health{State: kvpb.Health_STATE_SERVING},
		Epochs:      &kvpb.Epochs{Visible: s.epoch, Durable: s.epoch, MinVisible: s.epoch},
		Sizes:       &kvpb.Sizes{DataDir: "(memory)", DiskFreeBytes: s.diskFree},
		Generations: []*kvpb.Generation{{Number: 1, Active: true, FirstEpoch: 1, LastEpoch: s.epoch}},
		Sessions:    &kvpb.Sessions{Open: 1},
		Limits:      &kvpb.Limits{KeyBytes: keyBytesMax, ValueBytes: valueBytesMax},
		Recovery:    &kvpb.Recovery{},
	}
}
