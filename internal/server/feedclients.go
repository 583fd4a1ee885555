package server

import (
	"sync"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/feed"
)

// watchClients counts the open streams of watches of each client. A client is the network of its address: connections
// have no other identity.
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

// watchUnits counts all watches, those among them that the feed does not know yet, in units of config.WatchBytes.
type watchUnits struct {
	used atomic.Int64 // written with mu locked

	mu   sync.Mutex // a leaf; guards open
	open map[string]int64
}

// unitsOf is how many watches the ranges of one count as, with the key at which it goes on: the stream, the feed and its index keep their bounds, and
// a watch that waits for its turn keeps the key.
func unitsOf(ranges []feed.Range, last []byte) int64 {
	size := watchOwnBytes + (len(ranges)-1)*watchRangeBytes + len(last)
	for _, r := range ranges {
		size += 3 * (len(r.Lower) + len(r.Upper))
	}
	return int64((size + int(config.WatchBytes) - 1) / int(config.WatchBytes))
}

// What a watch of one range takes in addition to the bounds of its ranges, and each further range.
const (
	watchOwnBytes   = 704
	watchRangeBytes = 400
)

// reserve counts a watch of a client, unless there is no room for it. A client that has watches gets another one only if afterwards at least as much is
// free as it has: half of all, if no other has any.
func (u *watchUnits) reserve(client string, n int64, most int) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	has, used := u.open[client]+n, u.used.Load()+n
	if used > int64(most) {
		return &feed.LimitError{What: "watches of the server", Limit: most}
	}
	if has > 1 && has > int64(most)-used {
		return &feed.LimitError{What: "watches of one client's network, which leaves others as much as it has", Limit: int(int64(most)-used+has) / 2}
	}
	if u.open == nil {
		u.open = map[string]int64{}
	}
	u.open[client] = has
	u.used.Store(used)
	return nil
}

func (u *watchUnits) release(client string, n int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.used.Add(-n)
	if u.open[client] -= n; u.open[client] == 0 {
		delete(u.open, client)
	}
}
