package peers

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/bench/harness"
)

const (
	percentOfCore    = "percent of a core"
	keepAliveStreams = 16
	keepAliveRate    = 10_000.0
	granters         = 64
)

// keptAlive measures what keep-alives take of the processor.
func keptAlive() harness.Scenario {
	s := scenario("lease-keepalive", fmt.Sprintf("%.0f keep-alives/s of single leases on %d streams.", keepAliveRate, keepAliveStreams),
		"keep-alives", "", harness.Axis{Name: "servers", Points: []int{1}}, nil, load{})
	s.Size, s.Window, s.Show = 100_000, 2*time.Second, percentOfCore
	k := epochKVKind()
	arguments := k.arguments
	// The probe writes by itself, which would count as bytes of keep-alives.
	k.arguments = func(at place) []string { return append(arguments(at), "--probe-interval", "0s") }
	s.Arms = []harness.Arm{{Name: k.name, Run: func(r *harness.Run) error { return onServer(r, k, watchedRecords, keepAlive) }}}
	s.Figures = []harness.Figure{{Arm: k.name, Measure: percentOfCore, AtMost: 10, Source: "100,000 leases, 10,000 keep-alives/s: at most 10 % of a core"}}
	return s
}

// grantedLeases are the leases 1 to count of a server.
type grantedLeases struct {
	*connections
	count int
}

// Close hangs up. The leases end with their server.
func (g *grantedLeases) Close() error { return g.close() }

func (s *server) grantLeases(ctx context.Context, count int) (*grantedLeases, error) {
	c, err := dialEpochKVConnections(s, 2*streamsPerConnection)
	if err != nil {
		return nil, err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(granters)
	for i := range count {
		group.Go(func() error {
			request := &pb.GrantLeaseRequest{Id: uint64(i + 1), Ttl: durationpb.New(10 * time.Minute), Owner: "bench"}
			_, err := pb.NewLeasesClient(c.of(i)).GrantLease(ctx, request)
			return err
		})
	}
	return &grantedLeases{connections: c, count: count}, group.Wait()
}

func keepAlive(ctx context.Context, r *harness.Run, s *server) error {
	g, err := harness.Shared(r, "leases", func(string) (*grantedLeases, error) { return s.grantLeases(ctx, r.Size) })
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var streams []pb.Leases_KeepAliveClient
	for i := range keepAliveStreams {
		stream, err := pb.NewLeasesClient(g.of(i)).KeepAlive(ctx)
		if err != nil {
			return err
		}
		streams = append(streams, stream)
	}
	r.Quiet()
	counted, err := s.counters(ctx, "kvserver_lease_keepalives_total", "kvserver_log_append_bytes_total")
	if err != nil {
		return err
	}
	var alive, sent atomic.Int64
	err = byServer(r, s)(func() (int, error) {
		latencies, late, err := harness.OpenLoop(keepAliveRate, r.Window, len(streams), func(c int) error {
			id := uint64(sent.Add(1))%uint64(g.count) + 1
			if err := streams[c].Send(&pb.KeepAliveRequest{Ids: []uint64{id}}); err != nil {
				return err
			}
			response, err := streams[c].Recv()
			if len(response.GetLeases()) == 1 && response.Leases[0].GetId() == id && response.Leases[0].GetTtlMs() > 0 {
				alive.Add(1)
			}
			return err
		})
		if err == nil {
			r.Latencies(latencies...)
			r.Lateness(late)
		}
		return int(sent.Load()), err
	})
	if err != nil {
		return err
	}
	r.Count(percentOfCore, 100*r.CPUSeconds()/r.Seconds())
	return proveKeptAlive(ctx, r, s, counted, float64(sent.Load()), int(alive.Load()))
}

func proveKeptAlive(ctx context.Context, r *harness.Run, s *server, before []float64, sent float64, alive int) error {
	after, err := s.counters(ctx, "kvserver_lease_keepalives_total", "kvserver_log_append_bytes_total", "kvserver_leases")
	if err != nil {
		return err
	}
	if err := r.Prove("keep-alives counted", after[0]-before[0], sent, sent); err != nil {
		return err
	}
	if err := r.Prove("log bytes", after[1]-before[1], 0, 0); err != nil {
		return err
	}
	if err := r.Prove("leases", after[2], float64(r.Size), float64(r.Size)); err != nil {
		return err
	}
	return r.Verified(alive, int(sent))
}

// counters reads several of the server's metrics.
func (s *server) counters(ctx context.Context, names ...string) (values []float64, err error) {
	for _, name := range names {
		v, err := metric(ctx, s.place.second, name)
		if err != nil {
			return nil, err
		}
		values = append(values, v)
	}
	return values, nil
}
