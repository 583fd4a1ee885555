package server

import "sync/atomic"

// admission bounds the requests that are executed at once, and their bytes. Beyond either bound a request is refused at
// once with advice to retry: a queue would only turn overload into latency and memory.
//
// Both counts share one word, so that admitting is one atomic add:
//
//	63            40 39             0
//	+---------------+----------------+
//	| requests (24) |   bytes (40)   |
//	+---------------+----------------+
//
// Invariant: neither half overflows, because the limits stay below half its range and a refused add is taken back.
type admission struct {
	_       [128]byte // the word alone on its lines: every request writes it
	word    atomic.Uint64
	_       [120]byte
	limit   admissionLimit
	refused atomic.Uint64
}

type admissionLimit struct{ requests, bytes uint64 }

const (
	admissionShift = 40
	admissionOne   = 1 << admissionShift
	admissionBytes = admissionOne - 1
)

// enter admits a request of so many bytes, or refuses it. An admitted one must leave with the same number.
func (a *admission) enter(bytes int) bool {
	delta := uint64(admissionOne) + uint64(bytes)
	word := a.word.Add(delta)
	if word>>admissionShift <= a.limit.requests && word&admissionBytes <= a.limit.bytes {
		return true
	}
	a.word.Add(-delta)
	a.refused.Add(1)
	return false
}

func (a *admission) leave(bytes int) { a.word.Add(-(uint64(admissionOne) + uint64(bytes))) }

// inflight is the number of requests and bytes admitted at the moment.
func (a *admission) inflight() (requests int, bytes int64) {
	word := a.word.Load()
	return int(word >> admissionShift), int64(word & admissionBytes)
}
