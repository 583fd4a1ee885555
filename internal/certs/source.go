package certs

import (
	"context"
	"crypto/tls"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// checkEvery is how often the stamps of the files are compared with those of the last load.
	checkEvery = 10 * time.Second
	// stableFor is how long changed files must have kept their stamps before they are read.
	stableFor = time.Second
	// openAttempts and openPause are how often, and after which pause, the first load is tried while the
	// files are being replaced.
	openAttempts, openPause = 10, 100 * time.Millisecond
)

// Source has the current TLS configuration. Its methods may be called from many goroutines.
type Source struct {
	files          Files
	now            func() time.Time
	every, settles time.Duration

	current atomic.Pointer[state] // never nil

	reloads, failures atomic.Uint64

	reading sync.Mutex // held while files are read, which may take long; before mu

	mu   sync.Mutex      // a leaf; guards what follows
	seen [filesMax]stamp // of the last load, also of one that failed
	err  error           // of the last load
}

// Open loads the files for the first time.
func Open(files Files) (*Source, error) { return open(files, time.Now) }

func open(files Files, now func() time.Time) (*Source, error) {
	s := &Source{files: files, now: now, every: checkEvery, settles: stableFor}
	for attempt := 1; ; attempt++ {
		s.seen = files.stamps()
		first, err := files.load(now)
		if err == nil {
			s.current.Store(first)
			return s, nil
		}
		if !errors.Is(err, errChanging) || attempt == openAttempts {
			return nil, err
		}
		time.Sleep(openPause)
	}
}

// Config is the configuration for the next handshake. It must not be changed, and is another one
// after each reload that changed something.
func (s *Source) Config() *tls.Config { return s.current.Load().config }

// Info is about the configuration in force.
func (s *Source) Info() Info { return s.current.Load().info }

// Err is the error of the last reload, or nil. The configuration in force is then an older one.
func (s *Source) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Reloads counts reloads that succeeded, also those without a change, and those that failed.
func (s *Source) Reloads() (succeeded, failed uint64) { return s.reloads.Load(), s.failures.Load() }

// Reload reads the files, checks all of them, and replaces the configuration if they differ. If
// anything is wrong, the configuration stays as it is.
func (s *Source) Reload() (changed bool, err error) {
	s.reading.Lock()
	defer s.reading.Unlock()
	next, err := s.read()
	return s.take(next, err)
}

// retry reads the files again after a load that failed: what was wrong may have ended without a change
// of the files, such as their permissions, or a clock that differed from that of the authority. It reports
// false if no load has failed, or if the error is the same.
func (s *Source) retry() (again, changed bool, err error) {
	s.reading.Lock()
	defer s.reading.Unlock()
	last := s.Err()
	if last == nil {
		return false, false, nil
	}
	next, err := s.read()
	if err != nil && err.Error() == last.Error() {
		return false, false, nil
	}
	changed, err = s.take(next, err)
	return true, changed, err
}

// read loads the files. s.reading is held.
func (s *Source) read() (*state, error) {
	seen := s.files.stamps()
	s.mu.Lock()
	s.seen = seen
	s.mu.Unlock()
	return s.files.load(s.now)
}

// take counts a load, and puts it in force if it differs. s.reading is held.
func (s *Source) take(next *state, err error) (changed bool, _ error) {
	s.mu.Lock()
	s.err = err
	s.mu.Unlock()
	if err != nil {
		s.failures.Add(1)
		return false, err
	}
	s.reloads.Add(1)
	if next.digest == s.current.Load().digest { // keep the session tickets
		return false, nil
	}
	s.current.Store(next)
	return true, nil
}

// changed reports whether the files differ from the last load, and their stamps.
func (s *Source) changed() (stamps [filesMax]stamp, changed bool) {
	stamps = s.files.stamps()
	s.mu.Lock()
	defer s.mu.Unlock()
	return stamps, stamps != s.seen
}

// Watch reloads the files when they have changed and are stable, and when the last load has failed, until
// ctx ends. It tells the result of each reload, and the same error once.
func (s *Source) Watch(ctx context.Context, told func(changed bool, err error)) {
	ticker := time.NewTicker(s.every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if s.stable(ctx) {
			told(s.Reload())
		} else if again, changed, err := s.retry(); again && ctx.Err() == nil {
			told(changed, err)
		}
	}
}

// stable waits until changed files have kept their stamps for a while. It reports false if they have
// not changed, or ctx has ended.
func (s *Source) stable(ctx context.Context) bool {
	before, changed := s.changed()
	for changed {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(s.settles):
		}
		var now [filesMax]stamp
		if now, changed = s.changed(); now == before {
			return changed
		}
		before = now
	}
	return false
}
