package inspect

import (
	"context"
	"runtime"
	"time"
)

// readLimiter bounds the rate at which pages are read.
type readLimiter struct {
	began          time.Time
	pagesPerSecond int
	calls          uint
}

// yieldEvery is the number of pages, or of records of the log, that are read before others have the processor: some 100 µs.
const yieldEvery = 4

// wait returns when the next page may be read, given the number of pages that were read so far.
func (p *readLimiter) wait(ctx context.Context, read uint64) error {
	if p.calls++; p.calls%yieldEvery == 0 {
		runtime.Gosched() // pages may come from memory, and then nothing else lets others run
	}
	if p.calls%64 != 0 {
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
