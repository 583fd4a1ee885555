package client

import (
	"context"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc"
)

// Retry says how often and how fast calls are repeated.
type Retry struct {
	// Attempts is the largest number of times that a call is made; 1 turns repeating off.
	Attempts int
	// Base and Max bound the pause before the next attempt. The bound doubles from Base. The pause
	// is drawn at random between half of the bound and the bound, so that clients that failed
	// together do not return together. The pause that the server asks for is added.
	Base, Max time.Duration
}

// Five attempts span 0.75 to 1.5 s: enough for a server's restart, not for an outage.
var retryDefault = Retry{Attempts: 5, Base: 100 * time.Millisecond, Max: 2 * time.Second}

// repeatability says what may be done with a call that failed.
type repeatability bool

// safe calls may be sent twice: reads, and writes with a request id.
const safe repeatability = true

// mayRepeat is the one place that decides whether a call is made again.
func mayRepeat(e *Error, r repeatability) bool {
	return e.Retryable() && (r == safe || !e.OutcomeUnknown())
}

// pause waits before attempt number attempt+1. It is false if ctx ends first, or would end first.
func (r Retry) pause(ctx context.Context, attempt int, e *Error) bool {
	bound := r.Max
	if shift := attempt - 1; shift < 32 {
		bound = min(r.Max, r.Base<<shift)
	}
	wait := e.RetryAfter
	if bound > 0 {
		wait += bound/2 + rand.N(bound-bound/2)
	}
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < wait {
		return false
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// call makes a unary call and repeats it while that is safe.
func call[Request, Response any](
	ctx context.Context, c *Client, r repeatability,
	method func(context.Context, Request, ...grpc.CallOption) (Response, error), request Request,
) (Response, error) {
	response, _, err := repeat(ctx, c, r, method, request, func(*Error) bool { return false })
	return response, orNil(err)
}

// repeat is call. If the first attempt fails, mend may change the request so that it is made again at once. The result lost
// says that the outcome of an attempt before the last one is unknown.
func repeat[Request, Response any](
	ctx context.Context, c *Client, r repeatability,
	method func(context.Context, Request, ...grpc.CallOption) (Response, error), request Request, mend func(*Error) bool,
) (response Response, lost bool, _ *Error) {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	for attempt := 1; ; attempt++ {
		response, err := method(ctx, request)
		if err == nil {
			return response, lost, nil
		}
		e := newError(err)
		if attempt == 1 && c.retry.Attempts > 1 && mend(e) {
			continue
		}
		if e.earlierLost = lost; attempt >= c.retry.Attempts || !mayRepeat(e, r) || !c.retry.pause(ctx, attempt, e) {
			var none Response
			return none, lost, e
		}
		lost = e.OutcomeUnknown()
	}
}
