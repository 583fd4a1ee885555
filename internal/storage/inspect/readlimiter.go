package inspect

import (
	"context"
	"time"
)

// readLimiter bounds the rate at which pages are read.
type readLimiter struct {
	began          time.Time
	pagesPerSecond int
	calls          uint
}

// wait returns when the next page may be read, given the number of pages that were read so far.
func (p *readLimiter) wait(ctx context.Context, read uint64) error {
	if p.calls++; p.calls%64 != 0 {
		return nil
	}
	if p.pagesPerSecond <= 0 {
		return ctx.Err()
	}
	due := p.began.Add(time.Duration(float64(read) / float64(p.pagesPerSecond) * float64(time.Second)))
	select {
	case <-ctx.Done():
	case <-time.After(time.Until(due)):
	}
	return ctx.Err()
}
