package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// WithToken sends a token with each request: it says which user the client is. A token is never sent over a connection in plain
// text that leaves this machine.
func WithToken(token string) Option {
	return func(o *dialOptions) { o.token = &tokenSource{token: token} }
}

// WithTokenFile is WithToken with the token in a file, which is read again when it has changed. Space around the token is ignored.
func WithTokenFile(name string) Option {
	return func(o *dialOptions) { o.token = &tokenSource{file: name} }
}

// errPlainSecret refuses to send a token or a password in plain text.
var errPlainSecret = errors.New("client: tokens and passwords are not sent in plain text to another machine: use TLS")

// tokenSource is where a token comes from. It implements credentials.PerRPCCredentials.
type tokenSource struct {
	// Constant after Dial.
	file   string
	secure bool // the connection must be encrypted

	mu    sync.Mutex
	token string
	stamp fileStamp
}

type fileStamp struct {
	changed time.Time
	size    int64
}

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (s *tokenSource) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	token, err := s.current()
	if err != nil {
		return nil, err
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (s *tokenSource) RequireTransportSecurity() bool { return s.secure }

// current reads the file if it has changed. What was read before stays while the file cannot be read, because it may be replaced
// at the moment.
func (s *tokenSource) current() (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.file == "" {
		return s.token, nil
	}
	info, err := os.Stat(s.file)
	if err == nil {
		if stamp := (fileStamp{changed: info.ModTime(), size: info.Size()}); s.token == "" || stamp != s.stamp {
			var text []byte
			if text, err = os.ReadFile(s.file); err == nil && len(strings.TrimSpace(string(text))) > 0 {
				s.token, s.stamp = strings.TrimSpace(string(text)), stamp
			}
		}
	}
	if s.token == "" {
		if err == nil {
			err = errors.New("is empty")
		}
		return "", fmt.Errorf("client: token file %s: %w", s.file, err)
	}
	return s.token, nil
}

// checkToken says what a token in an option or a file must be: what a header can carry.
func checkToken(token string) error {
	if token == "" || strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return errors.New("client: the token is empty, or has characters that no token has")
	}
	return nil
}

// dialToken adds the token to the options of a connection.
func (o *dialOptions) dialToken(plain bool, endpoint string) ([]grpc.DialOption, error) {
	if o.token == nil {
		return nil, nil
	}
	if plain && !isLocal(endpoint) {
		return nil, errPlainSecret
	}
	token, err := o.token.current()
	if err == nil {
		err = checkToken(token)
	}
	if err != nil {
		return nil, err
	}
	o.token.secure = !plain
	return []grpc.DialOption{grpc.WithPerRPCCredentials(o.token)}, nil
}

// localCredentials are a connection in plain text that does not leave this machine: localhost is what the resolver says, and a
// proxy may be in between.
type localCredentials struct {
	credentials.TransportCredentials
}

func newLocalCredentials() localCredentials { return localCredentials{insecure.NewCredentials()} }

// ClientHandshake implements credentials.TransportCredentials.
func (c localCredentials) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if tcp, ok := conn.RemoteAddr().(*net.TCPAddr); ok && !tcp.IP.IsLoopback() {
		return nil, nil, fmt.Errorf("%w: %s is %v", errPlainSecret, authority, tcp)
	}
	return c.TransportCredentials.ClientHandshake(ctx, authority, conn)
}

// Clone implements credentials.TransportCredentials.
func (c localCredentials) Clone() credentials.TransportCredentials {
	return localCredentials{c.TransportCredentials.Clone()}
}
