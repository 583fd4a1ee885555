package server

import (
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/config"
)

// heldSessions bounds the sessions that requests have while they wait, so that requests that do not
// wait find one.
//
// Reads wait for the device, for a worker, or until their client has taken the answer before theirs.
// The pipelines of gRPC's own transport are counted with them, each of which has a session until it
// ends. Together they have at most half of the sessions. Of that half, a connection that holds
// sessions gets one more only if afterwards at least as many are free as it holds; see admission.
//
// Writes wait for memory, a latch, or the commit pause of a bulk load. They have at most three
// eighths of the sessions, from the begin of the commit to its end.
//
// Scans and transactions, which keep a session while their client thinks, have sessions of their own;
// see sessionsMax. So an eighth is left for requests that do not wait.
type heldSessions struct {
	max       int64 // constant after Open, as is writesMax
	writesMax int64
	held      atomic.Int64
	_         [120]byte // every write writes the next word
	writes    atomic.Int64
}

// sessionsMax is how many sessions clients may have: those of requests, one for each scan, and one for
// each interactive transaction. Sessions are made when they are needed first.
func sessionsMax(l *config.Limits) int {
	return l.InflightRequests + scansMax(l.InflightRequests) + l.Transactions
}

// scansMax is how many scans there may be. A scan has a session for as long as its client reads.
func scansMax(requests int) int { return max(1, requests/4) }

func (h *heldSessions) init(sessions int) {
	h.max, h.writesMax = int64(max(1, sessions/2)), int64(max(1, sessions*3/8))
}

// holdWrite counts the session of one more write, or refuses. After true the caller must call releaseWrite.
func (h *heldSessions) holdWrite() bool {
	if h.writes.Add(1) > h.writesMax {
		h.writes.Add(-1)
		return false
	}
	return true
}

func (h *heldSessions) releaseWrite() { h.writes.Add(-1) }

// hold counts one more session that conn holds, or refuses. After true the caller must call release.
func (h *heldSessions) hold(conn *connection) bool {
	free, own := h.max-h.held.Add(1), int64(1)
	if conn != nil {
		own = conn.sessions.Add(1)
	}
	if free < 0 || own > 1 && own > free {
		h.release(conn)
		return false
	}
	return true
}

func (h *heldSessions) release(conn *connection) {
	h.held.Add(-1)
	if conn != nil {
		conn.sessions.Add(-1)
	}
}
