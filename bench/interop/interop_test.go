package interop

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // the codec
	"google.golang.org/grpc/interop"
	testpb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	"github.com/epochkv/epochkv/internal/transport"
)

// TestCasesOfGRPC runs the cases of https://github.com/grpc/grpc/blob/master/doc/interop-test-descriptions.md that are about the protocol.
// Those about credentials, load balancing, compression and reports of load are not: the transport has none of them, and answers a
// compressed request with UNIMPLEMENTED. A case that fails ends the process with its message.
func TestCasesOfGRPC(t *testing.T) {
	services := &transport.Services{Codec: encoding.GetCodecV2("proto"), Buffers: mem.DefaultBufferPool(), MessageBytesMax: 8 << 20}
	testpb.RegisterTestServiceServer(services, interop.NewTestServer())
	conn := serve(t, services)
	test := testpb.NewTestServiceClient(conn)
	for name, run := range map[string]func(context.Context){
		"empty_unary":                 func(ctx context.Context) { interop.DoEmptyUnaryCall(ctx, test) },
		"large_unary":                 func(ctx context.Context) { interop.DoLargeUnaryCall(ctx, test) },
		"client_streaming":            func(ctx context.Context) { interop.DoClientStreaming(ctx, test) },
		"server_streaming":            func(ctx context.Context) { interop.DoServerStreaming(ctx, test) },
		"ping_pong":                   func(ctx context.Context) { interop.DoPingPong(ctx, test) },
		"empty_stream":                func(ctx context.Context) { interop.DoEmptyStream(ctx, test) },
		"timeout_on_sleeping_server":  func(ctx context.Context) { interop.DoTimeoutOnSleepingServer(ctx, test) },
		"cancel_after_begin":          func(ctx context.Context) { interop.DoCancelAfterBegin(ctx, test) },
		"cancel_after_first_response": func(ctx context.Context) { interop.DoCancelAfterFirstResponse(ctx, test) },
		"custom_metadata":             func(ctx context.Context) { interop.DoCustomMetadata(ctx, test) },
		"status_code_and_message":     func(ctx context.Context) { interop.DoStatusCodeAndMessage(ctx, test) },
		"special_status_message":      func(ctx context.Context) { interop.DoSpecialStatusMessage(ctx, test) },
		"unimplemented_service": func(ctx context.Context) {
			interop.DoUnimplementedService(ctx, testpb.NewUnimplementedServiceClient(conn))
		},
		"unimplemented_method": func(ctx context.Context) { interop.DoUnimplementedMethod(ctx, conn) },
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			run(ctx)
			if err := ctx.Err(); err != nil {
				t.Error(err)
			}
		})
	}
}

// serve serves on a port of loopback until the end of the test, and returns a connection.
func serve(t *testing.T, services *transport.Services) *grpc.ClientConn {
	t.Helper()
	server := transport.New(transport.Options{
		Streams: 100, StreamWindow: 256 << 10, ConnWindow: 1 << 20, HeaderBytes: 8 << 10, HandshakeTimeout: 5 * time.Second,
		KeepaliveTime: 30 * time.Second, KeepaliveTimeout: 10 * time.Second, PingInterval: 10 * time.Second, HandOverAfter: time.Millisecond,
		ProgressTimeout: 30 * time.Second, AcceptFailed: func(error) {},
	}, service{}, services)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		server.Close()
		if err := <-served; !errors.Is(err, transport.ErrClosed) {
			t.Errorf("Serve returned %v", err)
		}
	})
	return conn
}

// service has no fast methods: generated handlers serve everything.
type service struct{}

func (service) Connect(*transport.Conn) transport.Client { return client{} }

type client struct{}

func (client) Fast(string) int                                        { return 0 }
func (client) Messages(transport.Request) (transport.Messages, error) { return nil, nil } //nolint:nilnil // as the interface says
func (client) Lane() transport.Lane                                   { return lane{} }
func (client) OpenStream(string, string) error                        { return nil }
func (client) CloseStream()                                           {}
func (client) Receive(int) error                                      { return nil }
func (client) Received(int)                                           {}
func (client) Cancelled(transport.Request)                            {}
func (client) HeadersRefused(int)                                     {}
func (client) Overdue() bool                                          { return false }
func (client) Unsent(int)                                             {}
func (client) IsWanted(int) bool                                      { return false }
func (client) LeastProgress(int) int                                  { return 256 << 10 }
func (client) Closed(error)                                           {}
func (client) Status(err error) *status.Status {
	return status.New(codes.Unimplemented, err.Error())
}

type lane struct{}

func (lane) Rest()                             {}
func (lane) Execute(transport.Request, []byte) {}
