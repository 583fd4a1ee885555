package client

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// headerServer keeps the headers "authorization" of its requests.
type headerServer struct {
	kvpb.UnimplementedAuthServiceServer
	seen chan []string
}

func (s *headerServer) WhoAmI(ctx context.Context, _ *kvpb.WhoAmIRequest) (*kvpb.WhoAmIResponse, error) {
	s.seen <- metadata.ValueFromIncomingContext(ctx, "authorization")
	return &kvpb.WhoAmIResponse{}, nil
}

func startHeaderServer(t *testing.T) (endpoint string, seen chan []string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, h := grpc.NewServer(), &headerServer{seen: make(chan []string, 10)}
	kvpb.RegisterAuthServiceServer(s, h)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	return l.Addr().String(), h.seen
}

// TestTokensAreSentWithEachRequest, and read again from a file that has changed.
func TestTokensAreSentWithEachRequest(t *testing.T) {
	endpoint, seen := startHeaderServer(t)
	file := filepath.Join(t.TempDir(), "token")
	write := func(text string, at time.Time) {
		if err := errors.Join(os.WriteFile(file, []byte(text), 0o600), os.Chtimes(file, at, at)); err != nil {
			t.Fatal(err)
		}
	}
	write(" epochkv_a\n", time.Unix(1, 0))
	send := func(c *Client, want string) {
		t.Helper()
		if _, err := c.WhoAmI(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(<-seen, ","); got != want {
			t.Errorf("authorization %q, want %q", got, want)
		}
	}
	for option, want := range map[string]Option{"Bearer x": WithToken("x"), "Bearer epochkv_a": WithTokenFile(file), "": func(*dialOptions) {}} {
		c, err := Dial(endpoint, want)
		if err != nil {
			t.Fatal(err)
		}
		send(c, option)
		if option == "Bearer epochkv_a" {
			write("epochkv_b", time.Unix(2, 0))
			send(c, "Bearer epochkv_b")
			write("", time.Unix(3, 0)) // half written
			send(c, "Bearer epochkv_b")
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []Option{WithToken(""), WithToken("a b"), WithToken("a\nb"), WithTokenFile(file + ".none")} {
		if _, err := Dial(endpoint, bad); err == nil {
			t.Error("a token that no header can carry is accepted")
		}
	}
}

// TestSecretsDoNotLeaveTheMachineInPlainText: neither when the endpoint says so, nor when localhost turns out to be elsewhere.
func TestSecretsDoNotLeaveTheMachineInPlainText(t *testing.T) {
	if _, err := Dial("db1.example:7400", WithToken("x"), WithPlainText()); !errors.Is(err, errPlainSecret) {
		t.Errorf("a token in plain text: %v", err)
	}
	if c, err := Dial("db1.example:7400", WithToken("x")); err != nil {
		t.Errorf("over TLS: %v", err)
	} else if err := c.Close(); err != nil {
		t.Error(err)
	}
	c, err := Dial("db1.example:7400", WithPlainText())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_, _, login := c.Login(t.Context(), "u", "p", "", 0)
	_, token := c.CreateToken(t.Context(), &kvpb.CreateTokenRequest{})
	for name, err := range map[string]error{
		"login": login, "create token": token, "bootstrap": c.Bootstrap(t.Context(), "t", "u", "p"),
		"create user":  c.CreateUser(t.Context(), &kvpb.CreateUserRequest{Password: "p"}),
		"set password": c.SetPassword(t.Context(), &kvpb.SetPasswordRequest{}),
	} {
		if !errors.Is(err, errPlainSecret) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// The address that the connection has got decides.
	remote := &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 7400}
	if _, _, err := newLocalCredentials().Clone().ClientHandshake(t.Context(), "localhost", addressedConn{remote}); !errors.Is(err, errPlainSecret) {
		t.Errorf("localhost at %v: %v", remote, err)
	}
}

// addressedConn is a connection to an address.
type addressedConn struct{ remote net.Addr }

func (c addressedConn) RemoteAddr() net.Addr           { return c.remote }
func (addressedConn) LocalAddr() net.Addr              { return nil }
func (addressedConn) Read([]byte) (int, error)         { return 0, net.ErrClosed }
func (addressedConn) Write([]byte) (int, error)        { return 0, net.ErrClosed }
func (addressedConn) Close() error                     { return nil }
func (addressedConn) SetDeadline(time.Time) error      { return nil }
func (addressedConn) SetReadDeadline(time.Time) error  { return nil }
func (addressedConn) SetWriteDeadline(time.Time) error { return nil }
