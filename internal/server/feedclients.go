package server

import (
	"sync"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/feed"
)

// perClient counts what each client has; none has zero. A client is the network of its address: connections have no other identity.
type perClient map[string]int64

// add counts more of a client, or less.
func (c *perClient) add(client string, more int64) {
	if *c == nil {
		*c = perClient{}
	}
	if (*c)[client] += more; (*c)[client] == 0 {
		delete(*c, client)
	}
}

// watchClients counts the open streams of watches of each client.
type watchClients struct {
	mu   sync.Mutex // a leaf; guards open
	open perClient
}

// enter counts a stream of a client, or reports false if it has so many.
func (c *watchClients) enter(client string, most int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open[client] >= int64(most) {
		return false
	}
	c.open.add(client, 1)
	return true
}

func (c *watchClients) leave(client string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open.add(client, -1)
}

// The share of responses has the least response of watchStreamsShared streams. Each further stream counts as watchStreamUnits watches.
const (
	watchStreamsShared = 1024
	watchStreamUnits   = watchResponseBytesMin / int64(config.WatchBytes)
)

// enterStream counts a stream of a client. After nil the caller calls leave when the stream has ended.
func (f *feedState) enterStream(client string, limits *config.Feed) (leave func(), err error) {
	if !f.clients.enter(client, limits.StreamsPerClient) {
		return nil, &feed.LimitError{What: "streams of watches from one client's network", Limit: limits.StreamsPerClient}
	}
	leaveShared := func() {
		f.streams.Add(-1)
		f.clients.leave(client)
	}
	if f.streams.Add(1) <= watchStreamsShared {
		return leaveShared, nil
	}
	if err := f.units.reserve(client, watchStreamUnits, limits.Watches); err != nil {
		leaveShared()
		return nil, err
	}
	return func() {
		f.units.release(client, watchStreamUnits)
		leaveShared()
	}, nil
}

// watchUnits counts all watches, those among them that the feed does not know yet, and many streams, in units of config.WatchBytes.
type watchUnits struct {
	used atomic.Int64 // written with mu locked

	mu   sync.Mutex // a leaf; guards open
	open perClient
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
	u.open.add(client, n)
	u.used.Store(used)
	return nil
}

func (u *watchUnits) release(client string, n int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.used.Add(-n)
	u.open.add(client, -n)
}
