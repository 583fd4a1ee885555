package client

import (
	"context"
	"errors"
	"time"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// conflictRetry bounds the pauses after conflicts. They are short, because the other transaction
// has already committed.
var conflictRetry = Retry{Base: time.Millisecond, Max: 100 * time.Millisecond}

// Update runs do in a transaction and commits it. After a conflict with a concurrent commit it runs do
// again, in a new transaction with a fresh snapshot, until it succeeds or ctx ends. So every effect of
// do that does not go through tx must be harmless if it happens twice. An error of do rolls back and is
// returned.
//
//	err := c.Update(ctx, func(tx *client.Txn) error {
//		v, err := tx.Get(from)
//		...
//		return tx.Put(from, rest)
//	})
//
// If the connection breaks during the commit, Update asks the server what became of it. If the commit did not
// happen, do is run again. Only if the server does not answer until ctx ends is the error's OutcomeUnknown true.
func (c *Client) Update(ctx context.Context, do func(tx *Txn) error, options ...TxnOption) error {
	return c.transact(ctx, do, options)
}

// View is Update for a function that only reads, all at one epoch. It never conflicts, and is
// repeated when the connection breaks.
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

// attempts counts the conflicts and failures of a transaction.
type attempts struct{ conflicts, failures int }

// mayAttempt waits until the next attempt is due. It is false if there is none: after conflicts
// there is one until ctx ends, after other failures as many as for any call.
func (c *Client) mayAttempt(ctx context.Context, made *attempts, e *Error, safely repeatability) bool {
	if errors.Is(e, ErrConflict) {
		made.conflicts++
		return conflictRetry.pause(ctx, made.conflicts, e)
	}
	made.failures++
	return made.failures < c.retry.Attempts && mayRepeat(e, safely) && c.retry.pause(ctx, made.failures, e)
}

// causeOf finds what made an attempt fail, and whether running it twice is safe: it is, unless the
// commit of a transaction that may write was sent. The error is nil if the transaction itself did
// not fail, but its function did.
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
