package client

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// TLSFiles are PEM files of a connection over TLS. They are read again before a connection is made if
// they have changed, so that a program that runs for months follows a rotation.
type TLSFiles struct {
	// CA has the authorities that servers are checked with; empty means those of the system.
	CA string
	// Cert and Key are the client's own certificate, with its intermediates; empty if it has none.
	Cert, Key string
	// ServerName is the name that the server's certificate must have; empty means that of the endpoint.
	ServerName string
}

// WithTLS encrypts the connection as config says.
func WithTLS(config *tls.Config) Option { return func(o *dialOptions) { o.tls = config } }

// WithTLSFiles encrypts the connection, also to an endpoint on loopback.
func WithTLSFiles(files TLSFiles) Option { return func(o *dialOptions) { o.files = &files } }

// WithPlainText turns encryption off, also to an endpoint on another machine. Everything can then be
// read and changed on the way.
func WithPlainText() Option { return func(o *dialOptions) { o.plain = true } }

// credentials chooses how to connect: as an option says, else with TLS and the authorities of the
// system, unless the endpoint is on this machine.
func (o *dialOptions) credentials(endpoint string) (credentials.TransportCredentials, error) {
	switch {
	case o.plain && (o.tls != nil || o.files != nil):
		return nil, errors.New("client: WithPlainText excludes TLS")
	case o.tls != nil:
		return credentials.NewTLS(o.tls), nil
	case o.files != nil:
		return newFileCredentials(*o.files)
	case o.plain || isLocal(endpoint):
		return insecure.NewCredentials(), nil
	}
	return newFileCredentials(TLSFiles{})
}

// isLocal reports whether an endpoint is on this machine: a Unix socket, localhost, or an address of
// loopback.
func isLocal(endpoint string) bool {
	if strings.HasPrefix(endpoint, "unix:") || strings.HasPrefix(endpoint, "unix-abstract:") {
		return true
	}
	if _, rest, ok := strings.Cut(endpoint, "://"); ok { // scheme://authority/endpoint
		_, endpoint, _ = strings.Cut(rest, "/")
	}
	host, _, err := net.SplitHostPort(endpoint)
	if err != nil {
		host = strings.Trim(endpoint, "[]")
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// fileCredentials make each handshake with the files as they are then.
type fileCredentials struct {
	files TLSFiles

	mu     sync.Mutex
	stamps string // of the files that were loaded
	loaded credentials.TransportCredentials
}

func newFileCredentials(files TLSFiles) (*fileCredentials, error) {
	f := &fileCredentials{files: files}
	if _, err := f.current(); err != nil {
		return nil, err
	}
	return f, nil
}

// current loads the files if they have changed. What was loaded before stays if they cannot be used,
// because they may be half written.
func (f *fileCredentials) current() (credentials.TransportCredentials, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	stamps := f.files.stamps()
	if f.loaded != nil && stamps == f.stamps {
		return f.loaded, nil
	}
	config, err := f.files.Config()
	switch {
	case err == nil:
		f.loaded, f.stamps = credentials.NewTLS(config), stamps
	case f.loaded == nil:
		return nil, err
	}
	return f.loaded, nil
}

func (f *TLSFiles) stamps() string {
	var all strings.Builder
	for _, name := range []string{f.CA, f.Cert, f.Key} {
		if info, err := os.Stat(name); err == nil {
			fmt.Fprintf(&all, "%d %d;", info.ModTime().UnixNano(), info.Size())
		}
	}
	return all.String()
}

// Config loads the files.
func (f *TLSFiles) Config() (*tls.Config, error) {
	config := &tls.Config{ServerName: f.ServerName, MinVersion: tls.VersionTLS12}
	if (f.Cert == "") != (f.Key == "") {
		return nil, errors.New("client: a certificate and its key belong together; give both or neither")
	}
	if f.Cert != "" {
		pair, err := tls.LoadX509KeyPair(f.Cert, f.Key)
		if err != nil {
			return nil, fmt.Errorf("client: certificate %s and key %s: %w", f.Cert, f.Key, err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	if f.CA != "" {
		text, err := os.ReadFile(f.CA)
		if err != nil {
			return nil, fmt.Errorf("client: authorities: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("client: authorities: %s has no certificate in PEM form", f.CA)
		}
	}
	return config, nil
}

// ClientHandshake implements credentials.TransportCredentials.
func (f *fileCredentials) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, err := f.current()
	if err != nil {
		return nil, nil, err
	}
	if f.files.ServerName != "" {
		authority = f.files.ServerName // gRPC prefers this one to the configuration's
	}
	return c.ClientHandshake(ctx, authority, raw)
}

// ServerHandshake implements credentials.TransportCredentials.
func (*fileCredentials) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.ErrUnsupported
}

// Info implements credentials.TransportCredentials.
func (*fileCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

// Clone implements credentials.TransportCredentials.
func (f *fileCredentials) Clone() credentials.TransportCredentials {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &fileCredentials{files: f.files, stamps: f.stamps, loaded: f.loaded}
}

// OverrideServerName implements credentials.TransportCredentials.
func (f *fileCredentials) OverrideServerName(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.files.ServerName, f.loaded = name, nil
	return nil
}

// tlsProblems are what can be wrong with a connection over TLS. gRPC passes on the text of an error,
// and nothing else of it.
var tlsProblems = []struct{ text, advice string }{
	{"first record does not look like a TLS handshake", "the server does not speak TLS on this port; give it a certificate (kvserver --tls-cert), or connect in plain text (--insecure, WithPlainText)"},
	{"is not a settings frame: *http2.GoAwayFrame", "the server speaks TLS on this port; name its authority (--tls-ca, WithTLSFiles)"},
	{"certificate signed by unknown authority", "the server's certificate is signed by an authority that this client does not trust; name the file with that authority (--tls-ca, TLSFiles.CA)"},
	{"certificate has expired or is not yet valid", "the server's certificate has expired, or the clock of this machine is wrong; replace the file of kvserver --tls-cert"},
	{"x509: certificate is valid for ", "the server's certificate is not for the name in the endpoint; connect by a name that it has, or expect another one (--tls-server-name, TLSFiles.ServerName)"},
	{"x509: cannot validate certificate for ", "the server's certificate is not for the address in the endpoint; connect by a name that it has, or expect another one (--tls-server-name, TLSFiles.ServerName)"},
	{"x509: certificate is not valid for any names", "the server's certificate has no names; make one for the name in the endpoint"},
	{"remote error: tls: certificate required", "the server requires a client certificate (--tls-cert and --tls-key, TLSFiles.Cert and Key)"},
	{"remote error: tls: expired certificate", "the client's certificate has expired; replace it"},
	{"remote error: tls: bad certificate", "the server does not accept the client's certificate; give one that its --tls-client-ca has signed"},
	{"remote error: tls: unknown certificate authority", "the server does not accept the client's certificate; give one that its --tls-client-ca has signed"},
	{"remote error: tls: protocol version not supported", "client and server have no version of TLS in common; see kvserver --tls-min"},
}

// TLSAdvice says what to do about a connection that failed because of TLS, or is empty.
func (e *Error) TLSAdvice() string {
	if e.Code != codes.Unavailable && e.Code != codes.DeadlineExceeded {
		return ""
	}
	for _, p := range tlsProblems {
		if strings.Contains(e.Message, p.text) {
			return p.advice
		}
	}
	return ""
}
