package main

import (
	"time"

	"google.golang.org/grpc/codes"

	"github.com/epochkv/epochkv/client"
)

// errTxnSilence ends a transaction whose server does not answer.
var errTxnSilence = &client.Error{Code: codes.DeadlineExceeded, Message: "the server has not answered in the transaction"}

// within does what one answer of the transaction's stream ends, and breaks the stream if it does not come within the timeout. Other requests
// have a deadline of their own.
func (s *statements) within(do func() error) error {
	timer := time.AfterFunc(s.app.timeout, s.endTx)
	err := do()
	if timer.Stop() || err == nil || s.ctx.Err() != nil {
		return err
	}
	return errTxnSilence
}
