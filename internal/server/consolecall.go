package server

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/epochkv/epochkv/internal/console"
)

// consoleCallTime bounds a call of the console.
const consoleCallTime = 20 * time.Second

// consoleAnswerMax bounds the messages of the answer to a call that streams.
const consoleAnswerMax = 8 << 20

// inProcess are the registered methods, for callers within the server. Their requests pass the same interceptor and the same
// handlers as others.
type inProcess struct {
	reflection.GRPCServer
	handlers map[string]inProcessMethod // by service and method, with a slash between
}

// inProcessMethod has one of the two.
type inProcessMethod struct {
	service any
	unary   func(srv any, ctx context.Context, receive func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error)
	stream  grpc.StreamHandler
}

// also is a registrar that registers with to, and here.
func (p *inProcess) also(to reflection.GRPCServer) reflection.GRPCServer {
	p.GRPCServer, p.handlers = to, map[string]inProcessMethod{}
	return p
}

// RegisterService implements grpc.ServiceRegistrar.
func (p *inProcess) RegisterService(desc *grpc.ServiceDesc, service any) {
	p.GRPCServer.RegisterService(desc, service)
	for _, m := range desc.Methods {
		p.handlers[desc.ServiceName+"/"+m.MethodName] = inProcessMethod{service: service, unary: m.Handler}
	}
	for _, m := range desc.Streams {
		p.handlers[desc.ServiceName+"/"+m.StreamName] = inProcessMethod{service: service, stream: m.Handler}
	}
}

// callForConsole calls a method on behalf of the caller of an HTTP request.
func (s *Server) callForConsole(r *http.Request, method string, message []byte) ([]byte, error) {
	m, known := s.endpoints.console.methods.handlers[method]
	request, answer, err := messagesOf(method)
	if !known || err != nil {
		return nil, &console.CallError{Status: http.StatusNotFound, Code: codes.Unimplemented.String(), Message: "this server has no " + method}
	}
	ctx, done, ok := s.drain.console.begin(r.Context())
	if !ok {
		return nil, callError(statusOf(errShuttingDown))
	}
	defer done()
	conn := s.connections.admit(httpPeer(r))
	if conn == nil {
		return nil, callError(statusOf(errTooManyConns))
	}
	conn.tls = r.TLS
	untilTaken, waits := r.Context().Value(browserKey{}).(*[]keptAnswer)
	kept := false
	defer func() {
		if !kept {
			s.connections.release(conn)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, consoleCallTime)
	defer cancel()
	ctx = peer.NewContext(ctx, &peer.Peer{Addr: httpPeer(r), AuthInfo: conn})
	if h := console.Authorization(r); h != "" {
		ctx = metadata.NewIncomingContext(ctx, metadata.Pairs("authorization", h))
	}
	call := &inProcessCall{server: s, ctx: ctx, method: "/" + method, answer: answer, json: []byte(`{"messages":[`)}
	call.ctx = grpc.NewContextWithServerTransportStream(ctx, trailers{call})
	if err := call.decode(message, request); err != nil {
		return nil, err
	}
	text, err := call.execute(m)
	if err != nil {
		return nil, errOfCall(err)
	}
	if kept = waits; kept {
		*untilTaken = append(*untilTaken, keptAnswer{conn, call.held})
	}
	return text, nil
}

// browserKey is where the context of an HTTP request has the answers that are made for it.
type browserKey struct{}

// keptAnswer is an answer that counts, for the connection of its call, until it is released. A charge to which nothing refers is released by the collector.
type keptAnswer struct {
	conn *connection
	held *memoryCharge
}

func (a *keptAnswer) release(s *Server) {
	a.held.release()
	s.connections.release(a.conn)
}

// untilTaken lets the answers that are made for a request count until the browser has taken them. It has --message-timeout for it after the longest
// request and the longest call.
func (s *Server) untilTaken(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var kept []keptAnswer
		defer func() {
			for i := range kept {
				kept[i].release(s)
			}
		}()
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(httpReadTime + consoleCallTime + s.config.MessageTimeout)) // tests have none
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), browserKey{}, &kept)))
	})
}

// execute returns the answer in JSON.
func (c *inProcessCall) execute(m inProcessMethod) ([]byte, error) {
	if m.stream != nil {
		err := m.stream(m.service, c)
		return append(c.json, "]}"...), err
	}
	out, err := m.unary(m.service, c.ctx, c.RecvMsg, c.server.unary)
	if err != nil {
		return nil, err
	}
	text, err := c.marshal(out)
	if err == nil {
		err = c.count(len(text))
	}
	return text, err
}

