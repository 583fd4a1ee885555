package server

import "sync/atomic"

// heldSessions bounds the sessions that reads have while they wait: for the device, for a worker, or
// until their client has taken the answer before theirs. The pipelines of gRPC's own transport are
// counted too, each of which has a session until it ends. Together they have at most half of the
// sessions, so that requests that do not wait find one. Of that half, a connection that holds sessions
// gets one more only if afterwards at least as many are free as it holds; see admission.
type heldSessions struct {
	max  int64 // constant after Open
	held atomic.Int64
}

func (h *heldSessions) init(sessions int) { h.max = int64(max(1, sessions/2)) }

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
