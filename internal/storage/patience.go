package storage

import (
	"context"
	"time"
)

// A device may fail reads for a moment: a cable, a path to a disk array that is being replaced. What is lost to damage is
// decided when the data file is opened, so a start reads a page that the device fails again, after pauses of 10 ms, 20 ms, 40 ms and so on. With
// the default these take 1.3 s for a page and 4 s in all. A page that is still unreadable then is missing from the tables that the start
// rebuilds, and the next start rebuilds them again.
const (
	firstPauseShare = 400 // the first pause for a page is Options.StartPatience over this: 10 ms of 4 s
	pausesMax       = 7   // for one page
)

// patience decides whether a start reads a page again. It is for one goroutine.
type patience struct {
	ctx   context.Context
	first time.Duration // the first pause for a page
	left  time.Duration // for all pages
}

// again waits, and reports whether to read a page once more that the device has failed to read so many times.
func (p *patience) again(failed int) bool {
	pause := p.first << (failed - 1)
	if failed > pausesMax || pause > p.left {
		return false
	}
	p.left -= pause
	select {
	case <-time.After(pause):
		return true
	case <-p.ctx.Done():
		return false
	}
}
