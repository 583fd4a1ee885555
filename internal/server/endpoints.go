package server

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/experimental"
	grpchealth "google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/transport"
)

// endpoints is what the server listens and serves with. It is constant after Open.
type endpoints struct {
	grpc     *grpc.Server // nil with the direct transport
	health   *grpchealth.Server
	http     *http.Server // nil without --http
	listener net.Listener
	metrics  net.Listener // nil without --http
	tls      secure
	console  consoleState
	scrapes  turnLine

	httpConns httpConns
	profiles  profiles
}

// Transport settings. The windows are large enough that a stream of small messages does not wait
// for a round trip. They bound the memory that one connection can make the server buffer.
const (
	streamWindowBytes  = 256 << 10
	connWindowBytes    = 4 << 20
	readBufBytes       = 32 << 10         // each connection has one; config counts it
	writeBufBytes      = 64 << 10         // each connection that is sending has one
	keepaliveClientMin = 10 * time.Second // connections of clients that ping more often are closed
	handshakeTimeout   = config.HandshakeTimeout
	// headerBytesMax bounds a request's metadata, which is in memory until the stream ends. gRPC's
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

// keepalive is what grpc-go's transport does with connections that are silent, or old.
func (s *Server) keepalive() keepalive.ServerParameters {
	p, age := keepaliveParams, s.config.TLS.MaxConnectionAge
	if age > 0 { // the library lets ages differ by a tenth either way
		part := age / transport.AgePart
		p.MaxConnectionAge, p.MaxConnectionAgeGrace = age-part, part
	}
	return p
}

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

// answerBytesMax is the largest message to a client: as much as its length can say. What bounds answers is what is read for them. They may have values
// from before the limits were lowered, and two of them.
const answerBytesMax = math.MaxInt32

// messageBytesMax is the largest message to the server: a full batch and what encoding adds to each of its
// operations.
func messageBytesMax(c *config.Config) int {
	const perOperation, fixed = 24, 1 << 20
	return int(c.Limits.BatchSize) + perOperation*c.Limits.BatchOps + fixed
}

// bulkMessageMax is the largest message of a bulk load: any entry, and room for many small ones.
func bulkMessageMax(c *config.Config) int {
	const others = 1 << 20
	return int(c.Limits.ValueSize) + others
}

func (s *Server) newGRPC() {
	if s.config.Transport == config.TransportDirect {
		s.register(s.newDirect())
		return
	}
	options := append(Options(),
		grpc.ForceServerCodecV2(s.codec()),
		experimental.BufferPool(pb.Buffers), // the default pool takes 16 KiB for a frame of 4 KiB and a byte, which counts as what it is
		grpc.Creds(s.connections.credentials(s.endpoints.tls.grpc)),
		grpc.UnaryInterceptor(s.unary),
		grpc.InTapHandle(beginLibraryStream),
		grpc.ReadBufferSize(0), // libraryConn has one
		grpc.MaxRecvMsgSize(messageBytesMax(&s.config)),
		grpc.MaxSendMsgSize(answerBytesMax),
		grpc.MaxConcurrentStreams(uint32(min(s.config.Limits.Streams, s.receiving.streamsOfOne()))),
		grpc.MaxHeaderListSize(headerBytesMax),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.KeepaliveParams(s.keepalive()),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: keepaliveClientMin, PermitWithoutStream: true}),
		grpc.WaitForHandlers(true),
		grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error { return statusOf(errUnimplemented).Err() }),
	)
	s.endpoints.grpc = grpc.NewServer(options...)
	s.register(s.endpoints.grpc)
}

// codec is the codec of all messages of the server.
func (s *Server) codec() boundedCodec {
	return boundedCodec{pb.NewCodec(), &s.limits, &s.admission.decoding}
}

