package server

import (
	"context"
	"runtime"
	"time"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/wal"
)

// adminService implements AdminService. Its requests are never refused for overload, because
// operators need them then.
type adminService struct {
	pb.UnimplementedAdminServiceServer
	*Server
}

// Status implements Admin.
func (s *adminService) Status(ctx context.Context, _ *pb.StatusRequest) (*pb.StatusResponse, error) {
	start := s.clock.now()
	e := s.store.Stats()
	out := &pb.StatusResponse{
		Build:       buildMessage(),
		StartTime:   timestamppb.New(s.clock.started),
		Uptime:      durationpb.New(time.Since(s.clock.started)),
		Health:      s.healthMessage(),
		Epochs:      &pb.Epochs{Visible: uint64(e.Visible), Durable: uint64(e.Durable), MinVisible: uint64(e.MinVisible)},
		Sizes:       sizesMessage(&e),
		Generations: generationMessages(&e),
		Sessions:    s.sessionsMessage(&e),
		Limits:      s.limitsMessage(&e),
		Recovery:    s.recoveryMessage(),
		Tree:        treeMessage(&e),
		History:     s.historyMessage(),
		LogHolders:  logHolderMessages(e.Storage.Log.Holders),
		Activity:    s.activityMessage(&e),
	}
	err := s.checkAgain(ctx) // it may have waited for room in the audit log
	if err != nil {
		out, err = nil, statusOf(err).Err()
	}
	s.ended(connectionOf(ctx), &requestEnd{method: telemetry.MethodStatus, code: status.Code(err), start: start, origin: origin{ctx: ctx}}, accessOf(ctx).details(nil))
	return out, err
}

func (s *Server) activityMessage(e *mvcc.Stats) *pb.Activity {
	out := s.activityWithoutMethods(e)
	for _, m := range telemetry.Methods() {
		if t := s.observer.requests.Totals(m); t.Count > 0 {
			out.Methods = append(out.Methods, &pb.MethodTotals{Method: m.String(), Count: t.Count, Failed: t.Failed, Latency: t.Latency[:]})
		}
	}
	return out
}

func (s *Server) activityWithoutMethods(e *mvcc.Stats) *pb.Activity {
	st, feed := &e.Storage, s.feed.stats(s.store.Clock().Now())
	return &pb.Activity{
		Commits: e.Commits, Syncs: st.Log.Syncs, LogBytes: st.Log.Bytes, CacheHits: st.Cache.Hits, CacheMisses: st.Cache.Misses,
		Transactions: uint64(s.transactions.stats().Open), Watches: uint64(feed.Live + feed.Lagging + feed.Difference),
	}
}

func logHolderMessages(holders []wal.HolderInfo) (out []*pb.LogHolder) {
	for i := range holders {
		h := &holders[i]
		m := &pb.LogHolder{Name: h.Name, Owner: h.Owner, Epoch: uint64(h.From), Bytes: uint64(h.Bytes), BytesMax: uint64(h.BytesMax), Yields: h.Yields}
		if !h.Deadline.IsZero() {
			m.ExpiresIn = durationpb.New(max(0, time.Until(h.Deadline)))
		}
		out = append(out, m)
	}
	return out
}

func (s *Server) historyMessage() *pb.History {
	h := s.store.History()
	out := &pb.History{FeatureLevel: uint32(s.store.FeatureLevel()), FeatureLevelNewest: uint32(keys.FeatureLevelNewest), Term: uint64(h.Term)}
	if h.Lineage != (keys.Lineage{}) {
		out.Lineage = h.Lineage[:]
	}
	if !h.CommitTime.IsZero() {
		out.CommitTime = timestamppb.New(h.CommitTime)
	}
	return out
}

// GetConfig implements Admin.
func (s *adminService) GetConfig(ctx context.Context, _ *pb.GetConfigRequest) (*pb.GetConfigResponse, error) {
	out := new(pb.GetConfigResponse)
	for _, o := range s.settings.current().Options() {
		out.Options = append(out.Options, &pb.ConfigOption{Name: o.Name, Value: o.Value, Origin: o.Origin})
	}
	if err := s.checkAgain(ctx); err != nil { // it may have waited for room in the audit log
		return nil, statusOf(err).Err()
	}
	return out, nil
}

// FinalizeUpgrade implements Admin.
func (s *adminService) FinalizeUpgrade(ctx context.Context, _ *pb.FinalizeUpgradeRequest) (*pb.FinalizeUpgradeResponse, error) {
	var out *pb.FinalizeUpgradeResponse
	err := s.serveAdmin(ctx, telemetry.MethodFinalizeUpgrade, func() error {
		before, err := s.store.FinalizeUpgrade(ctx)
		if err != nil {
			return err
		}
		out = &pb.FinalizeUpgradeResponse{FeatureLevel: uint32(s.store.FeatureLevel()), PreviousLevel: uint32(before)}
		if out.FeatureLevel != out.PreviousLevel {
			s.log.Info("upgrade finalized", "feature_level", out.FeatureLevel, "before", out.PreviousLevel)
		}
		return nil
	})
	return out, err
}

