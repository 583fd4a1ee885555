package server

import (
	"sync"
	"sync/atomic"
)

// streamClients has what each client has of the streams that all connections share. A client is the network of its address: connections have no other
// identity, and one client may have all of them.
type streamClients struct {
	mu  sync.Mutex // a leaf; guards all
	all map[string]*streamClient
}

// streamClient is that of one client.
type streamClient struct {
	reserved    atomic.Int64 // streams of its connections
	connections int          // guarded by the mutex of the streamClients
}

// enter counts a connection of a client. The caller calls leave when it has closed.
func (c *streamClients) enter(client string) *streamClient {
	c.mu.Lock()
	defer c.mu.Unlock()
	own := c.all[client]
	if own == nil {
		if c.all == nil {
			c.all = map[string]*streamClient{}
		}
		own = new(streamClient)
		c.all[client] = own
	}
	own.connections++
	return own
}

func (c *streamClients) leave(client string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	own := c.all[client]
	if own.connections--; own.connections == 0 {
		delete(c.all, client)
	}
}

// streamsTaken is how many streams a client may reserve for each that it leaves free: three quarters of all, if no other has any.
const streamsTaken = 3

// reserveStreams reserves streams for a connection that has reserved *conn of them, if there is room for it and for its client.
func (r *receiving) reserveStreams(client *streamClient, conn *int64, streams int64) bool {
	if !r.streams.add(conn, streams) {
		return false
	}
	if has := client.reserved.Add(streams); has > streams && has > streamsTaken*(r.streams.limit-r.streams.reserved.Load()) {
		r.releaseStreams(client, conn, streams)
		return false
	}
	return true
}

func (r *receiving) releaseStreams(client *streamClient, conn *int64, streams int64) {
	if streams > 0 {
		client.reserved.Add(-streams)
		r.streams.release(conn, streams)
	}
}
