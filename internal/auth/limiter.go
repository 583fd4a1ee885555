package auth

import (
	"fmt"
	"sync/atomic"
	"time"
)

// Limits bound what one user takes. A zero is no limit.
type Limits struct {
	Requests     uint32 // a second
	BytesIn      uint64 // a second
	BytesOut     uint64 // a second
	Streams      uint32 // open at once
	Watches      uint32
	Transactions uint32
}

// LimitError refuses what is above a limit of a user, of a network or of the store. Retry is after how long it may be permitted.
type LimitError struct {
	What  string
	Limit uint64
	Retry time.Duration
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("the limit of %s is %d", e.What, e.Limit)
}

// burst is for how long the rates of a user may be exceeded after a pause: a second's worth may come at once.
const burst = time.Second

// retryOpen is the advice to a client that has too much open: it has to close something first.
const retryOpen = time.Second

// Limiter applies the limits of a user to all its requests, on all its connections. A nil Limiter has no limits.
//
// It is shared by all processors, so a user with limits costs a few atomic operations on shared memory for each request.
type Limiter struct {
	limits  atomic.Pointer[Limits]
	rates   [rates]bucket
	open    [opens]atomic.Int64
	elapsed func() time.Duration // the monotonic clock
}

// What has a rate.
const (
	rateRequests = iota
	rateIn
	rateOut
	rates
)

// Resource is what a user may have open at once.
type Resource uint8

// Resources.
const (
	Streams Resource = iota
	Watches
	Transactions
	opens
)

var resourceNames = [...]string{Streams: "open streams", Watches: "open watches", Transactions: "open transactions"}

// NewLimiter makes a limiter. The clock is monotonic.
func NewLimiter(l Limits, elapsed func() time.Duration) *Limiter {
	x := &Limiter{elapsed: elapsed}
	x.Set(l)
	return x
}

// Set changes the limits. What has been taken stays taken, and is paid for at the new rate: a limit that was too low by mistake holds up
// nothing once it is raised. Requests beside it may be counted at the rate before.
func (x *Limiter) Set(l Limits) {
	if before := x.limits.Load(); before != nil {
		now := x.elapsed()
		x.rates[rateRequests].change(now, uint64(before.Requests), uint64(l.Requests))
		x.rates[rateIn].change(now, before.BytesIn, l.BytesIn)
		x.rates[rateOut].change(now, before.BytesOut, l.BytesOut)
	}
	x.limits.Store(&l)
}

// Request takes one request of so many bytes, or refuses it with a *LimitError. The bytes of a refused one have been received
// all the same. A message larger than a second's worth is permitted, and the next one waits accordingly longer.
func (x *Limiter) Request(bytes int) error {
	if x == nil {
		return nil
	}
	l, now := x.limits.Load(), x.elapsed()
	if l.BytesOut > 0 { // an answer is counted when it is sent; until it is paid for, requests wait
		if wait := x.rates[rateOut].take(now, l.BytesOut, 0); wait > 0 {
			return &LimitError{What: "bytes sent a second", Limit: l.BytesOut, Retry: wait}
		}
	}
	if l.BytesIn > 0 {
		if wait := x.rates[rateIn].take(now, l.BytesIn, uint64(bytes)); wait > 0 {
			return &LimitError{What: "bytes received a second", Limit: l.BytesIn, Retry: wait}
		}
	}
	if l.Requests > 0 {
		if wait := x.rates[rateRequests].take(now, uint64(l.Requests), 1); wait > 0 {
			return &LimitError{What: "requests a second", Limit: uint64(l.Requests), Retry: wait}
		}
	}
	return nil
}

// Sent takes the bytes of an answer, which is sent in any case.
func (x *Limiter) Sent(bytes int) {
	if x == nil {
		return
	}
	if l := x.limits.Load(); l.BytesOut > 0 {
		x.rates[rateOut].add(x.elapsed(), l.BytesOut, uint64(bytes))
	}
}

// Open takes one of a resource, or refuses it with a *LimitError. Every success needs a Close.
func (x *Limiter) Open(r Resource) error {
	if x == nil {
		return nil
	}
	l := x.limits.Load()
	limit := [...]uint32{Streams: l.Streams, Watches: l.Watches, Transactions: l.Transactions}[r]
	if n := x.open[r].Add(1); limit > 0 && n > int64(limit) {
		x.open[r].Add(-1)
		return &LimitError{What: resourceNames[r], Limit: uint64(limit), Retry: retryOpen}
	}
	return nil
}

// Close gives back what Open has taken.
func (x *Limiter) Close(r Resource) {
	if x != nil {
		x.open[r].Add(-1)
	}
}

// bucket is a token bucket as one number: the time at which all that was taken is paid for at the rate.
type bucket struct{ paid atomic.Int64 }

// take takes n at a rate per second, or takes nothing and returns how long that would have to wait.
func (b *bucket) take(now time.Duration, rate, n uint64) time.Duration {
	for {
		paid := b.paid.Load()
		if wait := time.Duration(paid) - now - burst + cost(rate, min(n, 1)); wait > 0 {
			return wait
		}
		if n == 0 || b.paid.CompareAndSwap(paid, int64(max(time.Duration(paid), now)+cost(rate, n))) {
			return 0
		}
	}
}

// add takes n whether it is permitted or not.
func (b *bucket) add(now time.Duration, rate, n uint64) {
	for {
		paid := b.paid.Load()
		if b.paid.CompareAndSwap(paid, int64(max(time.Duration(paid), now)+cost(rate, n))) {
			return
		}
	}
}

// change converts what is not paid for yet to another rate; zero is no limit, for which nothing has to be paid.
func (b *bucket) change(now time.Duration, before, after uint64) {
	for {
		paid := b.paid.Load()
		left, next := time.Duration(paid)-now, time.Duration(0)
		switch {
		case before == after:
			return
		case before > 0 && after > 0 && left > 0:
			next = now + time.Duration(min(float64(left)*float64(before)/float64(after), debtMax))
		}
		if b.paid.CompareAndSwap(paid, int64(next)) {
			return
		}
	}
}

// debtMax bounds what has to be paid after a limit was lowered: a century.
const debtMax = float64(100 * 365 * 24 * time.Hour)

// cost is how long n take at a rate.
func cost(rate, n uint64) time.Duration {
	return time.Duration(float64(n) / float64(rate) * float64(time.Second))
}
