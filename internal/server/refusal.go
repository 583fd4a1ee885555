package server

import (
	"bytes"
	"context"
	"encoding/base64"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/transport"
)

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

// enterStream refuses a stream of the gRPC library for which there was no room when it began, unless it is one of the few of operators beyond the limit.
// Nothing else is exempt. Those that began before it go on. The direct transport does the same when it opens a stream. After nil the caller calls leave.
func (s *Server) enterStream(ctx context.Context, path string) (leave func(), err error) {
	if stream := libraryStreamOf(ctx); stream == nil || !stream.tooMany {
		return nothingHeld, nil
	}
	if held := int64(0); forOperators(path) && s.receiving.countBeyond(&held, 1) {
		return func() { s.receiving.countBeyond(&held, 0) }, nil
	}
	s.admission.refused.Add(1)
	return nil, errTooManyStreams
}

// forOperators reports whether a stream of the method may be one of those beyond the limit of streams: an operator must get through.
func forOperators(path string) bool {
	return strings.HasPrefix(path, "/"+pb.AdminService_ServiceDesc.ServiceName+"/")
}

// gatedRegistrar registers services whose methods are checked.
type gatedRegistrar struct {
	reflection.GRPCServer
	server *Server
}

// RegisterService implements grpc.ServiceRegistrar.
func (r gatedRegistrar) RegisterService(desc *grpc.ServiceDesc, service any) {
	r.server.registerService(r.GRPCServer, *desc, service)
}

// registerService adds a service. gRPC calls the interceptor of a unary request only after it has received
// the message, and the client decides how long that takes. So a request that has no stream is
// refused before. serveGated does the same for streams. The rights of the caller are checked as soon as a message is decoded.
func (s *Server) registerService(to grpc.ServiceRegistrar, desc grpc.ServiceDesc, service any) {
	ours := strings.HasPrefix(desc.ServiceName, "epochkv.")
	codec := s.codec()
	desc.Methods, desc.Streams = slices.Clone(desc.Methods), slices.Clone(desc.Streams)
	for i := range desc.Methods {
		path := "/" + desc.ServiceName + "/" + desc.Methods[i].MethodName
		handler, row := desc.Methods[i].Handler, rpcRows[path]
		desc.Methods[i].Handler = func(srv any, ctx context.Context, receive func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
			end, err := s.enterStream(ctx, path)
			if err != nil {
				s.auditStreamless(connectionOf(ctx).peer(), path, err)
				return nil, statusOf(err).Err()
			}
			defer end()
			ctx, a, err := s.beginUnary(ctx, row)
			if err != nil {
				return nil, err
			}
			quit, err := s.enterOpen(ctx, row)
			if err != nil {
				return nil, s.refuse(ctx, a, row, err)
			}
			defer quit()
			leave := func() {}
			refused := false // and reported
			release := nothingHeld
			var early any // the request, if it was admitted before it was decoded
			decode := func(request any) error {
				size := 0
				if !ours {
					err = receive(request)
				} else {
					size, err = codec.receiveUnary(ctx, receive, request, func(bytes int) error {
						early = request
						if err := s.admitEarly(ctx, request, bytes); err != nil {
							refused = true
							return s.refuse(ctx, a, row, err)
						}
						return nil
					})
				}
				if err != nil {
					return err
				}
				libraryStreamOf(ctx).tookAll()
				if err = s.checkMessage(ctx, a, row, request); err == nil {
					if release, err = s.holdMessage(ctx, request, size); err == nil {
						leave, err = s.lists.enter(ctx, row)
					}
					if err != nil {
						err = s.refuse(ctx, a, row, err)
					}
				}
				refused = err != nil
				return err
			}
			start := s.clock.now()
			out, err := handler(srv, ctx, decode, interceptor)
			out, err = s.countAnswer(ctx, row, out, err)
			if early != nil {
				s.leaveEarly(early)
			}
			leave()
			release()
			if row != nil && row.rare && ours && !refused {
				s.endedRow(ctx, accessOf(ctx), row, status.Code(err), start)
			}
			return out, err
		}
	}
	for i := range desc.Streams {
		handler, path := desc.Streams[i].Handler, "/"+desc.ServiceName+"/"+desc.Streams[i].StreamName
		desc.Streams[i].Handler = func(srv any, stream grpc.ServerStream) error { return s.serveGated(srv, stream, path, handler) }
	}
	to.RegisterService(&desc, service)
}
