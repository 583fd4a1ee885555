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
// context ends, and then drains: health says NOT_SERVING, new requests are refused, pipelines and
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
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpchealth "google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/health"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Server is an open store with its listeners.
type Server struct {
	// Constant after Open.
	config   config.Config
	limits   limits
	log      *slog.Logger
	store    *mvcc.Store
	storeID  uint64        // the first half of the store's random identity, for tokens
	opening  time.Duration // how long recovery took
	clock    clock
	grpc     *grpc.Server
	health   *grpchealth.Server
	http     *http.Server // nil without --http
	listener net.Listener
	metrics  net.Listener    // nil without --http
	shutdown <-chan struct{} // closed to end draining early; nil: only its timeout ends it
	drain    chan struct{}   // closed when draining begins

	conditions healthConditions
	probe      probe

	requests     telemetry.Requests
	connections  connections
	admission    admission
	receiving    receiving
	executors    executorPool
	receivers    sync.WaitGroup // goroutines of streams, which end after their handlers, and of the probe; they end before the store is closed
	transactions txnTable
	snapshots    snapshotTable
	files        *vfs.OS // nil if a test gave another file system
	streams      atomic.Int64
	draining     atomic.Bool
	expired      atomic.Uint64
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
	if err := checkFileLimit(c.Limits.Connections, openFilesMax); err != nil {
		return nil, err
	}
	if err := checkReserve(c.DiskReserve, thisMachine(c.DataDir).disk); err != nil {
		return nil, err
	}
	tuneRuntime(&c, log)
	s := &Server{config: c, log: log, clock: clock{started: time.Now()}, drain: make(chan struct{})}
	if err := s.listen(); err != nil { // first: if an address is in use, no store must be created
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.closeListeners())
		}
	}()
	options := storeOptions(&c, files)
	if files == nil {
		if err := s.openFiles(&c, &options.Storage); err != nil {
			return nil, err
		}
	}
	options.Storage.OnReplay = func(p storage.ReplayProgress) {
		log.Info("replaying the log", "bytes", p.Bytes, "of", p.BytesTotal, "epoch", uint64(p.Epoch), "checkpoints", p.Checkpoints)
	}
	s.limits = options.Limits
	store, err := mvcc.OpenContext(ctx, options)
	if err != nil {
		return nil, errors.Join(err, s.closeFiles())
	}
	s.store, s.opening = store, time.Since(s.clock.started)
	s.connections.max, s.connections.requests, s.connections.admission = int64(c.Limits.Connections), &s.requests, &s.admission
	s.connections.receiving = &s.receiving
	s.receiving.init(int64(c.Inflight()), int64(c.StreamsTotal()), int64(messageBytesMax(&c)))
	s.admission.init(c.Limits.InflightRequests, uint64(c.Inflight()))
	s.executors.store, s.executors.admission = store, &s.admission
	id := store.ID()
	s.storeID = binary.LittleEndian.Uint64(id[:])
	s.conditions.list, s.conditions.counters = health.NewList(log), store.Stats()
	s.transactions.init(&c)
	s.snapshots.timeout, s.snapshots.open = c.SnapshotTimeout, map[uint64]*openSnapshot{}
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
		},
		CheckpointInterval: c.CheckpointInterval, GCInterval: c.GCInterval,
		Durability: durability, SyncInterval: c.SyncInterval, Retention: c.Retention,
		Limits: mvcc.Limits{
			KeyBytes: storage.KeyBytesMax(int(c.PageSize)), ValueBytes: int(c.Limits.ValueSize), BatchBytes: int(c.Limits.BatchSize),
			BatchOps: c.Limits.BatchOps, Sessions: c.Limits.InflightRequests,
		},
	}
}

// isSync reports whether a write with this durability is acknowledged only when it is on stable
// storage.
func (s *Server) isSync(d mvcc.Durability) bool {
	if d == mvcc.DurabilityDefault {
		return s.config.Durability == config.DurabilitySync
	}
	return d == mvcc.DurabilitySync
}

