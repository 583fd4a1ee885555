package mvcc

import (
	"context"
	"runtime"
	"time"
)

// turns are what commits wait for before they compute, and executions that have lost often.
//
// A large commit computes for milliseconds. As many of them as there are processors are prepared, take their latches and install their versions at once,
// and the others wait without latches, see turnLine. Otherwise a commit of a few keys, which is scheduled several times on its way, would wait each time
// for all that are under way, and for many of them when its keys share stripes with theirs.
//
// Measured on two processors, beside 50 connections with batches of 5,000 operations: if they came again at once after a refusal, a put took 77 to 114 ms in
// the median, and with turns 38 to 40; if they came again after 100 ms, 59 to 80 ms, and 4 to 5. Batches alone of eight connections, two each, are 7 to 9 %
// slower with turns.
//
// A turn is taken before the latches, so a commit that has latches waits for no turn. It is left before a commit waits for memory, or reads many pages; one that
// reads a few pages under its latches has none; and it ends after turnMost, for instance while the commit waits for latches: it goes on without.
type turns struct {
	large   turnLine
	execute executeTurns
}

const (
	// turnOperations and turnBytes are from where on a commit is a large one.
	turnOperations = 128
	turnBytes      = 64 << 10
	// turnMost is how long a turn lasts.
	turnMost = 10 * time.Millisecond
)

func (t *turns) init(owner func(context.Context) Owner) {
	t.large.init(owner, runtime.GOMAXPROCS(0))
	t.execute.init(owner)
}

// TakeTurn waits for a turn, if a commit of so many operations is a large one, until the context ends. The next commit of the session has the turn. A caller
// that makes none calls LeaveTurn. It has no latches, and waits for nothing before the commit.
func (x *Session) TakeTurn(ctx context.Context, operations int) error {
	return x.takeTurn(ctx, operations, 0)
}

func (x *Session) takeTurn(ctx context.Context, operations, bytes int) error {
	if x.committing.turn != nil || operations < turnOperations && bytes < turnBytes {
		return nil
	}
	large := &x.store.turns.large
	leave, err := large.enterFor(ctx, turnMost, large.leave)
	if err == nil {
		x.committing.turn = leave
	}
	return err
}

// LeaveTurn ends the turn, if the session has one.
func (x *Session) LeaveTurn() {
	if leave := x.committing.turn; leave != nil {
		x.committing.turn = nil
		leave()
	}
}

// turnOf waits for a turn of a commit, unless it may read pages while it has its latches: less than readBeforeMin are not read before.
func (x *Session) turnOf(ctx context.Context, w *Write) error {
	n := len(w.Conditions) + len(w.ops) + len(w.derived.ends)
	if w.load != nil || n > 0 && n < readBeforeMin {
		x.LeaveTurn()
		return nil
	}
	return x.takeTurn(ctx, w.Batch.Count()+len(w.Conditions), w.Batch.Size())
}
