package main

import (
	"fmt"
	"time"

	"github.com/schollz/progressbar/v3"
)

// progress shows a person how far a long command is, and says at the end how fast it was. On anything but a terminal it
// only does the latter.
type progress struct {
	app     *app
	verb    string // past tense, such as "imported"
	bar     *progressbar.ProgressBar
	began   time.Time
	records uint64
	bytes   uint64 // of keys and values
}

// newProgress starts the clock. Total is the number of bytes that advance will be told in the end, or -1.
func (a *app) newProgress(verb string, total int64) *progress {
	p := &progress{app: a, verb: verb, began: time.Now()}
	if a.errTerminal {
		p.bar = progressbar.NewOptions64(total,
			progressbar.OptionSetWriter(a.err),
			progressbar.OptionSetDescription(verb),
			progressbar.OptionShowBytes(true),
			progressbar.OptionThrottle(100*time.Millisecond),
			progressbar.OptionClearOnFinish(),
		)
	}
	return p
}

// advance moves the bar.
func (p *progress) advance(bytes int) {
	if p.bar != nil {
		_ = p.bar.Add(bytes) // a bar that cannot be drawn is no reason to end the work
	}
}

// add counts records, and the bytes of their keys and values.
func (p *progress) add(records, bytes int) {
	p.records += uint64(records)
	p.bytes += uint64(bytes)
}

// finish takes the bar away and tells the throughput.
func (p *progress) finish() {
	if p.bar != nil {
		_ = p.bar.Finish()
	}
	seconds := max(time.Since(p.began).Seconds(), 1e-3)
	_, _ = fmt.Fprintf(p.app.err, "%s %d records, %s in %.2f s (%.0f records/s, %s/s)\n", p.verb, p.records, size(p.bytes),
		seconds, float64(p.records)/seconds, size(uint64(float64(p.bytes)/seconds)))
}
