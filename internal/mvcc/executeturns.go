package mvcc

import (
	"context"
	"sync"
)

// executeTurns gives turns to executions that have lost often, so that they do not defeat each other for ever.
//
// At first an execution takes turns with those of its client only, by connections in rotation: those of different clients are mostly about different
// keys, so however many of a client wait, one of another client does not wait for them. It still competes with one of each other client, and with first
// attempts. If it loses to these as well, the clients are about the same keys: then it also takes turns with those of all clients, in rotation.
//
// Measured with 50 clients that change one key, each execution for a millisecond: with turns among those of a client only, half of the executions failed
// after all their attempts.
type executeTurns struct {
	owner func(context.Context) Owner
	all   turnLine

	mu      sync.Mutex                // a leaf; guards clients, and the counts of users
	clients map[string]*executeClient // those of which an execution has a turn among its own, or waits for it
}

// executeClient is the line of a client.
type executeClient struct {
	line  turnLine
	users int // executions that have the turn, or wait for it
}

func (t *executeTurns) init(owner func(context.Context) Owner) {
	t.owner, t.clients = owner, map[string]*executeClient{}
	t.all.init(owner, 1)
}

// enter waits for the turn that an execution needs after so many attempts, if any, until the context ends. The turn lasts until the caller calls leave, or
// for executeTurnMax.
func (t *executeTurns) enter(ctx context.Context, attempts int) (leave func(), err error) {
	switch attempts {
	case executeAttemptsFree:
		return t.enterClient(ctx)
	case executeAttemptsOfClient:
		return t.all.enterFor(ctx, executeTurnMax, t.all.leave)
	}
	return func() {}, nil
}

func (t *executeTurns) enterClient(ctx context.Context) (leave func(), err error) {
	name := t.owner(ctx).Client
	line := t.use(name)
	leave, err = line.enterFor(ctx, executeTurnMax, func() {
		line.leave()
		t.unuse(name)
	})
	if err != nil {
		t.unuse(name)
	}
	return leave, err
}

// use returns the line of a client, which is there until unuse is called.
func (t *executeTurns) use(name string) *turnLine {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.clients[name]
	if c == nil {
		c = &executeClient{}
		c.line.init(t.owner, 1)
		t.clients[name] = c
	}
	c.users++
	return &c.line
}

// unuse drops the line if it has no other user.
func (t *executeTurns) unuse(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.clients[name]
	if c.users--; c.users == 0 {
		delete(t.clients, name)
	}
}
