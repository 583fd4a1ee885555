package config

import (
	"fmt"
	"net"
	"net/url"

	"github.com/spf13/pflag"
)

// Traces says which requests are traced, and where their spans go.
type Traces struct {
	Endpoint string  // of a receiver of OTLP, as a URL; empty: no request is traced
	Ratio    float64 // of the requests that name no span of their client
	CA       string  // file of the authorities that the receiver is checked with; empty: those of the system
	Cert     string  // file of the server's own certificate for it; empty: none
	Key      string  // file of its key
}

// Enabled reports whether requests are traced.
func (t *Traces) Enabled() bool { return t.Endpoint != "" }

// TraceMemory is what spans that wait to be sent take, beside the rest of the bound. Package tracing keeps to it.
const TraceMemory = 17 * MiB

func (t *Traces) memory() Size {
	if !t.Enabled() {
		return 0
	}
	return TraceMemory
}

func (t *Traces) flags(f *pflag.FlagSet) {
	f.StringVar(&t.Endpoint, "trace-endpoint", t.Endpoint, "receiver of OpenTelemetry traces: grpc://HOST:4317 or http://HOST:4318, with TLS grpcs:// or https://; empty for no traces")
	f.Float64Var(&t.Ratio, "trace-ratio", t.Ratio, "which part of the requests without a traceparent is traced, 0 to 1; one with a traceparent is traced if its client traces it")
	f.StringVar(&t.CA, "trace-tls-ca", t.CA, "PEM file with the authorities of the receiver's certificate; empty for those of the system")
	f.StringVar(&t.Cert, "trace-tls-cert", t.Cert, "PEM file with the certificate that the server shows the receiver; empty for none")
	f.StringVar(&t.Key, "trace-tls-key", t.Key, "PEM file with the key of --trace-tls-cert")
}

func (t *Traces) validate(v *validation) {
	v.check(t.Ratio >= 0 && t.Ratio <= 1, "trace-ratio", fmt.Sprintf("is %v; choose between 0 and 1", t.Ratio))
	v.check((t.Cert == "") == (t.Key == ""), "trace-tls-cert", "and --trace-tls-key belong together; give both or neither")
	secure := false
	if t.Enabled() {
		var problem string
		problem, secure = checkTraceEndpoint(t.Endpoint)
		v.check(problem == "", "trace-endpoint", problem)
	}
	const needs = "needs a --trace-endpoint with TLS, grpcs:// or https://"
	v.check(t.CA == "" || secure, "trace-tls-ca", needs)
	v.check(t.Cert == "" || secure, "trace-tls-cert", needs)
}

// checkTraceEndpoint says what is wrong with an endpoint, without a password that may be in it, and whether it has TLS.
func checkTraceEndpoint(endpoint string) (problem string, secure bool) {
	const expected = "; write grpc://HOST:4317, grpcs://HOST:4317, http://HOST:4318 or https://HOST:4318"
	u, err := url.Parse(endpoint)
	if err != nil {
		return "is not a URL" + expected, false
	}
	_, port, err := net.SplitHostPort(u.Host)
	switch overHTTP := u.Scheme == "http" || u.Scheme == "https"; {
	case !overHTTP && u.Scheme != "grpc" && u.Scheme != "grpcs":
		return fmt.Sprintf("has the scheme %q", u.Scheme) + expected, false
	case u.User != nil:
		return "has a user name or a password, which the log would show; put credentials into the variable OTEL_EXPORTER_OTLP_HEADERS", false
	case u.RawQuery != "" || u.Fragment != "":
		return "has a query or a fragment" + expected, false
	case err != nil || port == "" || u.Hostname() == "":
		return "has no host, or no port" + expected, false
	case !overHTTP && u.Path != "" && u.Path != "/":
		return "has a path, which gRPC does not know" + expected, false
	}
	return "", u.Scheme == "grpcs" || u.Scheme == "https"
}
