package tracing

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// answerBytesMax bounds what is read of an answer.
const answerBytesMax = 64 << 10

// grpcSender speaks OTLP over gRPC.
type grpcSender struct {
	conn    *grpc.ClientConn
	service collector.TraceServiceClient
	headers metadata.MD
}

func newGRPCSender(u *url.URL, config *tls.Config, headers http.Header) (*grpcSender, error) {
	secure := insecure.NewCredentials()
	if config != nil {
		secure = credentials.NewTLS(config)
	}
	conn, err := grpc.NewClient(u.Host, grpc.WithTransportCredentials(secure), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(answerBytesMax)))
	if err != nil {
		return nil, err
	}
	s := &grpcSender{conn: conn, service: collector.NewTraceServiceClient(conn), headers: metadata.MD{}}
	for name, values := range headers {
		s.headers.Set(name, values...)
	}
	return s, nil
}

func (s *grpcSender) send(ctx context.Context, batch *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	out, err := s.service.Export(metadata.NewOutgoingContext(ctx, s.headers), batch)
	if status.Code(err) == codes.Unavailable {
		err = &temporaryError{cause: err}
	}
	return out, err
}

func (s *grpcSender) close() error { return s.conn.Close() }

// httpSender speaks OTLP over HTTP, with messages of protobuf.
type httpSender struct {
	url     string
	client  http.Client
	headers http.Header
}

// pathDefault is where receivers expect traces.
const pathDefault = "/v1/traces"

func newHTTPSender(u *url.URL, config *tls.Config, headers http.Header) *httpSender {
	to := url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}
	if to.Path == "" || to.Path == "/" {
		to.Path = pathDefault
	}
	headers.Set("Content-Type", "application/x-protobuf")
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment, TLSClientConfig: config, IdleConnTimeout: time.Minute, ForceAttemptHTTP2: true}
	unfollowed := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse } // the headers are for this receiver
	return &httpSender{url: to.String(), client: http.Client{Transport: transport, CheckRedirect: unfollowed}, headers: headers}
}

func (s *httpSender) send(ctx context.Context, batch *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	body, err := proto.Marshal(batch)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header = s.headers.Clone()
	answer, err := s.client.Do(request)
	if err != nil {
		return nil, &temporaryError{cause: err}
	}
	defer func() { _ = answer.Body.Close() }() // of an answer that was read
	text, err := io.ReadAll(io.LimitReader(answer.Body, answerBytesMax))
	switch {
	case err != nil:
		return nil, &temporaryError{cause: err}
	case answer.StatusCode != http.StatusOK:
		return nil, failedStatus(answer.StatusCode, text)
	}
	out := new(collector.ExportTraceServiceResponse)
	if strings.HasPrefix(answer.Header.Get("Content-Type"), "application/x-protobuf") {
		err = proto.Unmarshal(text, out)
	}
	return out, err
}

// failedStatus is the error of an answer with another status than OK.
func failedStatus(code int, text []byte) error {
	const quoted = 200
	err := fmt.Errorf("the receiver answers %d: %q", code, text[:min(len(text), quoted)])
	switch code {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return &temporaryError{cause: err}
	}
	return err
}

func (s *httpSender) close() error {
	s.client.CloseIdleConnections()
	return nil
}
