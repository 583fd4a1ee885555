package server

import (
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// heldSessions bounds the sessions that requests have while they wait, so that requests that do not
// wait find one.
//
// Reads wait for the device, for a worker, or until their client has taken the answer before theirs. A read
// of History or Diff is counted from its begin, with two sessions.
// The pipelines of gRPC's own transport are counted with them, each of which has a session until it
// ends. Together they have at most half of the sessions. Of that half, a connection that holds
// sessions gets one more only if afterwards at least as many are free as it holds; see admission.
//
// Writes wait for memory, a latch, or the commit pause of a bulk load. They have at most three
// eighths of the sessions, from the begin of the commit to its end. For those that read first, and so may wait for the
// device, the rule for a connection is that of reads.
//
// Scans, walks of watches, and transactions, which keep a session while their client thinks, have
// sessions of their own, and so have requests for leases and locks; see sessionsMax. So an eighth is left for requests that do not wait. For walks
// the rule for a connection is that of reads.
type heldSessions struct {
	reads, walks sessionShare
	_            [120]byte // every write writes what follows
	writes       sessionShare
}

// sessionShare bounds the sessions of one kind.
type sessionShare struct {
	max  int64 // constant after Open
	held atomic.Int64
}

// sessionsMax is how many sessions clients may have: those of requests, one for each scan, those of the
// walks of watches, those of requests for leases, locks and holds, which are not admitted as others are, and one
// for each interactive transaction. Sessions are made when they are needed first.
func sessionsMax(l *config.Limits) int {
	n := l.InflightRequests
	return n + scansMax(n) + walkSessionsMax(n) + leaseSessionsMax(n) + l.Transactions
}

// leaseSessionsMax is how many sessions requests for leases, locks and holds may have at once; see mvcc.Store.SessionOf.
func leaseSessionsMax(requests int) int { return max(16, requests/4) }

// scansMax is how many scans there may be. A scan has a session for as long as its client reads.
func scansMax(requests int) int { return max(1, requests/4) }

// walkSessionsMax is how many sessions the walks of watches may have: enough for those of two streams.
func walkSessionsMax(requests int) int {
	return max(2*watchWalksMax*walkSessions[walkDifference], requests/4)
}

func (h *heldSessions) init(requests int) {
	h.reads.max, h.writes.max = int64(max(1, requests/2)), int64(max(1, requests*3/8))
	h.walks.max = int64(walkSessionsMax(requests))
}

// hold counts n more sessions, of a connection and a client that hold own of this kind, or refuses. After true the
// caller must call release.
func (h *sessionShare) hold(own owned, n int64) bool {
	free := h.max - h.held.Add(n)
	has, client := own.add(n)
	if free < 0 || has > n && has > free || !own.leaves(n, has, client, free, h.max) {
		h.release(own, n)
		return false
	}
	return true
}

func (h *sessionShare) release(own owned, n int64) {
	h.held.Add(-n)
	own.add(-n)
}

// hold counts one more session that reads of conn hold, or refuses. After true the caller must call release.
func (h *heldSessions) hold(conn *connection) bool { return h.reads.hold(conn.owns(ownedReads), 1) }

func (h *heldSessions) release(conn *connection) { h.reads.release(conn.owns(ownedReads), 1) }

// pastSessions is how many sessions a read of History or Diff has: its own, and one at the begin.
const pastSessions = 2

// holdPast is hold for a read of History or Diff, which nearly always reads pages, and is not tried without waiting first. After nil the
// caller must call releasePast.
func (a *admission) holdPast(conn *connection) error {
	if !a.sessions.reads.hold(conn.owns(ownedReads), pastSessions) {
		a.refused.Add(1)
		return mvcc.ErrTooManySessions
	}
	return nil
}

func (a *admission) releasePast(conn *connection) {
	a.sessions.reads.release(conn.owns(ownedReads), pastSessions)
}
