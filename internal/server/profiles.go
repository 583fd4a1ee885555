package server

import (
	"context"
	"net/http"
	"net/http/pprof"
	"time"
)

const (
	// profileTime is how long a client may take for its profile. The next profile waits meanwhile.
	profileTime = 30 * time.Second
	// profilePatience is how long a request waits for its turn.
	profilePatience = time.Minute
	// profileRestMax bounds the rest after a profile.
	profileRestMax = time.Second
	// traceLagMax is how long a trace may wait for its client.
	traceLagMax = 5 * time.Second
	// symbolBytesMax bounds the addresses that a request asks the names of, which are kept in memory with their names: about 5,000.
	symbolBytesMax = 64 << 10
)

// profiles makes the profiles of /debug/pprof/ one after the other. To make one stops all goroutines, some milliseconds for each thousand of
// them and for each time that the list did not fit, and a list has up to 64 MiB until its client has taken it: as many at once as there are
// connections left requests no time, and took more than the bound of memory. After each one the goroutines have as much time as it took.
type profiles struct {
	turn     chan struct{} // has room for the request that makes a profile
	time     time.Duration // for the client; constant, but for tests, as patience is
	patience time.Duration
	lag      time.Duration // of the client of a trace
}

func (p *profiles) init() {
	p.turn, p.time, p.patience, p.lag = make(chan struct{}, 1), profileTime, profilePatience, traceLagMax
}

// index serves the list of the profiles, and each of them.
func (p *profiles) index(w http.ResponseWriter, r *http.Request) { p.inTurn(w, r, pprof.Index) }

// symbol serves the names of addresses.
func (p *profiles) symbol(w http.ResponseWriter, r *http.Request) {
	r.Body = http.MaxBytesReader(w, r.Body, symbolBytesMax)
	p.inTurn(w, r, pprof.Symbol)
}

// inTurn calls a handler when none before it runs any more.
func (p *profiles) inTurn(w http.ResponseWriter, r *http.Request, serve http.HandlerFunc) {
	ctx, stop := context.WithTimeout(r.Context(), p.patience)
	defer stop()
	select {
	case p.turn <- struct{}{}:
	case <-ctx.Done():
		w.Header().Set("Retry-After", "10")
		http.Error(w, "another profile is being made", http.StatusServiceUnavailable)
		return
	}
	began := time.Now()
	defer func() { time.AfterFunc(min(time.Since(began), profileRestMax), func() { <-p.turn }) }()
	serve(&profileWriter{w, p.time, false}, r)
}

// profileWriter gives a client some time, from the first byte on.
type profileWriter struct {
	http.ResponseWriter
	time    time.Duration
	written bool
}

// Write implements http.ResponseWriter.
func (w *profileWriter) Write(b []byte) (int, error) {
	if !w.written {
		w.written = true
		_ = http.NewResponseController(w.ResponseWriter).SetWriteDeadline(time.Now().Add(w.time)) // otherwise it has the time of the server
	}
	return w.ResponseWriter.Write(b)
}

// trace serves an execution trace. The runtime keeps what its client has not taken, without a bound: a MiB for each second of some requests.
func (p *profiles) trace(w http.ResponseWriter, r *http.Request) {
	out := &traceWriter{ResponseWriter: w, left: p.lag, most: p.lag, now: time.Now}
	out.ended = out.now()
	pprof.Trace(out, r) // it ends with the context, which net/http ends when a write fails
	_ = http.NewResponseController(w).SetWriteDeadline(out.now().Add(p.lag))
}

// traceWriter lets the trace wait for its client for some time altogether, to which the time counts back in which it has nothing to write. So a
// client may be slow at times, but one that takes less than comes fails, however little it takes at a time.
type traceWriter struct {
	http.ResponseWriter
	left  time.Duration // for which it may wait
	most  time.Duration
	ended time.Time // of the last write
	now   func() time.Time
}

// Write implements http.ResponseWriter.
func (w *traceWriter) Write(b []byte) (int, error) {
	began := w.now()
	w.left = min(w.left+began.Sub(w.ended), w.most)
	_ = http.NewResponseController(w.ResponseWriter).SetWriteDeadline(began.Add(w.left)) // otherwise it has the time of the server
	n, err := w.ResponseWriter.Write(b)
	w.ended = w.now()
	w.left -= w.ended.Sub(began)
	return n, err
}
