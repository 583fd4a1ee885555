package inspect

import (
	"context"
	"time"
)

// pace keeps a reader of pages to a rate.
type pace struct {
	began          time.Time
	pagesPerSecond int
	calls          uint
}

// wait returns when it is time to read on, having read so many pages.
func (p *pace) wait(ctx context.Context, read uint64) error {
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
