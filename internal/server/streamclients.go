package server

import (
	"sync"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/mvcc"
)

// streamClients has what each client has of the streams, and of the other kinds of owned, that all connections share. A client is the network of its
// address: connections have no other identity, and one client may have all of them.
type streamClients struct {
	mu   sync.Mutex // a leaf; guards what follows, and the connections of each
	all  map[string]*streamClient
	left map[string]*streamClient // those of all without a connection: something that one of theirs has begun has not ended yet
	// scarce: a stream found no room, so all are reserved one by one, and nothing is kept in spare, until three quarters are free.
	scarce atomic.Bool
}

// streamClient is that of one client.
type streamClient struct {
	reserved    atomic.Int64 // streams of its connections
	connections map[*connStreams]struct{}
	owned       [ownedKinds]atomic.Int64 // by its connections
}

// connStreams is that of one connection.
type connStreams struct {
	client *streamClient
	used   int64        // by its open streams; guarded by the connection
	spare  atomic.Int64 // reserved, but not used: returned if there is no room for a stream of another connection
}

// enter counts a connection of a client. The caller calls leave when it has closed.
func (c *streamClients) enter(client string) *connStreams {
	c.mu.Lock()
	defer c.mu.Unlock()
	own := c.all[client]
	if own == nil {
		if c.all == nil {
			c.all = map[string]*streamClient{}
		}
		own = &streamClient{connections: map[*connStreams]struct{}{}}
		c.all[client] = own
	}
	conn := &connStreams{client: own}
	own.connections[conn] = struct{}{}
	delete(c.left, client)
	c.sweepLocked()
	return conn
}

func (c *streamClients) leave(client string, conn *connStreams) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(conn.client.connections, conn)
	if len(conn.client.connections) == 0 {
		if c.left == nil {
			c.left = map[string]*streamClient{}
		}
		c.left[client] = conn.client
	}
	c.sweepLocked()
}

// sweepLocked forgets clients without connections that have nothing any more. What requests have may outlast their connection: a read in a slow device has
// its session. So a client that closes connections and opens others has no more than one that keeps them. Those that have something are bounded by that.
func (c *streamClients) sweepLocked() {
	for name, client := range c.left {
		if client.hasNothing() {
			delete(c.left, name)
			delete(c.all, name)
		}
	}
}

func (c *streamClient) hasNothing() bool {
	for k := range c.owned {
		if c.owned[k].Load() != 0 {
			return false
		}
	}
	return c.reserved.Load() == 0
}

// reserveStream reserves one stream for a connection that has none in spare, and while there is plenty of room some in spare.
func (r *receiving) reserveStream(conn *connStreams) bool {
	if !r.clients.scarce.Load() && r.reserveStreams(conn, streamStep) {
		conn.spare.Add(streamStep - 1)
		return true
	}
	if r.reserveStreams(conn, 1) {
		return true
	}
	r.returnSpare()
	return r.reserveStreams(conn, 1)
}

// reserveStreams reserves streams for a connection, if there is room for it and for its client.
func (r *receiving) reserveStreams(conn *connStreams, streams int64) bool {
	if has := conn.used; !r.streams.add(&has, owned{}, streams) {
		return false
	}
	if has := conn.client.reserved.Add(streams); has > streams && has > mvcc.ClientTakes*(r.streams.limit-r.streams.reserved.Load()) {
		r.releaseStreams(conn.client, streams)
		return false
	}
	return true
}

func (r *receiving) releaseStreams(client *streamClient, streams int64) {
	client.reserved.Add(-streams)
	if left := r.streams.reserved.Add(-streams); left <= r.streams.limit/4 && r.clients.scarce.Load() {
		r.clients.scarce.Store(false)
	}
}

// returnSpare gives back what connections have in spare, unless that has been done, and makes streams scarce. In between a quarter of the streams
// has been reserved at least, so that what it costs is not for each stream that is refused.
func (r *receiving) returnSpare() {
	r.clients.mu.Lock()
	defer r.clients.mu.Unlock()
	if r.clients.scarce.Swap(true) {
		return
	}
	for _, client := range r.clients.all {
		for conn := range client.connections {
			r.releaseSpare(conn)
		}
	}
}

func (r *receiving) releaseSpare(conn *connStreams) {
	if conn.spare.Load() > 0 {
		r.releaseStreams(conn.client, conn.spare.Swap(0))
	}
}

// takeSpare uses a stream that the connection has in spare. Only the connection itself adds to these.
func (c *connStreams) takeSpare() bool {
	for {
		spare := c.spare.Load()
		if spare == 0 || c.spare.CompareAndSwap(spare, spare-1) {
			return spare > 0
		}
	}
}
