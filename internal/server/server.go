// Package server is the RPC layer: it turns messages into calls of the engine and errors into
// statuses, and bounds every resource that a client can ask for.
//
//	connection ─► limits ─► admission ─► executor (engine session, buffers) ─► execute ─► ackWait ─► answer
//	              how many   in flight    pooled                              engine     durable?
//
// Terms. A connection is counted and has its share of the request counters. A request is admitted
// while the limits of requests and bytes in flight allow it, and refused at once otherwise; its
// deadline is checked before work begins. An executor executes one request at a time. The
// acknowledgement wait of an answer ends when a crash can no longer take back anything that the
// answer reveals or acknowledges: only then is it sent. An epoch is a commit sequence number.
//
// Invariants: no answer is sent before its acknowledgement wait has ended; every error leaves
// through statusOf, with one ErrorInfo; every request gives back its executor and its admission at
// its end; nothing here waits without a bound or a context.
//
// Starting and stopping: Open binds the addresses and recovers the store; Run serves until its
// context ends, and then drains: health says NOT_SERVING, clients are told to open no more streams, pipelines and
// scans end at their next answer, running requests have until the drain timeout, and the store is
// closed last.
//
// The package decides nothing about data. Package mvcc decides what a request means.
package server

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/epochkv/epochkv/internal/auth/users"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/health"
	"github.com/epochkv/epochkv/internal/lease"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/restore"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Server is an open store with its listeners.
type Server struct {
	// Constant after Open.
	configuration
	limits  limits
	log     operatorLog
	store   *mvcc.Store
	leases  *lease.Manager
	storeID uint64 // the first half of the store's random identity, for tokens
	clock   clock
	files   *vfs.OS // nil if a test gave another file system

	endpoints endpoints
	direct    directServer
	drain     drain

	conditions healthConditions

	observer    observer
	counters    counters
	connections connections
	admission   admission
	receiving   receiving
	feed        feedState
	gate        gate
	openTables
}

// configuration is that of the start, which is constant, and the options as they are now.
type configuration struct {
	config   config.Config
	settings settings
}

// openTables are the tables of what clients keep open.
type openTables struct {
	transactions txnTable
	snapshots    snapshotTable
	lists        lists
	inspections  inspections
	reflections  atomic.Int64
}

// counters are the counts that no other part of the server has.
type counters struct {
	streams atomic.Int64  // open ones
	expired atomic.Uint64 // requests whose deadline had passed before they began
}

// limits are the engine's.
type limits = mvcc.Limits

// Open binds the addresses and recovers the store in the configured directory, until ctx ends.
// Nothing is served before Run: clients that connect earlier wait.
func Open(ctx context.Context, c config.Config, log *slog.Logger) (*Server, error) {
	return open(ctx, c, log, nil)
}

