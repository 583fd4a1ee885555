package transport

import (
	"bytes"
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// Paths of calls.
const (
	pathText    = "/calls/Text"    // answers with some text
	pathDeaf    = "/calls/Deaf"    // refuses without a look at messages
	pathEndless = "/calls/Endless" // sends without an end
	pathDiscard = "/calls/Discard" // takes all messages
	pathIdle    = "/calls/Idle"    // takes nothing
	pathChat    = "/calls/Chat"    // answers each message with itself
	pathOnce    = "/calls/Once"    // answers one message with itself
	pathUnary   = "/calls/Unary"   // the same, in the form of a unary method
	pathHeaders = "/calls/Headers" // sends the metadata that it gets as headers and trailers
)

// testServices are the services of the tests' servers.
func testServices() *Services {
	s := &Services{Codec: rawCodec{}, Buffers: mem.DefaultBufferPool(), MessageBytesMax: 8 << 20}
	stream := func(name string, handler func(grpc.ServerStream) error) grpc.StreamDesc {
		return grpc.StreamDesc{StreamName: name, ServerStreams: true, ClientStreams: true, Handler: func(_ any, stream grpc.ServerStream) error { return handler(stream) }}
	}
	once := stream("Once", serveOnce)
	once.ClientStreams = false
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: "calls",
		Methods:     []grpc.MethodDesc{{MethodName: "Unary", Handler: serveUnary}},
		Streams: []grpc.StreamDesc{
			once,
			stream("Text", func(s grpc.ServerStream) error { return s.SendMsg(raw("text")) }),
			stream("Deaf", func(grpc.ServerStream) error { return status.Error(codes.InvalidArgument, "deaf") }),
			stream("Endless", serveEndless),
			stream("Discard", serveDiscard),
			stream("Idle", func(s grpc.ServerStream) error { <-s.Context().Done(); return s.Context().Err() }),
			stream("Chat", serveChat),
			stream("Headers", serveHeaders),
		},
	}, nil)
	return s
}

//nolint:revive // the order of arguments is gRPC's
func serveUnary(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	var m raw
	if err := decode(&m); err != nil {
		return nil, err
	}
	return m, ctx.Err()
}

func serveOnce(s grpc.ServerStream) error {
	var m raw
	if err := s.RecvMsg(&m); err != nil {
		return err
	}
	return s.SendMsg(m)
}

func serveEndless(s grpc.ServerStream) error {
	for m := raw(make([]byte, 16<<10)); ; {
		if err := s.SendMsg(m); err != nil {
			return err
		}
	}
}

func serveDiscard(s grpc.ServerStream) error {
	for {
		var m raw
		if err := s.RecvMsg(&m); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

func serveChat(s grpc.ServerStream) error {
	for {
		var m raw
		if err := s.RecvMsg(&m); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := s.SendMsg(m); err != nil {
			return err
		}
	}
}

func serveHeaders(s grpc.ServerStream) error {
	md, _ := metadata.FromIncomingContext(s.Context())
	kept := metadata.MD{}
	for name, values := range md {
		if name == "some" || name == "some-bin" {
			kept[name] = values
		}
	}
	if err := grpc.SetHeader(s.Context(), metadata.Pairs("set", "before")); err != nil {
		return err
	}
	if err := s.SendHeader(kept); err != nil {
		return err
	}
	if s.SendHeader(nil) == nil || s.SetHeader(kept) == nil {
		return errors.New("headers can be sent twice")
	}
	s.SetTrailer(kept)
	if err := grpc.SetTrailer(s.Context(), metadata.Pairs("more", "later")); err != nil {
		return err
	}
	if name, _ := grpc.Method(s.Context()); name != pathHeaders {
		return errors.New("the method is " + name)
	}
	return nil
}

// rawCodec is for messages of type raw.
type rawCodec struct{}

func (rawCodec) Name() string { return "raw" }

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	m, ok := v.(raw)
	if !ok {
		return nil, errors.New("no raw message")
	}
	return mem.BufferSlice{mem.SliceBuffer(m)}, nil
}

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	m, ok := v.(*raw)
	if !ok {
		return errors.New("no raw message")
	}
	if *m = bytes.Clone(data.Materialize()); bytes.Equal(*m, []byte("malformed")) {
		return errors.New("malformed")
	}
	return nil
}
