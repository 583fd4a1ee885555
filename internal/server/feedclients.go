package server

import (
	"context"
	"net"
	"sync"
)

// watchClients counts the open streams of watches of each client. A client is the host of its address: connections have no
// other identity.
type watchClients struct {
	mu   sync.Mutex // a leaf; guards open
	open map[string]int
}

// enter counts a stream of a client, or reports false if it has so many.
func (c *watchClients) enter(client string, most int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open[client] >= most {
		return false
	}
	if c.open == nil {
		c.open = map[string]int{}
	}
	c.open[client]++
	return true
}

func (c *watchClients) leave(client string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open[client]--; c.open[client] == 0 {
		delete(c.open, client)
	}
}

// hostOf is the address of the client without its port.
func hostOf(ctx context.Context) string {
	address := peerOf(ctx)
	if host, _, err := net.SplitHostPort(address); err == nil {
		return host
	}
	return address
}
