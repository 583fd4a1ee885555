package certs

import (
	"context"
	"crypto/tls"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// checkEvery is how often the stamps of the files are compared with those of the last load.
	checkEvery = 10 * time.Second
	// stableFor is how long changed files must have kept their stamps before they are read.
	stableFor = time.Second
)

// Source has the current TLS configuration. Its methods may be called from many goroutines.
type Source struct {
	files          Files
	now            func() time.Time
	every, settles time.Duration

	current atomic.Pointer[state] // never nil

	reloads, failures atomic.Uint64

	mu   sync.Mutex // held while files are read; guards what follows
	seen [3]stamp   // of the last load, also of one that failed
	err  error      // of the last load
}

// Open loads the files for the first time.
func Open(files Files) (*Source, error) { return open(files, time.Now) }

func open(files Files, now func() time.Time) (*Source, error) {
	s := &Source{files: files, now: now, every: checkEvery, settles: stableFor}
	s.seen = files.stamps()
	first, err := files.load(now())
	if err != nil {
		return nil, err
	}
	s.current.Store(first)
	return s, nil
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
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = s.files.stamps()
	next, err := s.files.load(s.now())
	s.err = err
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
func (s *Source) changed() (stamps [3]stamp, changed bool) {
	stamps = s.files.stamps()
	s.mu.Lock()
	defer s.mu.Unlock()
	return stamps, stamps != s.seen
}

// Watch reloads the files when they have changed and are stable, until ctx ends. It tells the result
// of each reload.
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
		var now [3]stamp
		if now, changed = s.changed(); now == before {
			return changed
		}
		before = now
	}
	return false
}
