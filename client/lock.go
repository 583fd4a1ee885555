package client

import (
	"bytes"
	"context"
	"errors"
	"iter"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// Lock is a lock that was acquired. It is held until Release, or until its lease ends; the holder does not learn of the
// latter in time, so each write that the lock protects should have the condition Fence.
type Lock struct {
	client *Client
	name   []byte
	token  Epoch
}

// LockHolder is the holder of a lock. Without a holder, all fields are empty.
type LockHolder struct {
	Lease uint64
	Token Epoch
	Value []byte
}

// lockWait is how long one request waits for a lock; Lock sends the next one.
const lockWait = time.Minute

// Lock acquires a lock for a lease, and waits until it can or ctx ends. The value is what others see of the holder. If the
// lease holds the lock already, the result has the same token.
//
// After an error the lock is not held for this call: if the server may have acquired it, it is released in the background, which
// ends with the lease at the latest.
func (c *Client) Lock(ctx context.Context, name []byte, l *Lease, value []byte) (*Lock, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-l.lost:
			cancel(ErrLeaseLost)
		case <-ctx.Done():
		}
	}()
	var unanswered []uint64
	defer func() {
		if len(unanswered) > 0 { // with the lock, too: an earlier request that arrives late would acquire it after its release
			c.undo(name, l, unanswered)
		}
	}()
	for attempt := 1; ; attempt++ {
		id := rand.Uint64() | 1
		lock, _, err := c.acquire(ctx, name, l.id, value, lockWait, id)
		e := new(Error)
		if mayHaveAcquired(err) {
			unanswered = append(unanswered[max(0, len(unanswered)-undoMax+1):], id)
		}
		switch {
		case err == nil && lock != nil:
			return lock, nil
		case ctx.Err() != nil || errors.Is(err, context.DeadlineExceeded) && deadlinePassed(ctx):
			return nil, context.Cause(ctx)
		case err == nil:
			attempt = 0 // another one waited longer
		case !errors.As(err, &e) || !e.Retryable() || !c.retry.pause(ctx, min(attempt, 8), e):
			return nil, err
		}
	}
}

// mayHaveAcquired reports whether a request that ended with an error may be executed: what the server has refused is not.
func mayHaveAcquired(err error) bool {
	e, ok := errors.AsType[*Error](err)
	return err != nil && (!ok || e.OutcomeUnknown())
}

// deadlinePassed waits for the deadline of ctx, which the server's timer has told already. It is false if there is none.
func deadlinePassed(ctx context.Context) bool {
	if _, ok := ctx.Deadline(); !ok {
		return false
	}
	<-ctx.Done()
	return true
}

// undoMax is how many attempts are undone. Earlier ones have failed long ago, and the server undoes those of broken connections.
const undoMax = 64

// undo is undoAttempts in the background.
func (c *Client) undo(name []byte, l *Lease, attempts []uint64) {
	name = bytes.Clone(name)
	c.background.run(func(ctx context.Context) { c.undoAttempts(ctx, name, l, attempts) })
}

// undoAttempts undoes requests to acquire a lock whose answers were lost, until the server says that it is done, or until the lease
// or the client ends. A refusal says nothing about what was acquired, and what it is about passes sooner or later, while the lease is kept
// alive: a full server, a store that needs its operator, a token that is replaced. The server undoes the attempts of a connection that has
// ended.
func (c *Client) undoAttempts(ctx context.Context, name []byte, l *Lease, attempts []uint64) {
	ctx, cancel := context.WithCancel(ctx)
	watched := make(chan struct{})
	defer func() { <-watched }()
	defer cancel()
	go func() {
		defer close(watched)
		select {
		case <-l.lost:
		case <-l.closed:
		case <-ctx.Done():
		}
		cancel()
	}()
	const pauseMax = time.Second
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, pauseMax) {
		_, err := call(ctx, c, safe, c.locks.ReleaseLock, &kvpb.ReleaseLockRequest{Name: name, LeaseId: l.id, Attempts: attempts})
		if e := new(Error); err == nil || errors.As(err, &e) && (e.Code == codes.InvalidArgument || e.Code == codes.Unimplemented) {
			return
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
	}
}

