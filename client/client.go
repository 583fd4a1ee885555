package client

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

const (
	// timeoutDefault bounds a call whose context has no deadline: long enough for a write that
	// waits for a checkpoint.
	timeoutDefault = 10 * time.Second
	// maxMessageDefault admits the largest batch that a server accepts (64 MiB) with its framing.
	maxMessageDefault = 72 << 20
)

// reconnect begins sooner than gRPC's default of a second, because a restarted server is back in
// less time and every call between two attempts fails at once. Its longest pause is shorter, too,
// so that a client does not wait two minutes for a server that is already back.
var reconnect = grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 3 * time.Second},
	MinConnectTimeout: 5 * time.Second,
}

// alive pings a silent server while calls wait for it. Scans and pipelines have no deadline of
// their own, and without pings a network that drops packets would block them forever. Servers close
// connections that ping more often than every 10 s.
var alive = keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}

// Epoch is a commit sequence number. Zero means none, or the newest.
type Epoch uint64

// Client is a connection to a server. Its methods may be called from many goroutines.
type Client struct {
	// Constant after Dial.
	conn         *grpc.ClientConn
	kv           kvpb.KVServiceClient
	admin        kvpb.AdminServiceClient
	transactions kvpb.TransactionServiceClient
	backups      kvpb.BackupServiceClient
	feed         kvpb.FeedServiceClient
	leases       kvpb.LeaseServiceClient
	locks        kvpb.LockServiceClient
	auth         kvpb.AuthServiceClient
	health       healthpb.HealthClient
	timeout      time.Duration
	retry        Retry
	exposed      bool // the connection is in plain text, and leaves this machine: it takes no secrets

	keepers    keepers
	background background

	clockAhead atomic.Int64 // of the server's, in milliseconds: how far the times of request ids are turned back
}

// Option changes how Dial sets up a client.
type Option func(*dialOptions)

type dialOptions struct {
	tls        *tls.Config
	files      *TLSFiles
	plain      bool
	token      *tokenSource
	timeout    time.Duration
	maxMessage int
	retry      Retry
	unary      []grpc.UnaryClientInterceptor
	streams    []grpc.StreamClientInterceptor
}

// WithInterceptors surrounds each attempt of a call, and each stream, such as with package client/tracing. The interceptors of
// several options are called in their order.
func WithInterceptors(unary grpc.UnaryClientInterceptor, stream grpc.StreamClientInterceptor) Option {
	return func(o *dialOptions) { o.unary, o.streams = append(o.unary, unary), append(o.streams, stream) }
}

// WithTimeout bounds calls whose context has no deadline; the default is 10 s. Only their context
// bounds scans and pipelines, which may take long.
func WithTimeout(d time.Duration) Option { return func(o *dialOptions) { o.timeout = d } }

// WithMaxMessage bounds the size of one message in either direction; the default is 72 MiB.
func WithMaxMessage(bytes int) Option { return func(o *dialOptions) { o.maxMessage = bytes } }

// WithRetry changes how calls are repeated.
func WithRetry(r Retry) Option { return func(o *dialOptions) { o.retry = r } }

// Dial prepares a client for the server at endpoint ("host:port", or "unix:///path"). It does not
// wait for the connection: the first call connects, and later calls reconnect when the connection
// was lost. Without an option for it, the connection uses TLS unless the endpoint is on this machine.
func Dial(endpoint string, options ...Option) (*Client, error) {
	o := dialOptions{timeout: timeoutDefault, maxMessage: maxMessageDefault, retry: retryDefault}
	for _, option := range options {
		option(&o)
	}
	transport, err := o.credentials(endpoint)
	if err != nil {
		return nil, err
	}
	plain := transport.Info().SecurityProtocol == "insecure"
	if plain && isLocal(endpoint) {
		transport = newLocalCredentials()
	}
	dial, err := o.dialToken(plain, endpoint)
	if err != nil {
		return nil, err
	}
	// gRPC's own retries are off: which writes may be repeated is decided in one place, retry.go.
	conn, err := grpc.NewClient(endpoint, append(dial,
		grpc.WithTransportCredentials(transport),
		grpc.WithConnectParams(reconnect),
		grpc.WithKeepaliveParams(alive),
		grpc.WithDisableRetry(),
		grpc.WithChainUnaryInterceptor(o.unary...),
		grpc.WithChainStreamInterceptor(o.streams...),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(o.maxMessage), grpc.MaxCallSendMsgSize(o.maxMessage), grpc.ForceCodecV2(kvpb.NewCodec()),
		),
	)...)
	if err != nil {
		return nil, fmt.Errorf("client: endpoint %q: %w", endpoint, err)
	}
	return &Client{
		conn:         conn,
		kv:           kvpb.NewKVServiceClient(conn),
		admin:        kvpb.NewAdminServiceClient(conn),
		transactions: kvpb.NewTransactionServiceClient(conn),
		backups:      kvpb.NewBackupServiceClient(conn),
		feed:         kvpb.NewFeedServiceClient(conn),
		leases:       kvpb.NewLeaseServiceClient(conn),
		locks:        kvpb.NewLockServiceClient(conn),
		auth:         kvpb.NewAuthServiceClient(conn),
		health:       healthpb.NewHealthClient(conn),
		timeout:      o.timeout,
		retry:        o.retry,
		exposed:      plain && !isLocal(endpoint),
	}, nil
}

// Close ends the connection, and with it what the client does in the background, for which it waits up to five seconds. Calls
// in progress fail. Leases are not kept alive any more: they count as lost, and the server ends them when their time to live
// has passed.
func (c *Client) Close() error {
	c.background.end()
	return errors.Join(c.conn.Close(), c.background.wait(closeWait))
}

// Status returns the state of the server.
func (c *Client) Status(ctx context.Context) (*kvpb.StatusResponse, error) {
	return call(ctx, c, safe, c.admin.Status, &kvpb.StatusRequest{})
}

// Healthy asks the server whether it serves requests, with the standard health protocol. The call
// is not repeated, because its result is about this moment.
func (c *Client) Healthy(ctx context.Context) (bool, error) {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	answer, err := c.health.Check(ctx, &healthpb.HealthCheckRequest{})
	if err != nil {
		return false, newError(err)
	}
	return answer.GetStatus() == healthpb.HealthCheckResponse_SERVING, nil
}

// bound gives ctx the client's timeout unless it has a deadline.
func (c *Client) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok || c.timeout <= 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, c.timeout)
}
