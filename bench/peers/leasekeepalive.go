package peers

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/client"
)

const (
	percentOfCore    = "percent of a core"
	keepAliveStreams = 16
	keepAliveRate    = 10_000.0
	granters         = 64
	// clientKeepsEvery is the part of the time to live after which the client keeps its leases alive.
	clientKeepsEvery = 3
)

// keptAlive measures what keep-alives take of the processor: those of the Go client, which has many leases in a message, and as
// many messages of one lease each.
func keptAlive() harness.Scenario {
	s := scenario("lease-keepalive", fmt.Sprintf("%.0f keep-alives/s: those of the Go client for all leases, and messages of single leases on %d streams.",
		keepAliveRate, keepAliveStreams), "keep-alives", "", harness.Axis{Name: "servers", Points: []int{1}}, nil, load{})
	s.Size, s.Window, s.Show = 100_000, 2*time.Second, percentOfCore
	s.Arms = []harness.Arm{keepAliveArm("client", keptByClient), keepAliveArm("one id a message", keepAlive)}
	for _, arm := range s.Arms {
		s.Figures = append(s.Figures, harness.Figure{
			Arm: arm.Name, Measure: percentOfCore, AtMost: 10, Source: "100,000 leases, 10,000 keep-alives/s: at most 10 % of a core",
		})
	}
	return s
}

// keepAliveArm has a server of its own: what one arm leaves on it would keep the other's busy.
func keepAliveArm(name string, measure func(context.Context, *harness.Run, *server) error) harness.Arm {
	k := epochKVKind()
	k.name += " " + name
	arguments := k.arguments
	// The probe writes by itself, which would count as bytes of keep-alives.
	k.arguments = func(at place) []string { return append(arguments(at), "--probe-interval", "0s") }
	return harness.Arm{Name: name, Run: func(r *harness.Run) error { return onServer(r, k, measure) }}
}

// keptByClient grants leases with the client, which keeps them alive by itself, at the rate that their time to live makes.
func keptByClient(ctx context.Context, r *harness.Run, s *server) (err error) {
	ttl := max(time.Duration(clientKeepsEvery*float64(r.Size)/keepAliveRate)*time.Second, time.Second)
	window := max(r.Window, ttl/clientKeepsEvery) // every lease is kept alive in it
	leases, err := s.clientLeases(ctx, r.Size, ttl)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, endLeases(ctx, leases)) }()
	r.Quiet()
	counted, err := s.counters(ctx, "kvserver_lease_keepalives_total", "kvserver_log_append_bytes_total")
	if err != nil {
		return err
	}
	var after []float64
	err = byServer(r, s)(func() (int, error) {
		if err := sleep(ctx, window); err != nil {
			return 0, err
		}
		if after, err = s.counters(ctx, "kvserver_lease_keepalives_total", "kvserver_log_append_bytes_total", "kvserver_leases"); err != nil {
			return 0, err
		}
		return int(after[0] - counted[0]), nil
	})
	if err != nil {
		return err
	}
	r.Count(percentOfCore, 100*r.CPUSeconds()/r.Seconds())
	// The client sends keep-alives up to a tenth of the time to live early.
	due := math.Floor(float64(clientKeepsEvery*window)/float64(ttl)) * float64(r.Size)
	if err := r.Prove("keep-alives counted", after[0]-counted[0], due, 2*due+float64(r.Size)); err != nil {
		return err
	}
	if err := r.Prove("log bytes", after[1]-counted[1], 0, ownLogBytesMax); err != nil {
		return err
	}
	if err := r.Prove("leases", after[2], float64(r.Size), float64(r.Size)); err != nil {
		return err
	}
	return r.Verified(len(leases)-lost(leases), len(leases))
}

func (s *server) clientLeases(ctx context.Context, count int, ttl time.Duration) ([]*client.Lease, error) {
	leases := make([]*client.Lease, count)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(granters)
	for i := range count {
		group.Go(func() (err error) {
			leases[i], err = s.client().GrantLease(ctx, ttl, "bench")
			return err
		})
	}
	return leases, group.Wait()
}

func endLeases(ctx context.Context, leases []*client.Lease) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(granters)
	for _, l := range leases {
		group.Go(func() error { return l.Close(ctx) })
	}
	return group.Wait()
}

func lost(leases []*client.Lease) (n int) {
	for _, l := range leases {
		select {
		case <-l.Lost():
			n++
		default:
		}
	}
	return n
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
			_, err := pb.NewLeaseServiceClient(c.of(i)).GrantLease(ctx, request)
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
	var streams []pb.LeaseService_KeepAliveClient
	for i := range keepAliveStreams {
		stream, err := pb.NewLeaseServiceClient(g.of(i)).KeepAlive(ctx)
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

// ownLogBytesMax is more than the store itself writes to the log in a run: the cut-off of request ids, once a minute.
const ownLogBytesMax = 256

func proveKeptAlive(ctx context.Context, r *harness.Run, s *server, before []float64, sent float64, alive int) error {
	after, err := s.counters(ctx, "kvserver_lease_keepalives_total", "kvserver_log_append_bytes_total", "kvserver_leases")
	if err != nil {
		return err
	}
	if err := r.Prove("keep-alives counted", after[0]-before[0], sent, sent); err != nil {
		return err
	}
	if err := r.Prove("log bytes", after[1]-before[1], 0, ownLogBytesMax); err != nil {
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