// Transport settings. The windows are large enough that a stream of small messages is never held
// back by one round trip, and bound what one connection can make the server buffer.
const (
	streamWindowBytes  = 256 << 10
	connWindowBytes    = 4 << 20
	readBufBytes       = 32 << 10         // each connection has one; config counts it
	writeBufBytes      = 64 << 10         // each connection that is sending has one
	keepaliveClientMin = 10 * time.Second // connections of clients that ping more often are closed
	handshakeTimeout   = 5 * time.Second
	// headerBytesMax bounds a request's metadata, which its stream holds until it ends. gRPC's
	// default is 16 MiB.
	headerBytesMax = 8 << 10
	// streamWorkers keep their grown stacks from request to request; beyond them gRPC starts a
	// goroutine for each.
	streamWorkers = 64
)

// keepaliveParams: a connection that has been silent for Time gets a ping, and is closed if no
// complete frame arrives within Timeout. So a client that stops in the middle of a frame, or sends
// the rest of it byte by byte, loses its connection after 40 s. Tests shorten it.
var keepaliveParams = keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}

// Options are the gRPC options that decide speed. The benchmark's echo server takes the same.
func Options() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ForceServerCodecV2(pb.NewCodec()),
		grpc.NumStreamWorkers(streamWorkers),
		grpc.StaticStreamWindowSize(streamWindowBytes),
		grpc.StaticConnWindowSize(connWindowBytes),
		grpc.ReadBufferSize(readBufBytes),
		grpc.WriteBufferSize(writeBufBytes),
	}
}

// messageBytesMax is the largest message: a full batch and what encoding adds to each of its
// operations.
func messageBytesMax(c *config.Config) int {
	const perOperation, fixed = 24, 1 << 20
	return int(c.Limits.BatchSize) + perOperation*c.Limits.BatchOps + fixed
}

func (s *Server) newGRPC() {
	options := append(Options(),
		grpc.Creds(s.connections.credentials()),
		grpc.UnaryInterceptor(s.unary),
		grpc.MaxRecvMsgSize(messageBytesMax(&s.config)),
		grpc.MaxSendMsgSize(messageBytesMax(&s.config)),
		grpc.MaxConcurrentStreams(uint32(s.config.Limits.Streams)),
		grpc.MaxHeaderListSize(headerBytesMax),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.KeepaliveParams(keepaliveParams),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: keepaliveClientMin, PermitWithoutStream: true}),
		grpc.WaitForHandlers(true),
		grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error { return statusOf(errUnimplemented).Err() }),
	)
	s.grpc = grpc.NewServer(options...)
	s.health = grpchealth.NewServer()
	s.register(pb.KV_ServiceDesc, &kvService{Server: s})
	s.register(pb.Admin_ServiceDesc, &adminService{Server: s})
	s.register(pb.Transactions_ServiceDesc, &txnService{Server: s})
	healthpb.RegisterHealthServer(s.grpc, s.health)
	reflection.Register(s.grpc)
	s.setHealth(healthpb.HealthCheckResponse_SERVING)
}

func (s *Server) setHealth(status healthpb.HealthCheckResponse_ServingStatus) {
	for _, service := range []string{
		"", pb.KV_ServiceDesc.ServiceName, pb.Admin_ServiceDesc.ServiceName, pb.Transactions_ServiceDesc.ServiceName,
	} {
		s.health.SetServingStatus(service, status)
	}
}

func (s *Server) listen() (err error) {
	if s.listener, err = net.Listen("tcp", s.config.Listen); err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	if s.config.HTTP == "" {
		return nil
	}
	if s.metrics, err = net.Listen("tcp", s.config.HTTP); err != nil {
		return errors.Join(fmt.Errorf("--http: %w", err), s.listener.Close())
	}
	return nil
}

