package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// errNoSuchSnapshot is the answer to an operator that ends a snapshot that does not exist.
var errNoSuchSnapshot = errors.New("no snapshot has this id")

// snapshotEndedError is the error of a request whose snapshot was ended from outside.
type snapshotEndedError struct {
	epoch, oldest keys.Epoch
	cause         telemetry.SnapshotEnd
	timeout       time.Duration
}

func (e *snapshotEndedError) Error() string {
	if e.cause == telemetry.SnapshotTimeout {
		return fmt.Sprintf("the snapshot at epoch %d was ended: it waited %v for its client", e.epoch, e.timeout)
	}
	return fmt.Sprintf("the snapshot at epoch %d was ended by an operator", e.epoch)
}

// snapshotTable has the requests whose snapshots remain open for as long as their clients decide.
// An operator can see and end them, and a timeout ends those of stuck clients. Interactive
// transactions have a table of their own, and the engine has the leases of resume tokens. All ids
// come from one sequence.
type snapshotTable struct {
	backups backupState // they pin a durable state; with a lock of its own

	timeout time.Duration // constant: how long a snapshot or a bulk load may wait for its client; 0: for ever

	ended [telemetry.SnapshotEnds]atomic.Uint64

	mu   sync.Mutex // a leaf
	open map[uint64]*openSnapshot
}

// openSnapshot is an entry of the table.
//
//	request                                       operator, timer
//	work ─► wait ─► Send ─► resume ─► work ...    lock: set why, release if the request waits, cancel its context
//
// Invariant: the request uses its session only between resume and wait. Other goroutines use it
// only between wait and resume, through release, with mu locked.
type openSnapshot struct {
	// Constant while it is in the table.
	server  *Server
	id      uint64
	kind    pb.SnapshotInfo_Kind
	epoch   keys.Epoch
	peer    string
	begun   time.Time
	expires bool            // subject to the timeout
	ctx     context.Context // ends with the request, and with the snapshot
	cancel  context.CancelCauseFunc
	release func()        // closes the snapshot while its request waits; nil if the request does that when its context ends
	yields  func() bool   // while its request waits: reports whether that ends for others, and prepares it. Set before it waits; nil: never
	ended   chan struct{} // closed once why is set

	mu      sync.Mutex // before the table's
	waiting bool
	since   time.Duration // of the server's clock: when waiting began
	why     error         // the reason, if it was ended from outside
	closed  bool          // its request is over
}

// openSnapshot enters a snapshot into the table. Its request ends it with close.
func (s *Server) openSnapshot(ctx context.Context, kind pb.SnapshotInfo_Kind, epoch keys.Epoch, release func()) *openSnapshot {
	o := &openSnapshot{
		server: s, id: s.store.NextSnapshotID(), kind: kind, epoch: epoch, begun: time.Now(), release: release, ended: make(chan struct{}),
	}
	switch kind {
	case pb.SnapshotInfo_KIND_SCAN, pb.SnapshotInfo_KIND_WATCH, pb.SnapshotInfo_KIND_VERIFICATION, pb.SnapshotInfo_KIND_BULK_LOAD:
		o.expires = true
	}
	if p, ok := peer.FromContext(ctx); ok {
		o.peer = p.Addr.String()
	}
	o.ctx, o.cancel = context.WithCancelCause(ctx)
	t := &s.snapshots
	t.mu.Lock()
	defer t.mu.Unlock()
	t.open[o.id] = o
	return o
}

// wait records that the request now waits for its client and does not use its session.
func (o *openSnapshot) wait() {
	o.mu.Lock()
	o.waiting, o.since = true, o.server.clock.now()
	o.mu.Unlock()
}

// resume ends the time that wait began. The error means that the snapshot was ended.
func (o *openSnapshot) resume() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.waiting = false
	return o.why
}

// close removes the snapshot from the table when its request is over. It reports whether the
// snapshot had not been ended before.
func (o *openSnapshot) close() bool {
	o.mu.Lock()
	o.closed = true
	kept := o.why == nil
	o.mu.Unlock()
	o.server.snapshots.leave(o)
	o.cancel(nil)
	return kept
}

// reason is the error to return for a request that failed with err: why the snapshot was ended, if
// it was ended from outside, and err otherwise.
func (o *openSnapshot) reason(err error) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if err != nil && o.why != nil {
		return o.why
	}
	return err
}

// serve runs body in a goroutine of its own and returns when body has, or when the snapshot is
// ended. The handler of a stream returns then: nothing else unblocks a body that is in Send because
// its client does not read.
func (o *openSnapshot) serve(body func() error) error {
	done := make(chan error, 1)
	o.server.drain.receivers.Go(func() { done <- body() })
	select {
	case err := <-done:
		return o.reason(err)
	case <-o.ended:
		return o.why // it does not change any more
	}
}

// end ends the snapshot from outside. It reports false if the snapshot has ended already.
func (o *openSnapshot) end(cause telemetry.SnapshotEnd) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.endCountedLocked(cause)
}

// expire ends the snapshot if its request has waited for the client too long.
func (o *openSnapshot) expire(now time.Duration) bool {
	timeout := o.server.snapshots.timeout
	o.mu.Lock()
	defer o.mu.Unlock()
	return timeout > 0 && o.expires && o.waiting && now-o.since >= timeout && o.endCountedLocked(telemetry.SnapshotTimeout)
}

// yield ends the request, if it waits for its client while others need what it has.
func (o *openSnapshot) yield() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.waiting && !o.closed && o.why == nil && o.yields != nil && o.yields() {
		o.endLocked(errOverloaded)
	}
}

