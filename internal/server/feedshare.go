package server

import (
	"math/bits"
	"sync"
)

// responseShare is what responses of watches take while they wait for their clients, those of all streams together. A stream takes a response from it
// before it fills one, and gives it back once the client has taken that. Each may have watchResponseBytesMin. What it has beyond that is at most a
// sixty-fourth of what is left, and leaves a third of what its client, the network of its address, then has: so streams whose clients take nothing never
// use all of it up, in whatever order they come, and beside those of one client a response of another may have 128 KiB.
type responseShare struct {
	mu      sync.Mutex // a leaf; guards what follows: what responses have beyond watchResponseBytesMin of each
	used    int64
	clients perClient // those of each
}

const (
	// watchResponsesMore is what all responses have together beyond watchResponseBytesMin. The rest is that of watchStreamsShared streams.
	watchResponsesMore = watchResponsesBytes - watchStreamsShared*watchResponseBytesMin
	watchResponsesPart = 64
	watchClientParts   = 3
)

// take returns how large a response may become: a power of two, as the buffers are that it fills.
func (s *responseShare) take(client string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	free := watchResponsesMore - s.used
	most := min(watchResponseBytesMin+max(min(free/watchResponsesPart, (watchClientParts*free-s.clients[client])/(watchClientParts+1)), 0), watchResponseBytes)
	size := int64(1) << (bits.Len64(uint64(most)) - 1)
	s.addLocked(client, size-watchResponseBytesMin)
	return size
}

func (s *responseShare) addLocked(client string, more int64) {
	s.used += more
	s.clients.add(client, more)
}

// keep gives back what a response does not need, and returns what it keeps.
func (s *responseShare) keep(client string, size, needs int64) int64 {
	kept := watchResponseBytesMin
	for kept < needs {
		kept *= 2
	}
	if kept >= size {
		return size
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addLocked(client, kept-size)
	return kept
}

// give gives a response back.
func (s *responseShare) give(client string, size int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addLocked(client, watchResponseBytesMin-size)
}

// takenResponse is what a stream has taken of the share.
type takenResponse struct {
	client string // the network of its address; constant
	size   int64  // the sender's own; 0: nothing
	kept   bool   // for a delivery of the feed that is in memory: it is as large, whatever has been sent of it
}

// responseLimit is how large the response at hand, or the next one, may become. The stream has taken it from the share until giveResponse.
func (w *watchStream) responseLimit() int {
	if r := &w.response; r.size == 0 {
		r.size = w.server.feed.responses.take(r.client)
	}
	return int(w.response.size) - watchResponseRest
}

// keepResponse gives back what a response of so many bytes does not need, unless a delivery is in memory beside it.
func (w *watchStream) keepResponse(size int) {
	if r := &w.response; r.size > 0 && !r.kept {
		r.size = w.server.feed.responses.keep(r.client, r.size, int64(size+watchResponseRest))
	}
}

// giveResponse says that the stream has no response any more. It has no effect while a delivery is in memory: what the stream took anew might be less.
func (w *watchStream) giveResponse() {
	if r := &w.response; r.size > 0 && !r.kept {
		w.server.feed.responses.give(r.client, r.size)
		r.size = 0
	}
}
