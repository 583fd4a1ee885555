package server

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"

	"epochkv/internal/telemetry"
)

// connection is what the server knows of one client connection. It travels as the connection's AuthInfo, which is how
// gRPC hands per-connection state to handlers without a stats handler (and a stats handler costs allocations per message).
type connection struct {
	credentials.CommonAuthInfo
	shard   *telemetry.Shard
	refused bool // over the limit: its requests are told so, instead of being cut off without a word
	closed  atomic.Bool
}

// AuthType implements credentials.AuthInfo.
func (*connection) AuthType() string { return "epochkv" }

// refusedConnectionsMax bounds the connections that are kept open beyond the limit only to be told about it.
const refusedConnectionsMax = 64

// connections counts the open connections and bounds them.
type connections struct {
	max      int64
	requests *telemetry.Requests
	open     atomic.Int64
	refused  atomic.Uint64
}

// admit counts a new connection; nil means that it is closed at once.
func (c *connections) admit() *connection {
	n := c.open.Add(1)
	if n > c.max {
		c.refused.Add(1)
	}
	if n > c.max+refusedConnectionsMax {
		c.open.Add(-1)
		return nil
	}
	return &connection{
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity},
		shard:          c.requests.Shard(),
		refused:        n > c.max,
	}
}

// credentials are transport credentials that register each connection.
func (c *connections) credentials() credentials.TransportCredentials {
	return &registering{TransportCredentials: insecure.NewCredentials(), connections: c}
}

type registering struct {
	credentials.TransportCredentials
	connections *connections
}

var errTooManyConnections = errors.New("server: too many connections")

// ServerHandshake implements credentials.TransportCredentials.
func (r *registering) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, _, err := r.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	info := r.connections.admit()
	if info == nil {
		return nil, nil, errTooManyConnections
	}
	return &countedConn{Conn: conn, connections: r.connections, info: info}, info, nil
}

// Clone implements credentials.TransportCredentials.
func (r *registering) Clone() credentials.TransportCredentials {
	return &registering{TransportCredentials: r.TransportCredentials.Clone(), connections: r.connections}
}

// countedConn leaves the count when it is closed, however often that is.
type countedConn struct {
	net.Conn
	connections *connections
	info        *connection
	once        sync.Once
}

func (c *countedConn) Close() error {
	c.once.Do(func() {
		c.info.closed.Store(true)
		c.connections.open.Add(-1)
	})
	return c.Conn.Close()
}

// connectionOf is the connection that a request came over.
func connectionOf(ctx context.Context) *connection {
	if p, ok := peer.FromContext(ctx); ok {
		if c, ok := p.AuthInfo.(*connection); ok {
			return c
		}
	}
	return nil
}