// register adds all services to a transport.
func (s *Server) register(to reflection.GRPCServer) {
	to = s.endpoints.console.methods.also(to)
	s.endpoints.health = grpchealth.NewServer()
	s.registerService(to, pb.KVService_ServiceDesc, &kvService{Server: s})
	s.registerService(to, pb.AdminService_ServiceDesc, &adminService{Server: s})
	s.registerService(to, pb.TransactionService_ServiceDesc, &txnService{Server: s})
	s.registerService(to, pb.LeaseService_ServiceDesc, &leaseService{Server: s})
	s.registerService(to, pb.LockService_ServiceDesc, &lockService{Server: s})
	s.registerService(to, pb.FeedService_ServiceDesc, &feedService{Server: s})
	s.registerService(to, pb.BackupService_ServiceDesc, &backupService{Server: s})
	s.registerService(to, pb.AuthService_ServiceDesc, &authService{Server: s})
	gated := gatedRegistrar{to, s}
	healthpb.RegisterHealthServer(gated, s.endpoints.health)
	reflection.Register(gated)
	s.setHealth(healthpb.HealthCheckResponse_SERVING)
}

func (s *Server) setHealth(status healthpb.HealthCheckResponse_ServingStatus) {
	for _, service := range []string{
		"", pb.KVService_ServiceDesc.ServiceName, pb.AdminService_ServiceDesc.ServiceName, pb.TransactionService_ServiceDesc.ServiceName,
		pb.LeaseService_ServiceDesc.ServiceName, pb.LockService_ServiceDesc.ServiceName,
		pb.FeedService_ServiceDesc.ServiceName, pb.BackupService_ServiceDesc.ServiceName, pb.AuthService_ServiceDesc.ServiceName,
	} {
		s.endpoints.health.SetServingStatus(service, status)
	}
}

func (s *Server) listen() (err error) {
	if s.endpoints.listener, err = s.listenTo(s.config.Listen); err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	if s.config.HTTP == "" {
		return nil
	}
	if s.endpoints.metrics, err = s.listenTo(s.config.HTTP); err != nil {
		return errors.Join(fmt.Errorf("--http: %w", err), s.endpoints.listener.Close())
	}
	return nil
}

func (s *Server) closeListeners() error {
	err := s.endpoints.listener.Close()
	if s.endpoints.metrics != nil {
		err = errors.Join(err, s.endpoints.metrics.Close())
	}
	return err
}

// newHTTP makes the HTTP server of metrics and health, if the configuration has one.
func (s *Server) newHTTP() {
	if s.endpoints.metrics == nil {
		return
	}
	registry := telemetry.NewRegistry(telemetry.Sources{
		Requests: &s.observer.requests, Server: s.stats, Engine: s.store.Stats, Failed: func() bool { return s.store.Err() != nil },
		IO: s.ioStats, Conditions: s.observe,
	})
	s.endpoints.metrics = transport.YieldingListener{Listener: s.endpoints.metrics}
	if s.endpoints.tls.source != nil {
		s.endpoints.metrics = newSecureListener(s.endpoints.metrics, s.endpoints.tls.http)
	}
	s.endpoints.http = newHTTP(s, telemetry.Handler(registry, s.enterScrape), s.log.Logger)
}

// Address is where gRPC is served.
func (s *Server) Address() string { return s.endpoints.listener.Addr().String() }

// HTTPAddress is where metrics are served, or empty.
func (s *Server) HTTPAddress() string {
	if s.endpoints.metrics == nil {
		return ""
	}
	return s.endpoints.metrics.Addr().String()
}

func (s *Server) serveGRPC() error {
	if t := s.direct.transport; t != nil {
		if err := t.Serve(s.endpoints.listener); !errors.Is(err, transport.ErrClosed) {
			return fmt.Errorf("serve %s: %w", s.endpoints.listener.Addr(), err)
		}
		return nil
	}
	if err := s.endpoints.grpc.Serve(s.endpoints.listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) { // stopped before it began: no failure
		return fmt.Errorf("serve %s: %w", s.endpoints.listener.Addr(), err)
	}
	return nil
}