// open takes a file system for tests; nil is the operating system's.
func open(ctx context.Context, c config.Config, log *slog.Logger, files vfs.FS) (_ *Server, err error) {
	openFilesMax, err := raiseFileLimit()
	if err != nil {
		return nil, err
	}
	if err := checkFileLimit(&c, openFilesMax); err != nil {
		return nil, err
	}
	if err := checkReserve(c.DiskReserve, thisMachine(c.DataDir).disk); err != nil {
		return nil, err
	}
	if err := restore.CheckFinished(c.DataDir); err != nil {
		return nil, err
	}
	tuneRuntime(&c, log)
	s := &Server{configuration: configuration{config: c}, clock: clock{started: time.Now()}}
	s.drain.init()
	s.observer.init(&c.SlowRequests)
	s.observer.debug.Store(log.Enabled(ctx, slog.LevelDebug))
	s.settings.init(c)
	s.gate.init()
	s.log.init(log, s.clock.now)
	if err := s.openTLS(); err != nil {
		return nil, err
	}
	if err := s.openTraces(&c.Traces); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.closeTraces()
		}
	}()
	if err := s.listen(); err != nil { // first: if an address is in use, no store must be created
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.closeListeners(), s.observer.audit.close())
		}
	}()
	if err := s.openAudit(); err != nil {
		return nil, err
	}
	if err := s.checkBound(); err != nil {
		return nil, err
	}
	options := storeOptions(&c, files)
	if files == nil {
		if err := s.openFiles(&c, &options.Storage); err != nil {
			return nil, err
		}
	}
	options.Storage.OnReplay = func(p storage.ReplayProgress) {
		log.Info("replaying the log", "bytes", p.Bytes, "of", p.BytesTotal, "epoch", uint64(p.Epoch), "checkpoints", p.Checkpoints)
	}
	options.Storage.OnRebuild = func(r storage.Rebuild) { logRebuild(log, &r) }
	s.limits = options.Limits
	store, err := mvcc.OpenContext(ctx, options)
	if err != nil {
		return nil, errors.Join(err, s.closeFiles())
	}
	s.store, s.clock.opening = store, time.Since(s.clock.started)
	if s.leases, err = lease.Open(ctx, store, leaseOptions(&c)); err != nil {
		return nil, errors.Join(err, store.Close(), s.closeFiles())
	}
	if s.gate.users, err = users.Open(ctx, store, s.userOptions()); err != nil {
		return nil, errors.Join(err, store.Close(), s.closeFiles())
	}
	s.gate.authenticateWith(s.gate.users)
	if err := s.checkUsers(); err != nil {
		return nil, errors.Join(err, store.Close(), s.closeFiles())
	}
	s.connections.max, s.connections.requests, s.connections.admission = int64(c.Limits.Connections), &s.observer.requests, &s.admission
	s.connections.receiving = &s.receiving
	s.receiving.init(int64(c.Inflight()), int64(c.StreamsTotal()), int64(messageBytesMax(&c)))
	s.admission.decoding.init(int64(c.Inflight()))
	s.admission.init(c.Limits.InflightRequests, uint64(c.Inflight()))
	s.admission.slotTime = slotParts * c.MessageTimeout
	s.lists.init()
	s.inspections.verifications.init(inspectionsMax)
	s.inspections.walks.init(inspectionsMax)
	s.endpoints.profiles.init()
	s.endpoints.console.turns.init(0)
	s.endpoints.scrapes.init(0)
	id := store.ID()
	s.storeID = binary.LittleEndian.Uint64(id[:])
	s.conditions.list, s.conditions.counters = health.NewList(log), store.Stats()
	s.transactions.init(&c)
	s.snapshots.backups.targets.init()
	s.snapshots.timeout, s.snapshots.open = c.SnapshotTimeout, map[uint64]*openSnapshot{}
	s.feed.init(store, &c)
	s.snapshots.backups.since = time.Now()
	if s.feed.archive, err = openArchive(&c, store, &s.snapshots.backups.automatic); err != nil {
		return nil, errors.Join(err, store.Close(), s.closeFiles())
	}
	s.newGRPC()
	s.newHTTP()
	return s, nil
}

// openFiles opens the operating system's file system in the configured way.
func (s *Server) openFiles(c *config.Config, o *storage.Options) error {
	way, err := vfs.ParseIO(string(c.IO))
	if err != nil {
		return err
	}
	if s.files, err = vfs.OpenOS(way); err != nil {
		return fmt.Errorf("--io %s: %w", c.IO, err)
	}
	o.FS = s.files
	if c.DirectIO {
		o.DataFS = s.files.Direct()
	}
	return nil
}

func (s *Server) ioStats() vfs.Stats {
	if s.files == nil {
		return vfs.Stats{}
	}
	return s.files.Stats()
}

func (s *Server) closeFiles() error {
	if s.files == nil {
		return nil
	}
	return s.files.Close()
}

func storeOptions(c *config.Config, files vfs.FS) mvcc.Options {
	durability := mvcc.DurabilitySync
	if c.Durability == config.DurabilityAsync {
		durability = mvcc.DurabilityAsync
	}
	return mvcc.Options{
		Storage: storage.Options{
			Dir: c.DataDir, FS: files, PageSize: int(c.PageSize), MemoryBytes: int64(c.Memory),
			CacheBytes: int64(c.CacheSize), MemtableBytes: int64(c.MemtableSize), SegmentBytes: int64(c.SegmentSize),
			DiskReserve:       cmp.Or(int64(c.DiskReserve), storage.DiskReserveDerived),
			CheckpointWorkers: c.CheckpointWorkers,
			ChangeLog:         storage.ChangeLog{Age: c.Feed.Retention, Bytes: int64(c.Feed.LogSize), Archive: archiveHold(c)},
		},
		CheckpointInterval: c.CheckpointInterval, GCInterval: c.GCInterval,
		Durability: durability, SyncInterval: c.SyncInterval, Retention: c.Retention,
		RetentionBytes: int64(c.RetentionSize),
		RequestWindow:  c.RequestIDWindow, RequestBytes: int64(c.RequestIDSize),
		Owner: ownerOf,
		Limits: mvcc.Limits{
			KeyBytes: storage.KeyBytesMax(int(c.PageSize)), ValueBytes: int(c.Limits.ValueSize), BatchBytes: int(c.Limits.BatchSize),
			BatchOps: c.Limits.BatchOps, InvokeBytes: int(c.InvokeBytes()), Sessions: sessionsMax(&c.Limits), SessionsBeside: leaseSessionsMax(c.Limits.InflightRequests),
		},
	}
}

