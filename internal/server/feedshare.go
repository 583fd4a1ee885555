package server

import (
	"math/bits"
	"sync/atomic"
)

// responseShare is what responses of watches take while they wait for their clients, those of all streams together. A stream takes a response from it
// before it fills one, and gives it back once the client has taken that. Each may have watchResponseBytesMin. What it has beyond that is at most a
// sixty-fourth of what is left: so many streams whose clients take nothing make the responses of others small, and never use all of it up, in
// whatever order they come.
type responseShare struct {
	used atomic.Int64 // beyond watchResponseBytesMin of each
}

const (
	// watchResponsesMore is what all responses have together beyond watchResponseBytesMin, of which 4,096 streams take the rest.
	watchResponsesMore = watchResponsesBytes - 4096*watchResponseBytesMin
	watchResponsesPart = 64
)

// take returns how large a response may become: a power of two, as the buffers are that it fills.
func (s *responseShare) take() int64 {
	for {
		used := s.used.Load()
		most := min(watchResponseBytesMin+max(watchResponsesMore-used, 0)/watchResponsesPart, watchResponseBytes)
		size := int64(1) << (bits.Len64(uint64(most)) - 1)
		if s.used.CompareAndSwap(used, used+size-watchResponseBytesMin) {
			return size
		}
	}
}

// keep gives back what a response does not need, and returns what it keeps.
func (s *responseShare) keep(size, needs int64) int64 {
	kept := watchResponseBytesMin
	for kept < needs {
		kept *= 2
	}
	if kept >= size {
		return size
	}
	s.used.Add(kept - size)
	return kept
}

// give gives a response back.
func (s *responseShare) give(size int64) { s.used.Add(watchResponseBytesMin - size) }

// responseLimit is how large the response at hand, or the next one, may become. The stream has taken it from the share until giveResponse.
func (w *watchStream) responseLimit() int {
	if w.response == 0 {
		w.response = w.server.feed.responses.take()
	}
	return int(w.response) - watchResponseRest
}

// giveResponse says that the stream has no response any more.
func (w *watchStream) giveResponse() {
	if w.response > 0 {
		w.server.feed.responses.give(w.response)
		w.response = 0
	}
}
