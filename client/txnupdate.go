package client

import (
	"context"
	"errors"
	"time"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// conflictRetry paces repeats after conflicts: a transaction is short, and what it lost against is over already.
var conflictRetry = Retry{Base: time.Millisecond, Max: 100 * time.Millisecond}

// Update runs do in a transaction and commits it. After a conflict with a concurrent commit it runs do again, in a new
// transaction with a fresh snapshot, until it succeeds or ctx ends; do must therefore do nothing but through tx that it
// would mind doing twice. An error of do rolls back and is returned.
//
//	err := c.Update(ctx, func(tx *client.Txn) error {
//		v, err := tx.Get(from)
//		...
//		return tx.Put(from, rest)
//	})
//
// If the connection breaks while the commit is under way, the error's OutcomeUnknown is true, and do is not run again: the commit may have
// happened. With ReadOnly or ReadAt there is nothing that could happen twice, and it is.
func (c *Client) Update(ctx context.Context, do func(tx *Txn) error, options ...TxnOption) error {
	return c.transact(ctx, do, options)
}

// View is Update for what only reads: all of it at one epoch. It never conflicts, and is repeated when the connection breaks.
func (c *Client) View(ctx context.Context, do func(tx *Txn) error, options ...TxnOption) error {
	return c.transact(ctx, do, append([]TxnOption{ReadOnly()}, options...))
}

func (c *Client) transact(ctx context.Context, do func(tx *Txn) error, options []TxnOption) error {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	var t *Txn
	defer func() {
		if t != nil {
			t.close()
		}
	}()
	request := beginRequest(options)
	var made attempts
	for {
		var err error
		if t != nil && (t.broken != nil || t.halfClosed) {
			t.close()
			t = nil
		}
		if t == nil {
			t, err = c.openTxn(ctx)
		}
		if err == nil {
			err = attempt(t, do, request)
		}
		if err == nil {
			return nil
		}
		if e, safely := causeOf(t, request, err); e == nil || !c.mayAttempt(ctx, &made, e, safely) {
			return err
		}
	}
}

// attempts counts what a transaction has met.
type attempts struct{ conflicts, failures int }

// mayAttempt waits until the next attempt is due. It is false if there is none: conflicts are run again for as long as ctx lasts, other
// failures as often as any call.
func (c *Client) mayAttempt(ctx context.Context, made *attempts, e *Error, safely repeatability) bool {
	if errors.Is(e, ErrConflict) {
		made.conflicts++
		return conflictRetry.pause(ctx, made.conflicts, e)
	}
	made.failures++
	return made.failures < c.retry.Attempts && mayRepeat(e, safely) && c.retry.pause(ctx, made.failures, e)
}

// causeOf finds what made an attempt fail, and whether running it twice is safe: it is, unless a commit was sent of a transaction that may write.
// It is nil if the transaction itself was well, which is to say that its function gave up.
func causeOf(t *Txn, request *kvpb.BeginRequest, err error) (*Error, repeatability) {
	if t != nil {
		return t.failed, repeatability(!t.committed || request.GetReadOnly())
	}
	var e *Error
	errors.As(err, &e) // no stream could be opened
	return e, safe
}

// attempt runs do in one transaction of the stream.
func attempt(t *Txn, do func(tx *Txn) error, request *kvpb.BeginRequest) error {
	t.begin(request)
	defer t.rollback() // also if do panics
	if err := do(t); err != nil {
		return err
	}
	_, err := t.commit()
	return err
}
