package server

import (
	"context"
	"sync/atomic"
	"time"
)

// A commit of an interactive transaction that finds no room as a large write waits for it, and is in the line for the large slot meanwhile. To refuse it
// would be the end of the transaction, and until its client has made all of it again its claim has lapsed. It waits in the goroutine of its stream,
// before it has latches, and holds what an open transaction holds anyway.

// commitAsks is how often it asks: its claim stays as long as it waits.
const commitAsks = claimTimeMin / 5

// commitClaim is the claim of the commits of a connection, which they share.
type commitClaim struct {
	claim   claim
	waiting atomic.Int64 // commits
}

// awaitRoom finds room for so many bytes of a commit. It waits as long as the transaction could wait for its next request, until the transaction or its
// stream is ended, or the server drains. The stream's mutex is held meanwhile: what ends the transaction ends its context before.
func (c *transactionStream) awaitRoom(conn *connection, own, bytes int) error {
	s, claim := c.server, &conn.commits.claim
	if s.admission.admits(conn, claim, shareLargeWrites, own, bytes) {
		return nil
	}
	conn.commits.waiting.Add(1)
	defer func() {
		if conn.commits.waiting.Add(-1) == 0 {
			s.admission.words[shareLargeWrites].large.forget(claim)
		}
	}()
	start := s.clock.now()
	defer func() { c.spent.queue += s.clock.now() - start }()
	ctx, cancel := context.WithTimeoutCause(c.row.ctx, s.transactions.idle, errOverloaded)
	defer cancel()
	asks := time.NewTicker(commitAsks)
	defer asks.Stop()
	for {
		select {
		case <-ctx.Done():
			s.admission.refused.Add(1)
			return context.Cause(ctx)
		case <-s.drain.begun:
			s.admission.refused.Add(1)
			return errShuttingDown
		case <-asks.C:
		}
		if s.admission.admits(conn, claim, shareLargeWrites, own, bytes) {
			return nil
		}
	}
}