func (s *Server) closeListeners() error {
	err := s.listener.Close()
	if s.metrics != nil {
		err = errors.Join(err, s.metrics.Close())
	}
	return err
}

// newHTTP makes what serves metrics and health, if anything shall.
func (s *Server) newHTTP() {
	if s.metrics == nil {
		return
	}
	registry := telemetry.NewRegistry(telemetry.Sources{
		Requests: &s.requests, Server: s.stats, Engine: s.store.Stats, Failed: func() bool { return s.store.Err() != nil },
		IO: s.ioStats, Conditions: s.observe,
	})
	s.http = newHTTP(s, telemetry.Handler(registry), s.log)
}

// Address is where gRPC is served.
func (s *Server) Address() string { return s.listener.Addr().String() }

// HTTPAddress is where metrics are served, or empty.
func (s *Server) HTTPAddress() string {
	if s.metrics == nil {
		return ""
	}
	return s.metrics.Addr().String()
}

// stats is the RPC layer's part of the metrics.
func (s *Server) stats() telemetry.ServerStats {
	requests, bytes, answers := s.admission.inflight()
	return telemetry.ServerStats{
		Connections:        int(s.connections.open.Load()),
		Streams:            int(s.streams.Load()),
		InflightRequests:   requests,
		InflightBytes:      bytes,
		AnswerBytes:        answers,
		Sessions:           int(s.executors.open.Load()),
		Draining:           s.draining.Load(),
		RefusedConnections: s.connections.refused.Load(),
		RefusedRequests:    s.admission.refused.Load() + s.receiving.refused.Load(),
		ExpiredRequests:    s.expired.Load(),
		SnapshotsEnded:     s.snapshots.stats(),
		Transactions:       s.transactions.stats(),
	}
}

// Run opens a server and serves until ctx ends. It is what the program does.
func Run(ctx context.Context, shutdown <-chan struct{}, c config.Config, log *slog.Logger) error {
	log.Info("starting", "build", telemetry.Build().String(), "config", c)
	s, err := Open(ctx, c, log)
	if err != nil && ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) {
		log.Info("stopped before serving; the next start goes on with the recovery")
		return nil
	}
	if err != nil {
		return err
	}
	s.shutdown = shutdown
	warnAtStart(&c, log)
	r := s.store.Recovery()
	if r.TornFile != "" {
		log.Warn("cut a torn tail that a crash had left", "file", r.TornFile, "offset", r.TornAt, "bytes", r.TornSize)
	}
	for _, what := range r.Repaired {
		log.Error("repaired damage of the data file; nothing is lost, but distrust the device", "repair", what)
	}
	log.Info("serving", "listen", s.Address(), "http", s.HTTPAddress(),
		"recovered_records", r.Records, "epoch", uint64(r.Epoch), "next_epoch", uint64(r.Next), "took", s.opening)
	notifySupervisor(log, daemon.SdNotifyReady)
	return s.Run(ctx)
}

// Run serves until ctx ends or a listener fails, drains, and closes the store. It is called once.
func (s *Server) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	failed := make(chan error, 2)
	var serving sync.WaitGroup
	serving.Go(func() { failed <- s.serveGRPC() })
	if s.http != nil {
		serving.Go(func() { failed <- serveHTTP(s.http, s.metrics) })
	}
	serving.Go(func() { s.watchConditions(ctx) })
	serving.Go(func() { s.connections.watchMessages(ctx, s.config.MessageTimeout) })
	if s.config.ProbeInterval > 0 {
		s.receivers.Go(func() { s.runProbe(ctx) })
	}
	if s.snapshots.timeout > 0 {
		serving.Go(func() { s.watchSnapshots(ctx) })
	}
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

func (s *Server) serveGRPC() error {
	if err := s.grpc.Serve(s.listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) { // stopped before it began: no failure
		return fmt.Errorf("serve %s: %w", s.listener.Addr(), err)
	}
	return nil
}