// endCountedLocked ends the snapshot from outside, for a cause that is counted. It reports false if the snapshot has ended already.
func (o *openSnapshot) endCountedLocked(cause telemetry.SnapshotEnd) bool {
	if o.closed || o.why != nil {
		return false
	}
	t := &o.server.snapshots
	o.endLocked(&snapshotEndedError{epoch: o.epoch, oldest: o.server.store.LowWatermark(), cause: cause, timeout: t.timeout})
	t.ended[cause].Add(1)
	return true
}

// endLocked ends the snapshot of a request that goes on.
func (o *openSnapshot) endLocked(why error) {
	o.why = why
	if o.waiting && o.release != nil {
		o.release()
	}
	o.server.snapshots.leave(o)
	o.cancel(why)
	close(o.ended)
}

func (t *snapshotTable) leave(o *openSnapshot) {
	t.mu.Lock()
	delete(t.open, o.id)
	t.mu.Unlock()
}

func (t *snapshotTable) find(id uint64) *openSnapshot {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.open[id]
}

func (t *snapshotTable) list() []*openSnapshot {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make([]*openSnapshot, 0, len(t.open))
	for _, o := range t.open {
		all = append(all, o)
	}
	return all
}

// watchSnapshots ends the snapshots of clients that are stuck, and scans that must yield, until ctx ends.
func (s *Server) watchSnapshots(ctx context.Context) {
	// The interval limits the error of both times to a twentieth of them, and to five seconds.
	shorter := s.admission.slotTime / slotParts
	if s.snapshots.timeout > 0 {
		shorter = min(shorter, s.snapshots.timeout)
	}
	tick := time.NewTicker(min(max(shorter/20, time.Millisecond), 5*time.Second))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.expireSnapshots(s.clock.now())
		}
	}
}

func (s *Server) expireSnapshots(now time.Duration) {
	for _, o := range s.snapshots.list() {
		o.yield()
		if o.expire(now) {
			s.log.Warn("a snapshot is ended because its client takes nothing", "id", o.id, "kind", o.kind.Name(), "epoch", uint64(o.epoch),
				"peer", o.peer, "age", time.Since(o.begun), "snapshot_timeout", s.snapshots.timeout)
		}
	}
}

// ListSnapshots implements Admin.
func (s *adminService) ListSnapshots(ctx context.Context, _ *pb.ListSnapshotsRequest) (*pb.ListSnapshotsResponse, error) {
	out := new(pb.ListSnapshotsResponse)
	for _, o := range s.snapshots.list() {
		info := &pb.SnapshotInfo{Id: o.id, Kind: o.kind, Epoch: uint64(o.epoch), Age: durationpb.New(time.Since(o.begun)), Peer: o.peer}
		o.mu.Lock()
		if o.waiting {
			info.Idle = durationpb.New(max(0, s.clock.now()-o.since))
		}
		o.mu.Unlock()
		out.Snapshots = append(out.Snapshots, info)
	}
	for _, t := range s.transactions.list() {
		info := &pb.SnapshotInfo{
			Id: t.id, Kind: pb.SnapshotInfo_KIND_TRANSACTION, Epoch: uint64(t.at), Age: durationpb.New(time.Since(t.begun)), Peer: t.peer,
		}
		if !t.busy.Load() {
			info.Idle = durationpb.New(max(0, s.clock.now()-time.Duration(t.idleSince.Load())))
		}
		out.Snapshots = append(out.Snapshots, info)
	}
	now := time.Now()
	for _, h := range s.store.SnapshotLeases() {
		out.Snapshots = append(out.Snapshots, &pb.SnapshotInfo{
			Id: h.ID, Kind: pb.SnapshotInfo_KIND_RESUME_TOKEN, Epoch: uint64(h.Epoch), Age: durationpb.New(now.Sub(h.Since)),
			ExpiresIn: durationpb.New(max(0, h.Until.Sub(now))),
		})
	}
	if err := s.checkAgain(ctx); err != nil { // it may have waited for its turn
		return nil, statusOf(err).Err()
	}
	slices.SortFunc(out.Snapshots, func(x, y *pb.SnapshotInfo) int {
		return cmp.Or(cmp.Compare(x.Epoch, y.Epoch), cmp.Compare(x.Id, y.Id))
	})
	return out, nil
}

// EndSnapshot implements Admin.
func (s *adminService) EndSnapshot(_ context.Context, req *pb.EndSnapshotRequest) (*pb.EndSnapshotResponse, error) {
	if o := s.snapshots.find(req.Id); o != nil && o.end(telemetry.SnapshotOperator) {
		s.log.Info("an operator ends a snapshot", "id", o.id, "kind", o.kind.Name(), "epoch", uint64(o.epoch), "peer", o.peer,
			"age", time.Since(o.begun))
		return new(pb.EndSnapshotResponse), nil
	}
	if t := s.transactions.find(req.Id); t != nil {
		s.snapshots.ended[telemetry.SnapshotOperator].Add(1)
		s.endTransaction(t)
		return new(pb.EndSnapshotResponse), nil
	}
	if h, ok := s.store.EndSnapshotLease(req.Id); ok {
		s.snapshots.ended[telemetry.SnapshotOperator].Add(1)
		s.log.Info("an operator ends a snapshot", "id", h.ID, "kind", pb.SnapshotInfo_KIND_RESUME_TOKEN.Name(), "epoch", uint64(h.Epoch),
			"age", time.Since(h.Since))
		return new(pb.EndSnapshotResponse), nil
	}
	return nil, statusOf(errNoSuchSnapshot).Err()
}

// stats counts the snapshots that were ended from outside.
func (t *snapshotTable) stats() (ended [telemetry.SnapshotEnds]uint64) {
	for i := range t.ended {
		ended[i] = t.ended[i].Load()
	}
	return ended
}