// ownerOf is what a request is of, for the turns of its commits. Tests change it.
var ownerOf = func(ctx context.Context) mvcc.Owner {
	return mvcc.Owner{Client: networkOf(ctx), Connection: connectionOf(ctx)}
}

func leaseOptions(c *config.Config) lease.Options {
	const stepBytesMax = 16 << 20
	owner := ownerOf
	return lease.Options{
		Leases: c.Limits.Leases, Waiters: c.Limits.LockWaiters, Client: func(ctx context.Context) string { return owner(ctx).Client },
		StepBytes: min(stepBytesMax, int(c.Limits.BatchSize)), StepKeys: min(lease.StepKeysMax, c.Limits.BatchOps),
	}
}

// isSync reports whether a write with this durability is acknowledged only after it is on stable
// storage.
func (s *Server) isSync(d mvcc.Durability) bool {
	if d == mvcc.DurabilityDefault {
		return s.config.Durability == config.DurabilitySync
	}
	return d == mvcc.DurabilitySync
}

// stats is the RPC layer's part of the metrics.
func (s *Server) stats() telemetry.ServerStats {
	requests, bytes, answers := s.admission.inflight()
	_, sessions := s.store.Sessions()
	return telemetry.ServerStats{
		Connections:      int(s.connections.open.Load()),
		Streams:          int(s.counters.streams.Load()),
		InflightRequests: requests,
		InflightBytes:    bytes,
		AnswerBytes:      answers,
		Sessions:         sessions,
		Draining:         s.drain.active.Load(),
		Deduplicated:     s.admission.deduplicated.Load(),
		RequestCutoff:    s.store.RequestCutoff(),
		Refusals: telemetry.RefusalStats{
			Violations:  s.connections.violationStats(),
			Connections: s.connections.refused.Load(),
			Requests:    s.admission.refused.Load() + s.receiving.refused.Load(),
			Expired:     s.counters.expired.Load(),
		},
		SnapshotsEnded: s.snapshots.stats(),
		Transactions:   s.transactions.stats(),
		Leases:         telemetry.LeaseStats(s.leases.Stats()),
		Feed:           s.feed.stats(s.store.Clock().Now()),
		TLS:            s.endpoints.tls.stats(s.endpoints.http != nil),
		Backups:        s.snapshots.backups.stats(s.store, s.config.Archive.URL != "" || s.config.BackupMaxAge > 0, s.config.Archive.Drill > 0),
		Archive:        s.feed.archiveStats(time.Now()),
		ObserverStats:  telemetry.ObserverStats{SlowRequests: s.observer.slow.count(), Audit: s.observer.audit.stats(), Traces: telemetry.TraceStats(s.observer.traces.Stats())},
	}
}

// Signals are what an operator tells a running server, besides to end.
type Signals struct {
	Shutdown <-chan struct{} // closed to end draining early
	Reload   <-chan struct{} // asks for a reload of certificates and configuration
	Level    *slog.LevelVar  // of the log; nil if it cannot be changed
}

// Run opens a server and serves until ctx ends. The program calls nothing else.
func Run(ctx context.Context, signals Signals, c config.Config, log *slog.Logger) error {
	log.Info("starting", "build", telemetry.Build().String(), "config", c)
	s, err := openUntil(ctx, signals.Shutdown, c.CloseTimeout, func() (*Server, error) { return Open(ctx, c, log) })
	if err != nil && ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) {
		log.Info("stopped before serving; the next start goes on with the recovery")
		return nil
	}
	if err != nil {
		return err
	}
	s.drain.cutOff, s.drain.reload, s.settings.level = signals.Shutdown, signals.Reload, signals.Level
	s.warnAtStart()
	r := s.store.Recovery()
	if r.TornFile != "" {
		log.Warn("cut a torn tail that a crash had left", "file", r.TornFile, "offset", r.TornAt, "bytes", r.TornSize)
	}
	if r.SegmentBytes != 0 {
		log.Warn("the disk has no room for log segments of the configured size: this run goes on with those of an earlier one; restart the server when the disk has space", "segment_bytes", r.SegmentBytes)
	}
	for _, what := range r.Repaired {
		log.Error("repaired damage of the data file; nothing is lost, but distrust the device", "repair", what)
	}
	for _, what := range r.Incomplete {
		log.Error("the device failed reads while damage of the data file was repaired: large values that were not found answer DATA_LOSS and are kept; check the device, then restart the server, which repairs again", "repair", what)
	}
	s.announceBootstrap(log)
	log.Info("serving", "listen", s.Address(), "http", s.HTTPAddress(),
		"recovered_records", r.Records, "epoch", uint64(r.Epoch), "next_epoch", uint64(r.Next), "took", s.clock.opening)
	notifySupervisor(log, daemon.SdNotifyReady)
	return s.Run(ctx)
}