// TryLock is Lock without waiting. If another lease holds the lock, the lock is nil, and the holder is known.
func (c *Client) TryLock(ctx context.Context, name []byte, l *Lease, value []byte) (*Lock, LockHolder, error) {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	id := rand.Uint64() | 1
	lock, holder, err := c.acquire(ctx, name, l.id, value, 0, id)
	if mayHaveAcquired(err) {
		c.undo(name, l, []uint64{id})
	}
	return lock, holder, err
}

func (c *Client) acquire(
	ctx context.Context, name []byte, lease uint64, value []byte, wait time.Duration, attempt uint64,
) (*Lock, LockHolder, error) {
	request := &kvpb.AcquireLockRequest{Name: name, LeaseId: lease, Value: value, Wait: durationpb.New(wait), Attempt: attempt}
	response, err := c.locks.AcquireLock(ctx, request)
	if err != nil {
		return nil, LockHolder{}, newError(err)
	}
	if !response.GetAcquired() {
		return nil, LockHolder{Lease: response.GetLeaseId(), Token: Epoch(response.GetToken())}, nil
	}
	return &Lock{client: c, name: name, token: Epoch(response.GetToken())}, LockHolder{}, nil
}

// Token is the fencing token: later holders have larger ones.
func (l *Lock) Token() Epoch { return l.token }

// Fence is the condition that the lock is held with its token. A write with it gets ErrFenced once the lock is lost.
func (l *Lock) Fence() Condition { return HeldWith(l.name, l.token) }

// HeldWith is the condition that a lock is held with a token.
func HeldWith(name []byte, token Epoch) Condition {
	return Condition{&kvpb.Precondition{Condition: &kvpb.Precondition_Fence{Fence: &kvpb.Fence{Name: name, Token: uint64(token)}}}}
}

// Release gives the lock up. If it is lost already, Release does nothing.
func (l *Lock) Release(ctx context.Context) error {
	_, err := call(ctx, l.client, safe, l.client.locks.ReleaseLock, &kvpb.ReleaseLockRequest{Name: l.name, Token: uint64(l.token)})
	return err
}

// LockHolder tells which lease holds a lock.
func (c *Client) LockHolder(ctx context.Context, name []byte) (LockHolder, error) {
	response, err := call(ctx, c, safe, c.locks.GetLock, &kvpb.GetLockRequest{Name: name})
	return toHolder(response.GetHolder()), err
}

func toHolder(h *kvpb.LockHolder) LockHolder {
	return LockHolder{Lease: h.GetLeaseId(), Token: Epoch(h.GetToken()), Value: h.GetValue()}
}

// ObserveLock yields the holder of a lock, now and after each change, until ctx ends or the connection breaks. If holders
// change faster than they are taken, it yields the newest only.
func (c *Client) ObserveLock(ctx context.Context, name []byte) iter.Seq2[LockHolder, error] {
	return func(yield func(LockHolder, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := c.locks.ObserveLock(ctx, &kvpb.ObserveLockRequest{Name: name})
		for err == nil {
			var response *kvpb.ObserveLockResponse
			if response, err = stream.Recv(); err == nil && !yield(toHolder(response.GetHolder()), nil) {
				return
			}
		}
		yield(LockHolder{}, newError(err))
	}
}

// Election chooses one leader among those that campaign under a name: the holder of the lock of that name.
type Election struct {
	client *Client
	name   []byte
	lease  *Lease
	lock   *Lock
}

// Election returns an election in which l is the lease of this candidate.
func (c *Client) Election(name []byte, l *Lease) *Election {
	return &Election{client: c, name: name, lease: l}
}

// Campaign waits until this candidate is the leader. The value is what observers see of it. The result is its lock, of
// which the fence belongs to every write that only the leader may do.
func (e *Election) Campaign(ctx context.Context, value []byte) (_ *Lock, err error) {
	e.lock, err = e.client.Lock(ctx, e.name, e.lease, value)
	return e.lock, err
}

// Resign gives up the leadership. If this candidate is not the leader, Resign does nothing.
func (e *Election) Resign(ctx context.Context) error {
	if e.lock == nil {
		return nil
	}
	return e.lock.Release(ctx)
}

// Leader is the leader of now.
func (e *Election) Leader(ctx context.Context) (LockHolder, error) {
	return e.client.LockHolder(ctx, e.name)
}

// Observe yields the leaders; see Client.ObserveLock.
func (e *Election) Observe(ctx context.Context) iter.Seq2[LockHolder, error] {
	return e.client.ObserveLock(ctx, e.name)
}
