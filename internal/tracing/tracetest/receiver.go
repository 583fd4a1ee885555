// Package tracetest has a receiver of OTLP for tests: what a collector is to a server, over gRPC and over HTTP. It keeps all spans,
// and can be slow, refuse, or take nothing.
package tracetest

import (
	"context"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// Receiver is a receiver of OTLP on loopback.
type Receiver struct {
	GRPC, HTTP string // endpoints, as the server's option has them

	mu       sync.Mutex
	answer   func(context.Context) error // before a batch is taken; nil: at once
	rejected int64                       // spans of each batch, as the answer says
	spans    []*Span
	headers  []string // of x-token
	resource map[string]string
}

// Span is a span as it came.
type Span struct {
	*trace.Span
	Attributes map[string]string
}

// Trace is the id of the span's trace.
func (s *Span) Trace() string { return hex.EncodeToString(s.TraceId) }

// ID is the span's own.
func (s *Span) ID() string { return hex.EncodeToString(s.SpanId) }

// Parent is the id of the span that has caused it; empty for a root.
func (s *Span) Parent() string { return hex.EncodeToString(s.ParentSpanId) }

// Took is the duration of a span.
func (s *Span) Took() time.Duration { return time.Duration(s.EndTimeUnixNano - s.StartTimeUnixNano) }

// NewReceiver starts a receiver, which ends with the test.
func NewReceiver(t testing.TB) *Receiver {
	t.Helper()
	return newReceiver(t, nil)
}

// NewSecureReceiver is NewReceiver with TLS.
func NewSecureReceiver(t testing.TB, config *tls.Config) *Receiver {
	t.Helper()
	r := newReceiver(t, config)
	r.GRPC, r.HTTP = "grpcs"+strings.TrimPrefix(r.GRPC, "grpc"), "https"+strings.TrimPrefix(r.HTTP, "http")
	return r
}

func newReceiver(t testing.TB, config *tls.Config) *Receiver {
	t.Helper()
	r := &Receiver{}
	overGRPC, overHTTP := listen(t), listen(t)
	r.GRPC, r.HTTP = "grpc://"+overGRPC.Addr().String(), "http://"+overHTTP.Addr().String()
	var options []grpc.ServerOption
	if config != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(config)))
		overHTTP = tls.NewListener(overHTTP, config)
	}
	g := grpc.NewServer(options...)
	collector.RegisterTraceServiceServer(g, service{receiver: r})
	h := &http.Server{Handler: http.HandlerFunc(r.serveHTTP), ReadHeaderTimeout: time.Minute}
	var serving sync.WaitGroup
	serving.Go(func() { _ = g.Serve(overGRPC) })
	serving.Go(func() { _ = h.Serve(overHTTP) })
	t.Cleanup(func() {
		g.Stop()
		_ = h.Close()
		serving.Wait()
	})
	return r
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// Answer makes every batch wait for f, whose error the sender gets.
func (r *Receiver) Answer(f func(context.Context) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answer = f
}

// Reject makes every answer say that so many spans of the batch were not taken.
func (r *Receiver) Reject(count int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rejected = count
}

func (r *Receiver) response() *collector.ExportTraceServiceResponse {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &collector.ExportTraceServiceResponse{PartialSuccess: &collector.ExportTracePartialSuccess{RejectedSpans: r.rejected, ErrorMessage: "rejected by the test"}}
}

// Busy is an answer after which a sender tries again.
func Busy(context.Context) error { return errBusy }

var errBusy = errors.New("busy, says the test")

// Silent is an answer that does not come.
func Silent(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

// Refusing is an answer that is not repeated.
func Refusing(context.Context) error { return errors.New("refused by the test") }

type service struct {
	collector.UnimplementedTraceServiceServer
	receiver *Receiver
}

// Export implements the collector's service.
func (s service) Export(ctx context.Context, in *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	token := ""
	if values := metadata.ValueFromIncomingContext(ctx, "x-token"); len(values) > 0 {
		token = values[0]
	}
	if err := s.receiver.take(ctx, token, in); err != nil {
		code := codes.InvalidArgument
		if errors.Is(err, errBusy) {
			code = codes.Unavailable
		}
		return nil, status.Error(code, err.Error())
	}
	return s.receiver.response(), nil
}

func (r *Receiver) serveHTTP(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	in := new(collector.ExportTraceServiceRequest)
	if err == nil {
		err = proto.Unmarshal(body, in)
	}
	if err == nil && req.URL.Path != "/v1/traces" {
		err = fmt.Errorf("path %s", req.URL.Path)
	}
	if err == nil {
		err = r.take(req.Context(), req.Header.Get("x-token"), in)
	}
	switch {
	case errors.Is(err, errBusy):
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
	case err != nil:
		http.Error(w, err.Error(), http.StatusBadRequest)
	default:
		text, _ := proto.Marshal(r.response()) // cannot fail
		w.Header().Set("Content-Type", "application/x-protobuf")
		_, _ = w.Write(text) // the sender may have gone
	}
}

func (r *Receiver) take(ctx context.Context, token string, in *collector.ExportTraceServiceRequest) error {
	r.mu.Lock()
	answer := r.answer
	r.mu.Unlock()
	if answer != nil {
		if err := answer(ctx); err != nil {
			return err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.headers = append(r.headers, token)
	for _, of := range in.ResourceSpans {
		r.resource = texts(of.Resource.Attributes)
		for _, scope := range of.ScopeSpans {
			for _, s := range scope.Spans {
				r.spans = append(r.spans, &Span{Span: s, Attributes: texts(s.Attributes)})
			}
		}
	}
	return nil
}

func texts(all []*common.KeyValue) map[string]string {
	m := map[string]string{}
	for _, a := range all {
		switch v := a.Value.Value.(type) {
		case *common.AnyValue_StringValue:
			m[a.Key] = v.StringValue
		default:
			m[a.Key] = fmt.Sprint(a.Value.GetIntValue())
		}
	}
	return m
}

// Spans returns all spans that have come.
func (r *Receiver) Spans() []*Span {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]*Span(nil), r.spans...)
}

// Resource returns what has sent the last batch.
func (r *Receiver) Resource() map[string]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.resource
}

// Tokens returns the field x-token of each batch.
func (r *Receiver) Tokens() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.headers
}

// Wait returns all spans once there is one of each name.
func (r *Receiver) Wait(t testing.TB, names ...string) []*Span {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		all, missing := r.Spans(), ""
		for _, name := range names {
			if Named(all, name) == nil {
				missing = name
			}
		}
		if missing == "" {
			return all
		}
		if time.Now().After(deadline) {
			t.Fatalf("no span %s has come, but\n%s", missing, Tree(all))
		}
	}
}

// Named is the first span of a name, or nil.
func Named(all []*Span, name string) *Span {
	for _, s := range all {
		if s.Name == name {
			return s
		}
	}
	return nil
}

// Under is the span of a name with a parent, or nil.
func Under(all []*Span, parent *Span, name string) *Span {
	for _, s := range all {
		if parent != nil && s.Name == name && s.Parent() == parent.ID() && s.Trace() == parent.Trace() {
			return s
		}
	}
	return nil
}

// Tree shows spans for a message.
func Tree(all []*Span) (text string) {
	for _, s := range all {
		text += fmt.Sprintf("%s %s < %q  %s %v %v\n", s.Trace()[:8], s.ID(), s.Parent(), s.Name, s.Took(), s.Attributes)
	}
	return text
}