// openUntil opens a server. Opening ends with ctx, unless a call of the device does not return: then openUntil returns after a timeout, or when it is
// cut off, and leaves the call to the end of the process.
func openUntil(ctx context.Context, cutOff <-chan struct{}, timeout time.Duration, open func() (*Server, error)) (*Server, error) {
	type result struct {
		server *Server
		err    error
	}
	opened := make(chan result, 1)
	go func() {
		s, err := open()
		opened <- result{s, err}
	}()
	select {
	case r := <-opened:
		return r.server, r.err
	case <-ctx.Done():
	}
	select {
	case r := <-opened:
		return r.server, r.err
	case <-cutOff:
	case <-time.After(timeout):
	}
	return nil, errStuckOpening
}

var errStuckOpening = errors.New("the start does not end: a call of the device of --data-dir has not returned")

// Run serves until ctx ends or a listener fails, drains, and closes the store. It is called once.
func (s *Server) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	failed := make(chan error, 2)
	var serving sync.WaitGroup
	serving.Go(func() { failed <- s.serveGRPC() })
	if s.endpoints.http != nil {
		serving.Go(func() { failed <- serveHTTP(s.endpoints.http, s.endpoints.metrics) })
		if l, ok := s.endpoints.metrics.(*secureListener); ok {
			serving.Go(l.run)
		}
		if s.endpoints.console.samples != nil {
			serving.Go(func() { s.endpoints.console.samples.Run(ctx) })
		}
	}
	serving.Go(func() { s.watchConditions(ctx) })
	serving.Go(func() { s.followHeap(ctx) })
	serving.Go(func() { s.watchTLS(ctx) })
	serving.Go(func() { s.connections.watchMessages(ctx, s.config.MessageTimeout, &s.log) })
	serving.Go(func() { s.direct.streams.trimAll(ctx) })
	if s.config.ProbeInterval > 0 {
		s.drain.background.Go(func() { s.runProbe(ctx) })
	}
	s.drain.background.Go(func() { s.leases.Run(ctx) })
	s.drain.background.Go(func() { s.gate.users.Run(s.drain.requests) })
	s.startArchive()
	s.drain.background.Go(func() { s.runAutomaticBackups(ctx) })
	s.drain.background.Go(func() { s.runDrills(ctx) })
	serving.Go(func() { s.watchSnapshots(ctx) })
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	stop()
	closed := s.shutDown()
	if stuck := (*mvcc.StuckError)(nil); !errors.As(closed, &stuck) { // else a handler may never end
		serving.Wait()
	}
	return errors.Join(err, closed)
}

// longLived reports whether a client may leave a stream of the method open after a message.
func longLived(method telemetry.Method) bool {
	return method == telemetry.MethodPipeline || method == telemetry.MethodTransact || method == telemetry.MethodBulkLoad ||
		method == telemetry.MethodKeepAlive || method == telemetry.MethodWatch
}

// serveStream surrounds every stream, as unary surrounds every unary request.
func (s *Server) serveStream(ctx context.Context, method telemetry.Method, body func(*connection) error) error {
	return s.serveStreamFrom(ctx, method, origin{ctx: ctx}, body)
}

// serveStreamFrom is serveStream for a stream whose origin is known.
func (s *Server) serveStreamFrom(ctx context.Context, method telemetry.Method, from origin, body func(*connection) error) error {
	start, conn := s.clock.now(), connectionOf(ctx)
	s.counters.streams.Add(1)
	defer s.counters.streams.Add(-1)
	var scan *openScan
	if method == telemetry.MethodScan {
		scan = conn.beginScan(ctx)
	}
	var err error
	if longLived(method) {
		err = grpc.SendHeader(ctx, nil) // tells the follower that messages may be followed by others
	}
	end := requestEnd{method: method, start: start, origin: from}
	var d *details
	if err == nil {
		d, err = end.detailsOf(body(conn))
	}
	code := codes.OK
	if err != nil {
		st := s.failed(method, err)
		err, code = st.Err(), st.Code()
	}
	// A client that wants no more entries has no other way to say so than to cancel. If the
	// connection has closed as well, gRPC returns UNAVAILABLE.
	if method == telemetry.MethodScan && conn.endScan(scan) && (code == codes.Canceled || code == codes.Unavailable) {
		code = codes.OK
	}
	if method == telemetry.MethodWatch && code == codes.Canceled { // the same
		code = codes.OK
	}
	end.code = code
	s.ended(conn, &end, accessOf(ctx).details(d))
	return err
}