// shutDown drains: first it is said, then it is done. Requests that do not end in time are cut off,
// and so is the store if its device does not answer: it takes at most the drain timeout, the close
// timeout, and a second.
func (s *Server) shutDown() error {
	s.log.Info("draining", "timeout", s.config.DrainTimeout, "close_timeout", s.config.CloseTimeout)
	notifySupervisor(s.log, daemon.SdNotifyStopping)
	s.health.Shutdown()
	s.draining.Store(true)
	s.store.StopThrottling()
	close(s.drain)
	err := s.closeStore(s.drainRequests())
	if s.http != nil { // last, so that metrics and health can be read while the server drains
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if s.http.Shutdown(ctx) != nil {
			err = errors.Join(err, s.http.Close())
		}
	}
	s.log.Info("stopped")
	return err
}

// drainRequests returns when no request is left, or those that are have been cut off. They may not
// notice while they wait for the device: the channel is closed when the last one has ended.
func (s *Server) drainRequests() <-chan struct{} {
	drained := make(chan struct{})
	go func() {
		s.grpc.GracefulStop()
		close(drained)
	}()
	cut := ""
	select {
	case <-drained:
	case <-time.After(s.config.DrainTimeout):
		cut = "the drain timeout passed"
	case <-s.shutdown:
		cut = "a second signal"
	}
	if cut != "" {
		s.log.Warn("cutting off what still runs", "cause", cut)
		go s.grpc.Stop()
	}
	return drained
}

// closeStore closes the store once the last request has ended, or gives up after the close timeout:
// *mvcc.StuckError. What does not return then goes on until the process ends.
func (s *Server) closeStore(drained <-chan struct{}) error {
	ctx, cancel := context.WithTimeout(context.Background(), s.config.CloseTimeout)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		<-drained
		s.receivers.Wait()
		s.executors.close()
		err := s.store.Shutdown(ctx)
		if stuck := (*mvcc.StuckError)(nil); !errors.As(err, &stuck) {
			err = errors.Join(err, s.closeFiles())
		}
		ended <- err
	}()
	var err error
	select {
	case err = <-ended:
	case <-ctx.Done():
		err = s.store.Stuck()
	}
	if stuck := (*mvcc.StuckError)(nil); errors.As(err, &stuck) {
		s.log.Error("the device does not answer; ending without closing the store", "waiting_for", stuck.Step,
			"durable_epoch", uint64(stuck.Durable), "visible_epoch", uint64(stuck.Visible))
	}
	return err
}

// longLived reports whether a client may leave a stream of the method open after a message.
func longLived(method telemetry.Method) bool {
	return method == telemetry.MethodPipeline || method == telemetry.MethodTransact || method == telemetry.MethodBulkLoad
}

// serveStream surrounds every stream as unary does every request.
func (s *Server) serveStream(ctx context.Context, method telemetry.Method, body func(*connection) error) error {
	start, conn := s.clock.now(), connectionOf(ctx)
	s.streams.Add(1)
	defer s.streams.Add(-1)
	var scan *openScan
	if method == telemetry.MethodScan {
		scan = conn.beginScan(ctx)
	}
	var err error
	if method != telemetry.MethodVerify {
		err = s.refusesStream(ctx)
	}
	if err == nil && longLived(method) {
		err = grpc.SendHeader(ctx, nil) // tells the follower that messages may be followed by others
	}
	if err == nil {
		err = body(conn)
	}
	code := codes.OK
	if err != nil {
		st := statusOf(err)
		err, code = st.Err(), st.Code()
	}
	// A reader that has enough has no other way to say so. After the connection has closed as well,
	// gRPC calls it unavailable.
	if method == telemetry.MethodScan && conn.endScan(scan) && (code == codes.Canceled || code == codes.Unavailable) {
		code = codes.OK
	}
	conn.shard.Observe(method, code, s.clock.now()-start)
	return err
}
