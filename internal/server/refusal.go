package server

import (
	"bytes"
	"context"
	"encoding/base64"
	"slices"
	"strconv"
	"sync/atomic"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/transport"
)

// refusals has the results of following a connection's frames, for its handlers.
type refusals struct {
	tooManyStreams atomic.Bool // more streams are open than the limit: new ones are refused
}

// appendRefusal appends the frames that end a stream with a status. gRPC itself ends a stream
// within a message without an ErrorInfo. The fields are literals that are never indexed, so that
// they do not change the state of gRPC's header compression on the connection.
func appendRefusal(b []byte, stream uint32, st *status.Status, trailersOnly bool) []byte {
	var block bytes.Buffer
	e := hpack.NewEncoder(&block)
	field := func(name, value string) {
		_ = e.WriteField(hpack.HeaderField{Name: name, Value: value, Sensitive: true}) // into memory
	}
	if trailersOnly {
		field(":status", "200")
		field("content-type", "application/grpc")
	}
	field("grpc-status", strconv.Itoa(int(st.Code())))
	field("grpc-message", st.Message()) // plain ASCII without percent signs
	if p := st.Proto(); len(p.GetDetails()) > 0 {
		if details, err := proto.Marshal(p); err == nil {
			field("grpc-status-details-bin", base64.RawStdEncoding.EncodeToString(details))
		}
	}
	b = transport.AppendFrameHeader(b, block.Len(), frameHeaders, flagEndHeaders|flagEndStream, stream)
	b = append(b, block.Bytes()...)
	return transport.AppendReset(b, stream, http2.ErrCodeNo)
}

// refusesStream is the error of a stream that begins while its connection has more open than the
// server carries.
func (s *Server) refusesStream(ctx context.Context) error {
	if conn := connectionOf(ctx); conn != nil && conn.refusals.tooManyStreams.Load() {
		s.admission.refused.Add(1)
		return errTooManyStreams
	}
	return nil
}

// registerService adds a service. gRPC calls the interceptor of a unary request only after it has received
// the message, and the client decides how long that takes. So a request that has no stream is
// refused before. serveStream does the same for streams.
func (s *Server) registerService(to grpc.ServiceRegistrar, desc grpc.ServiceDesc, service any) {
	operator := desc.ServiceName == pb.Admin_ServiceDesc.ServiceName // must get through
	codec := s.codec()
	desc.Methods = slices.Clone(desc.Methods)
	for i := range desc.Methods {
		handler := desc.Methods[i].Handler
		desc.Methods[i].Handler = func(srv any, ctx context.Context, receive func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
			if !operator {
				if err := s.refusesStream(ctx); err != nil {
					return nil, statusOf(err).Err()
				}
			}
			decode := func(request any) error { return codec.receiveUnary(receive, request) }
			return handler(srv, ctx, decode, interceptor)
		}
	}
	to.RegisterService(&desc, service)
}