// count counts the answer in JSON.
func (c *inProcessCall) count(bytes int) (err error) {
	if c.held, err = c.server.admission.grow(c.held, connectionOf(c.ctx), bytes); err != nil {
		return statusOf(err).Err()
	}
	return nil
}

// messagesOf makes an empty request and an empty answer of a method.
func messagesOf(method string) (request, answer proto.Message, err error) {
	service, name, _ := strings.Cut(method, "/")
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service))
	if err != nil {
		return nil, nil, err
	}
	desc, ok := d.(protoreflect.ServiceDescriptor)
	if !ok {
		return nil, nil, protoregistry.NotFound
	}
	m := desc.Methods().ByName(protoreflect.Name(name))
	if m == nil {
		return nil, nil, protoregistry.NotFound
	}
	if request, err = newMessage(m.Input()); err == nil {
		answer, err = newMessage(m.Output())
	}
	return request, answer, err
}

func newMessage(d protoreflect.MessageDescriptor) (proto.Message, error) {
	t, err := protoregistry.GlobalTypes.FindMessageByName(d.FullName())
	if err != nil {
		return nil, err
	}
	return t.New().Interface(), nil
}

// httpPeer is the address of an HTTP client. It is never nil.
func httpPeer(r *http.Request) net.Addr {
	address, _ := netip.ParseAddrPort(r.RemoteAddr) // net/http made it of one
	return net.TCPAddrFromAddrPort(address)
}

// inProcessCall is a call of one request. It implements grpc.ServerStream, of which it collects what is sent in JSON, and
// grpc.ServerTransportStream.
type inProcessCall struct {
	server  *Server
	ctx     context.Context
	method  string
	request []byte // encoded; nil once it was received
	answer  proto.Message
	json    []byte
	held    *memoryCharge // of the answer in JSON
	sent    int
}

var errAnswerTooLarge = status.Error(codes.ResourceExhausted, "the answer is larger than the console shows; ask for less, or use kvctl")

// RecvMsg implements grpc.ServerStream.
func (c *inProcessCall) RecvMsg(m any) error {
	return c.server.codec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(c.request)}, m)
}

// SendMsg implements grpc.ServerStream.
func (c *inProcessCall) SendMsg(m any) error {
	text, err := c.marshal(m)
	if err != nil {
		return err
	}
	if len(c.json)+len(text) > consoleAnswerMax {
		return errAnswerTooLarge
	}
	if err := c.count(len(c.json) + len(text)); err != nil {
		return err
	}
	if c.sent++; c.sent > 1 {
		c.json = append(c.json, ',')
	}
	c.json = append(c.json, text...)
	return nil
}

// Context implements grpc.ServerStream.
func (c *inProcessCall) Context() context.Context { return c.ctx }

// Method implements grpc.ServerTransportStream.
func (c *inProcessCall) Method() string { return c.method }

// SetHeader implements grpc.ServerStream and grpc.ServerTransportStream; the console shows no metadata.
func (*inProcessCall) SetHeader(metadata.MD) error { return nil }

// SendHeader implements grpc.ServerStream and grpc.ServerTransportStream.
func (*inProcessCall) SendHeader(metadata.MD) error { return nil }

// SetTrailer implements grpc.ServerStream.
func (*inProcessCall) SetTrailer(metadata.MD) {}

// trailers makes an inProcessCall a grpc.ServerTransportStream, whose SetTrailer has a result.
type trailers struct{ *inProcessCall }

// SetTrailer implements grpc.ServerTransportStream.
func (trailers) SetTrailer(metadata.MD) error { return nil }

func errOfCall(err error) error {
	if err == nil {
		return nil
	}
	st, ok := status.FromError(err)
	if !ok {
		return err
	}
	return callError(st)
}

// callError maps a status to an answer of HTTP.
func callError(st *status.Status) *console.CallError {
	e := &console.CallError{Status: http.StatusBadRequest, Code: st.Code().String(), Message: st.Message()}
	for _, d := range st.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			e.Reason = info.Reason
		}
	}
	switch st.Code() { //nolint:exhaustive // all others are the caller's
	case codes.Unauthenticated:
		e.Status = http.StatusUnauthorized
	case codes.PermissionDenied:
		e.Status = http.StatusForbidden
	case codes.NotFound:
		e.Status = http.StatusNotFound
	case codes.ResourceExhausted:
		e.Status = http.StatusTooManyRequests
	case codes.Unavailable:
		e.Status = http.StatusServiceUnavailable
	case codes.DeadlineExceeded:
		e.Status = http.StatusGatewayTimeout
	case codes.Internal, codes.Unknown, codes.DataLoss:
		e.Status = http.StatusInternalServerError
	}
	return e
}