// Clock implements Admin.
func (s *adminService) Clock(ctx context.Context, r *pb.ClockRequest) (*pb.ClockResponse, error) {
	out := new(pb.ClockResponse)
	err := s.serveAdmin(ctx, telemetry.MethodClock, func() error {
		c := s.store.Clock()
		if r.GetAccept() {
			advanced, err := c.Accept()
			if err != nil {
				return err
			}
			out.AdvancedUs = uint64(advanced.Microseconds())
			s.log.Info("clock accepted", "advanced", advanced)
		}
		out.TimeUs, out.DifferenceUs = c.Now(), c.Difference().Microseconds()
		return nil
	})
	return out, err
}

func buildMessage() *pb.Build {
	b := telemetry.Build()
	return &pb.Build{Version: b.Version, Revision: b.Revision, GoVersion: b.Go, Platform: runtime.GOOS + "/" + runtime.GOARCH}
}

func sizesMessage(e *mvcc.Stats) *pb.Sizes {
	st := &e.Storage
	return &pb.Sizes{
		DataDir:           st.Dir,
		PageBytes:         uint32(st.PageSize),
		MemoryBudgetBytes: uint64(st.Memory.Budget),
		MemoryUsedBytes:   uint64(st.Memory.CacheUsed + st.Memory.Memtables + st.Log.BufferBytes),
		CacheBytes:        uint64(st.Memory.Cache),
		CacheUsedBytes:    uint64(st.Memory.CacheUsed),
		MemtableBytes:     uint64(st.Memory.Memtables),
		LogBufferBytes:    uint64(st.Log.BufferBytes),
		LogBytes:          uint64(st.Log.SegmentBytes),
		LogSegments:       uint64(st.Log.Segments),
		DataFileBytes:     uint64(st.Pages.FileBytes),
		DiskFreeBytes:     uint64(max(st.Disk.Free, 0)),
		ResidentBytes:     residentBytes(),
	}
}

func generationMessages(e *mvcc.Stats) []*pb.Generation {
	out := make([]*pb.Generation, 0, len(e.Storage.Generations))
	for _, g := range e.Storage.Generations {
		out = append(out, &pb.Generation{
			Number: g.Segment, Active: g.Active, FirstEpoch: uint64(g.First), LastEpoch: uint64(g.Last), MemtableBytes: uint64(g.MemtableBytes),
			LogBytes: uint64(g.LogBytes),
		})
	}
	return out
}

func (s *Server) sessionsMessage(e *mvcc.Stats) *pb.Sessions {
	requests, bytes, _ := s.admission.inflight()
	return &pb.Sessions{
		Open:              uint64(s.connections.open.Load()),
		Streams:           uint64(s.counters.streams.Load()),
		RequestsInFlight:  uint64(requests),
		BytesInFlight:     uint64(bytes),
		Snapshots:         uint64(e.Snapshots.Snapshots),
		OldestSnapshotAge: durationpb.New(e.Snapshots.OldestAge),
		SnapshotLeases:    uint64(e.Snapshots.Leases),
	}
}

func (s *Server) limitsMessage(e *mvcc.Stats) *pb.Limits {
	c := &s.config.Limits
	return &pb.Limits{
		KeyBytes:             uint64(s.limits.KeyBytes),
		ValueBytes:           uint64(s.limits.ValueBytes),
		BatchBytes:           uint64(s.limits.BatchBytes),
		BatchOperations:      uint64(s.limits.BatchOps),
		MessageBytes:         uint64(messageBytesMax(&s.config)),
		Connections:          uint64(c.Connections),
		StreamsPerConnection: uint64(c.Streams),
		RequestsInFlight:     uint64(c.InflightRequests),
		BytesInFlight:        uint64(s.config.Inflight()),
		ScanPageBytesDefault: scanPageBytesDefault,
		ScanPageBytesMax:     scanPageBytesMax,
		SnapshotLeaseTtl:     durationpb.New(s.config.SnapshotLeaseTTL),
		SnapshotLeases:       uint64(e.Limits.SnapshotLeases),

		Transactions:           uint64(s.transactions.countMax),
		TransactionIdleTimeout: durationpb.New(s.transactions.idle),
		TransactionTimeout:     durationpb.New(s.transactions.total),
		TransactionBytes:       uint64(s.transactions.memory.sizeMax),
		SnapshotTimeout:        durationpb.New(s.snapshots.timeout),
	}
}

func (s *Server) recoveryMessage() *pb.Recovery {
	r := s.store.Recovery()
	return &pb.Recovery{
		Records: r.Records, Bytes: r.Bytes, Epoch: uint64(r.Epoch), NextEpoch: uint64(r.Next), Duration: durationpb.New(s.clock.opening),
		TornFile: r.TornFile, TornOffset: uint64(r.TornAt), TornBytes: uint64(r.TornSize),
		Repaired: r.Repaired,
	}
}
