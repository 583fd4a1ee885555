package transport

import (
	"context"
	"fmt"
	"maps"
	"math"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
)

// Services are the methods whose requests are calls. Generated code registers them, as with a
// grpc.Server. It is not changed once a Server uses it.
type Services struct {
	Codec           encoding.CodecV2      // of all messages
	Buffers         mem.BufferPool        // of what handlers send
	MessageBytesMax int                   // of a message that a handler sends
	Receives        func(path string) int // the largest message that a client may send to a method; nil: what Client.Receive admits
	Unary           grpc.UnaryServerInterceptor

	methods map[string]*method // by path
	info    map[string]grpc.ServiceInfo
}

// method serves the calls of a path.
type method struct {
	path    string
	streams bool // the client may send any number of messages, not just one
	most    int  // bytes of a message that the client sends
	handle  func(*call) error
}

// TooLargeError is the error of a message that is larger than its method takes.
type TooLargeError struct{ Most, Got int }

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("transport: a message of %d bytes is larger than the method takes, %d", e.Got, e.Most)
}

// admit asks a client about a message of a size that it has declared. What the method does not take is refused before it counts.
func (m *method) admit(c Client, length int) error {
	switch {
	case length > m.most:
		return &TooLargeError{Most: m.most, Got: length}
	case length < receivedBytesMin:
		return nil
	}
	return c.Receive(length)
}

// RegisterService implements grpc.ServiceRegistrar.
func (s *Services) RegisterService(desc *grpc.ServiceDesc, service any) {
	if s.methods == nil {
		s.methods, s.info = map[string]*method{}, map[string]grpc.ServiceInfo{}
	}
	info := grpc.ServiceInfo{Metadata: desc.Metadata}
	add := func(m *method, name string, serverStreams bool) {
		m.path, m.most = "/"+desc.ServiceName+"/"+name, math.MaxInt
		if s.Receives != nil {
			m.most = s.Receives(m.path)
		}
		s.methods[m.path] = m
		info.Methods = append(info.Methods, grpc.MethodInfo{Name: name, IsClientStream: m.streams, IsServerStream: serverStreams})
	}
	for _, d := range desc.Methods {
		add(&method{handle: s.unary(d, service)}, d.MethodName, false)
	}
	for _, d := range desc.Streams {
		add(&method{streams: d.ClientStreams, handle: func(k *call) error { return d.Handler(service, k) }}, d.StreamName, d.ServerStreams)
	}
	s.info[desc.ServiceName] = info
}

// unary serves a method that has one request and one answer.
func (s *Services) unary(d grpc.MethodDesc, service any) func(*call) error {
	return func(k *call) error {
		answer, err := d.Handler(service, k.ctx, k.RecvMsg, s.Unary)
		if err != nil {
			return err
		}
		return k.SendMsg(answer)
	}
}

// GetServiceInfo implements reflection.ServiceInfoProvider.
func (s *Services) GetServiceInfo() map[string]grpc.ServiceInfo { return maps.Clone(s.info) }

// transportStream is a call for grpc.SetHeader and the like, which find it in the context.
type transportStream struct{ *call }

// Method implements grpc.ServerTransportStream.
func (t transportStream) Method() string { return t.method.path }

// SetTrailer implements grpc.ServerTransportStream.
func (t transportStream) SetTrailer(md metadata.MD) error {
	t.call.SetTrailer(md)
	return nil
}

var (
	_ grpc.ServerStream          = (*call)(nil)
	_ grpc.ServerTransportStream = transportStream{}
	_ context.Context            = (*stream)(nil)
)
