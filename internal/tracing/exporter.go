package tracing

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"

	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	spans "go.opentelemetry.io/proto/otlp/trace/v1"
)

// Options say where spans go, and which requests have some.
type Options struct {
	Endpoint string // grpc://HOST:PORT, grpcs://HOST:PORT, http://HOST:PORT/PATH or https://HOST:PORT/PATH
	TLSFiles
	Ratio    float64 // of the requests without a parent that are sampled
	Version  string  // of the program
	Instance string  // which of several servers this one is

	Failed func(error) // is told that spans were lost
}

// TLSFiles are PEM files of the connection to a receiver with TLS. They are read again for each connection.
type TLSFiles struct {
	CA        string // authorities that the receiver is checked with; empty: those of the system
	Cert, Key string // of the server as a client; empty: none
}

// sender sends a batch over one of the protocols.
type sender interface {
	send(ctx context.Context, batch *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error)
	close() error
}

// exporter makes what sends spans.
//
// The library's own clients are not used: they register gzip with gRPC, for the whole process, and a server on the transport of the
// gRPC library would then decompress what its clients send.
func (o *Options) exporter() (sdktrace.SpanExporter, error) {
	u, err := url.Parse(o.Endpoint)
	if err != nil {
		return nil, err
	}
	var config *tls.Config
	if u.Scheme == "grpcs" || u.Scheme == "https" {
		if config, err = o.config(u.Hostname()); err != nil {
			return nil, err
		}
	}
	headers, err := parseHeaders(os.Getenv(headersVariable))
	if err != nil {
		return nil, err
	}
	var s sender
	switch u.Scheme {
	case "grpc", "grpcs":
		s, err = newGRPCSender(u, config, headers)
	case "http", "https":
		s = newHTTPSender(u, config, headers)
	default:
		err = fmt.Errorf("scheme %q is none of grpc, grpcs, http, https", u.Scheme)
	}
	if err != nil {
		return nil, err
	}
	return otlptrace.New(context.Background(), uploader{s})
}

// uploader implements otlptrace.Client.
type uploader struct{ sender }

// Start implements otlptrace.Client. Nothing is connected before there are spans.
func (uploader) Start(context.Context) error { return nil }

// Stop implements otlptrace.Client.
func (u uploader) Stop(context.Context) error { return u.close() }

// UploadTraces implements otlptrace.Client.
func (u uploader) UploadTraces(ctx context.Context, all []*spans.ResourceSpans) error {
	out, err := u.send(ctx, &collector.ExportTraceServiceRequest{ResourceSpans: all})
	if p := out.GetPartialSuccess(); err == nil && p.GetRejectedSpans() > 0 {
		return &rejectedError{count: int(p.GetRejectedSpans()), reason: p.GetErrorMessage()}
	}
	return err
}

// rejectedError says that the receiver has taken a part of a batch.
type rejectedError struct {
	count  int
	reason string
}

func (e *rejectedError) Error() string {
	return fmt.Sprintf("the receiver has rejected %d spans: %s", e.count, e.reason)
}

// temporaryError says that the receiver may take the batch a moment later.
type temporaryError struct{ cause error }

func (e *temporaryError) Error() string { return e.cause.Error() }

// Unwrap returns the cause.
func (e *temporaryError) Unwrap() error { return e.cause }

// headersVariable has headers for the receiver, as OpenTelemetry defines it: it may have a secret, so it is no option.
const headersVariable = "OTEL_EXPORTER_OTLP_HEADERS"

// parseHeaders parses NAME=VALUE,NAME=VALUE with percent encoding. The error does not quote the text.
func parseHeaders(text string) (http.Header, error) {
	headers := http.Header{}
	for _, part := range strings.Split(text, ",") {
		if strings.TrimSpace(part) == "" {
			continue
		}
		name, value, ok := strings.Cut(part, "=")
		name = strings.TrimSpace(name)
		value, err := url.PathUnescape(strings.TrimSpace(value))
		if !ok || name == "" || err != nil {
			return nil, errors.New(headersVariable + " is not of the form NAME=VALUE,NAME=VALUE")
		}
		headers.Set(name, value)
	}
	return headers, nil
}
