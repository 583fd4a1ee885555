package server

import (
	"cmp"
	"context"
	"math"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// maxPagesPerSecond keeps a rate within what the engine's arithmetic takes.
const maxPagesPerSecond = 1 << 30

// Verify implements Admin.
func (s *adminService) Verify(req *pb.VerifyRequest, stream grpc.ServerStreamingServer[pb.VerifyResponse]) error {
	return s.serveStream(stream.Context(), telemetry.MethodVerify, func(*connection) error {
		leave, err := s.inspect(stream.Context(), &s.inspections.verifications)
		if err != nil {
			return err
		}
		o := s.openSnapshot(stream.Context(), pb.SnapshotInfo_KIND_VERIFICATION, s.checkpointEpoch(), nil)
		return o.serve(func() error {
			defer leave() // after the last Send, in which it may still be when the handler has returned
			defer o.close()
			return s.verify(o, req, stream)
		})
	})
}

// checkpointEpoch is that of the newest checkpoint.
func (s *Server) checkpointEpoch() keys.Epoch {
	stats := s.store.Stats()
	return stats.Storage.Tree.Epoch
}

func (s *adminService) verify(o *openSnapshot, req *pb.VerifyRequest, stream grpc.ServerStreamingServer[pb.VerifyResponse]) error {
	ctx, mended, stop := s.untilDenied(o.ctx)
	defer stop()
	report, err := s.store.Verify(ctx, inspect.VerifyOptions{
		Owner:          o.peer,
		PagesPerSecond: int(min(req.PagesPerSecond, maxPagesPerSecond)),
		Progress: func(p inspect.VerifyProgress) {
			// A client that is gone or stuck ends the verification through the context.
			o.wait()
			_ = stream.Send(&pb.VerifyResponse{Event: &pb.VerifyResponse_Progress{Progress: &pb.VerifyProgress{
				Pages: p.Pages, PagesTotal: p.PagesTotal, Damages: p.Damages,
			}}})
			_ = o.resume()
		},
	})
	if err != nil {
		return mended(s.drainError(err))
	}
	if !report.OK() {
		first := &report.Damages[0]
		s.log.Error("verification found damage", "damages", report.DamageTotal, "kind", first.Kind, "file", first.File, "offset", first.Offset,
			"reason", first.Reason, "key_lower", keys.Quote(first.KeyLower), "key_upper", keys.Quote(first.KeyUpper))
	}
	return stream.Send(&pb.VerifyResponse{Event: &pb.VerifyResponse_Report{Report: verifyMessage(report)}})
}

// untilDrain is a context that ends with the request and when the server begins to drain, for work
// that may take hours.
func (s *Server) untilDrain(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-s.drain.begun:
			cancel(errShuttingDown)
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}

// drainError is the error of a context that ended: that the server is shutting down, if that is the
// cause.
func (s *Server) drainError(err error) error {
	if s.drain.active.Load() && contextStatus(err) != nil {
		return errShuttingDown
	}
	return err
}

func verifyMessage(r *inspect.VerifyReport) *pb.VerifyReport {
	out := &pb.VerifyReport{
		Epoch: uint64(r.Epoch), Checkpoint: r.Checkpoint, Pages: r.Pages, LeafPages: r.LeafPages, InnerPages: r.InnerPages,
		TreeHeight: uint32(r.Height), Keys: r.Keys, Versions: r.Versions, Values: r.Values, ValueBytes: r.ValueBytes,
		LogRecords: r.LogRecords, LogBytes: r.LogBytes, Accounted: r.Accounted, DamageTotal: r.DamageTotal, Notes: r.Notes,
		Duration: durationpb.New(r.Duration),
	}
	out.Damages = damageMessages(r.Damages)
	return out
}

func damageMessages(damages []inspect.Damage) (out []*pb.Damage) {
	for i := range damages {
		d := &damages[i]
		out = append(out, &pb.Damage{
			Kind: string(d.Kind), File: d.File, Offset: uint64(d.Offset), Page: uint64(d.Page),
			KeyLower: d.KeyLower, KeyUpper: d.KeyUpper, Reason: d.Reason,
		})
	}
	return out
}

// Checkpoint implements Admin.
func (s *adminService) Checkpoint(ctx context.Context, _ *pb.CheckpointRequest) (*pb.CheckpointResponse, error) {
	var out *pb.CheckpointResponse
	err := s.serveAdmin(ctx, telemetry.MethodCheckpoint, func() error {
		start := time.Now()
		if err := s.store.Checkpoint(ctx); err != nil {
			return err
		}
		stats := s.store.Stats()
		out = &pb.CheckpointResponse{Epoch: uint64(stats.Storage.Tree.Epoch), Duration: durationpb.New(time.Since(start))}
		return nil
	})
	return out, err
}

// ResizeCache implements Admin.
func (s *adminService) ResizeCache(ctx context.Context, req *pb.ResizeCacheRequest) (*pb.ResizeCacheResponse, error) {
	var out *pb.ResizeCacheResponse
	err := s.serveAdmin(ctx, telemetry.MethodResizeCache, func() error {
		before, err := s.resizeCache("cache_bytes", int64(min(req.CacheBytes, math.MaxInt64)))
		if err != nil {
			return err
		}
		out = &pb.ResizeCacheResponse{CacheBytes: req.CacheBytes, PreviousBytes: uint64(before)}
		return nil
	})
	return out, err
}

// Space implements Admin.
func (s *adminService) Space(ctx context.Context, req *pb.SpaceRequest) (*pb.SpaceResponse, error) {
	var out *pb.SpaceResponse
	err := s.serveRead(ctx, telemetry.MethodSpace, func() error {
		if req.ByPrefix {
			leave, err := s.inspect(ctx, &s.inspections.walks)
			if err != nil {
				return err
			}
			defer leave()
		}
		stats := s.store.Stats()
		out = spaceMessage(&stats.Storage)
		if !req.ByPrefix {
			return nil
		}
		o := s.openSnapshot(ctx, pb.SnapshotInfo_KIND_SPACE, s.checkpointEpoch(), nil)
		defer o.close()
		ctx, mended, stop := s.untilDenied(o.ctx)
		defer stop()
		r, err := s.store.Space(ctx, inspect.SpaceOptions{
			Depth: int(min(req.Depth, 1<<10)), Delimiter: req.Delimiter, PagesPerSecond: int(min(req.PagesPerSecond, maxPagesPerSecond)),
		})
		if err != nil {
			return o.reason(mended(s.drainError(err)))
		}
		out.Epoch, out.Versions, out.LeafFill, out.Duration = uint64(r.Epoch), r.Versions, r.LeafFill, durationpb.New(r.Duration)
		for i := range r.Prefixes {
			out.Prefixes = append(out.Prefixes, prefixMessage(&r.Prefixes[i]))
		}
		out.OtherPrefixes = prefixMessage(&r.Other)
		out.Unreadable, out.UnreadableTotal = damageMessages(r.Unreadable), r.UnreadableTotal
		return nil
	})
	return out, err
}

func prefixMessage(p *inspect.PrefixSpace) *pb.PrefixSpace {
	return &pb.PrefixSpace{Prefix: p.Prefix, Keys: p.Keys, Bytes: p.Bytes}
}

func spaceMessage(st *storage.Stats) *pb.SpaceResponse {
	p, rows, size := &st.Pages, &st.Blobs, uint64(st.Pages.PageSize)
	return &pb.SpaceResponse{
		Epoch: uint64(st.Tree.Epoch), PageBytes: uint32(size), FileBytes: uint64(p.FileBytes),
		LiveBytes: p.Live * size, PendingBytes: p.Pending * size, FreeBytes: p.Free * size,
		TreeHeight: uint32(st.Tree.Height), Keys: st.Tree.UserKeys, EntryBytes: st.Tree.EntryBytes,
		Pages: kindsMessage(st), Values: rows.Blobs, ValueBytes: rows.Bytes, BlobFill: rows.FillFactor,
	}
}

func kindsMessage(st *storage.Stats) *pb.PageKinds {
	k := st.Kinds()
	return &pb.PageKinds{Tree: k.Tree, Blobs: k.Blob, Overflow: k.Overflow, IndirectionTable: k.IndirectionTable, AllocationMap: k.AllocationMap}
}

// treeMessage is the data file's part of the status.
func treeMessage(e *mvcc.Stats) *pb.Tree {
	st := &e.Storage
	size := uint64(st.PageSize)
	return &pb.Tree{
		Epoch: uint64(st.Tree.Epoch), Height: uint32(st.Tree.Height), Keys: st.Tree.UserKeys, EntryBytes: st.Tree.EntryBytes,
		LiveBytes: st.Pages.Live * size, PendingBytes: st.Pages.Pending * size, FreeBytes: st.Pages.Free * size,
		Pages: kindsMessage(st), BlobFill: st.Blobs.FillFactor,
		Checkpoints: st.Checkpoints.Finished, CheckpointTime: durationpb.New(st.Checkpoints.Time), PagesWritten: st.Pages.PagesWritten,
		BulkLoads: st.BulkLoads.Finished, WriteAmplification: st.WriteAmplification(),
		WriteStalls: st.Backpressure.Stalls, WriteStallTime: durationpb.New(st.Backpressure.StallTime), ThrottleDelayPerKib: durationpb.New(st.Backpressure.DelayPerKiB), DamagedReads: st.Damage.Reads,
		DeadVersionRatio: st.Tree.DeadVersionRatio, VacuumedPages: st.Vacuum.Leaves, VacuumedVersions: st.Vacuum.Versions,
	}
}

// serveRead is serveAdmin for a request that only reads. It may have waited since it was checked, for instance for the turn of its list, and what it
// has read may have come after its right was taken away.
func (s *Server) serveRead(ctx context.Context, method telemetry.Method, body func() error) error {
	return s.serveAdmin(ctx, method, func() error {
		err := body()
		return cmp.Or(s.checkAgain(ctx), err)
	})
}

// serveAdmin surrounds an Admin request: it counts the request and maps its error. It never refuses
// it for overload.
func (s *Server) serveAdmin(ctx context.Context, method telemetry.Method, body func() error) error {
	end := requestEnd{method: method, start: s.clock.now(), origin: origin{ctx: ctx}}
	err := body()
	if err != nil {
		st := s.failed(method, err)
		err, end.code = st.Err(), st.Code()
	}
	s.ended(connectionOf(ctx), &end, accessOf(ctx).details(nil))
	return err
}
