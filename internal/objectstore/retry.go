package objectstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"
)

// Retry says how often and how fast failures are tried again. Zero fields take the defaults.
type Retry struct {
	Attempts   int           // of one operation
	FirstPause time.Duration // before the second attempt; later pauses are twice as long each
	MaxPause   time.Duration
	MinRate    int64         // bytes per second; an attempt that is slower is ended and tried again
	Patience   time.Duration // that each attempt has besides
}

const (
	defaultAttempts   = 8
	defaultFirstPause = 200 * time.Millisecond
	defaultMaxPause   = 10 * time.Second
	defaultMinRate    = 256 << 10
	defaultPatience   = time.Minute
)

func (r Retry) withDefaults() Retry {
	if r.Attempts <= 0 {
		r.Attempts = defaultAttempts
	}
	if r.FirstPause <= 0 {
		r.FirstPause = defaultFirstPause
	}
	if r.MaxPause <= 0 {
		r.MaxPause = defaultMaxPause
	}
	if r.MinRate <= 0 {
		r.MinRate = defaultMinRate
	}
	if r.Patience <= 0 {
		r.Patience = defaultPatience
	}
	return r
}

// WithRetries is a store that repeats what has failed for a reason that may be over. Open uses it.
func WithRetries(inner Store, policy Retry) Store { return &retrying{inner, policy.withDefaults()} }

type retrying struct {
	inner Store
	retry Retry
}

func (s *retrying) String() string { return s.inner.String() }

// Create repeats a creation. An attempt whose outcome is unknown may have created the object: if the next one finds it, and
// it has the same bytes, this call has created it.
func (s *retrying) Create(ctx context.Context, name string, content Content) error {
	unknown := false
	return s.repeat(ctx, content.Size(), func(ctx context.Context) error {
		ctx, watch := s.watch(ctx, s.retry.limit(max(content.Size(), streamPartBytes)))
		defer watch.end()
		watched := &watchedContent{content, watch}
		err := s.inner.Create(ctx, name, watched)
		if unknown && errors.Is(err, ErrExists) {
			return watch.explain(compare(ctx, s, name, watched, err))
		}
		unknown = unknown || err != nil
		return watch.explain(err)
	})
}

// compare returns nil if an object has this content, and otherwise the error of the creation.
func compare(ctx context.Context, s Store, name string, content Content, exists error) (err error) {
	stored, err := s.Read(ctx, name, 0, -1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stored.Close()) }()
	wanted, err := content.Open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, wanted.Close()) }()
	a, b := make([]byte, copyBytes), make([]byte, copyBytes)
	for {
		n, failed := io.ReadFull(stored, a)
		m, _ := io.ReadFull(wanted, b)
		ended := failed == io.EOF || failed == io.ErrUnexpectedEOF
		switch {
		case failed != nil && !ended:
			return failed
		case !bytes.Equal(a[:n], b[:m]):
			return exists
		case ended:
			return nil
		}
	}
}

// Read opens a reader that continues after a failure where it was.
func (s *retrying) Read(ctx context.Context, name string, offset, length int64) (io.ReadCloser, error) {
	r := &resumingReader{ctx: ctx, store: s, name: name, offset: offset, left: length}
	if err := s.repeat(ctx, -1, func(context.Context) error { return r.open() }); err != nil {
		return nil, err
	}
	return r, nil
}

// List repeats a list after what it has reported.
func (s *retrying) List(ctx context.Context, prefix string, each func(Object) error) error {
	last := ""
	var stopped error
	err := s.repeat(ctx, -1, func(ctx context.Context) error {
		ctx, watch := s.watch(ctx, s.retry.Patience)
		defer watch.end()
		err := s.inner.List(ctx, prefix, func(o Object) error {
			watch.rest()
			defer watch.wait()
			if o.Name <= last {
				return nil
			}
			last = o.Name
			stopped = each(o)
			return stopped
		})
		return watch.explain(err)
	}, func() bool { return stopped != nil })
	return err
}

// Delete repeats a deletion.
func (s *retrying) Delete(ctx context.Context, name string) error {
	return s.repeat(ctx, 0, func(ctx context.Context) error { return s.inner.Delete(ctx, name) })
}

// repeat calls an operation until it succeeds, fails for good, or has used up its attempts. With a known size each attempt
// has a time limit, so that a target that hangs is a temporary failure; without one, the operation watches its steps. The caller
// may stop the attempts.
func (s *retrying) repeat(ctx context.Context, size int64, operation func(context.Context) error, stopped ...func() bool) error {
	for attempt := 1; ; attempt++ {
		err := s.attempt(ctx, size, operation)
		switch {
		case err == nil, ctx.Err() != nil, len(stopped) > 0 && stopped[0]():
			return err
		case !isTemporary(err):
			return err
		case attempt == s.retry.Attempts:
			return fmt.Errorf("%d attempts failed: %w", attempt, err)
		}
		if err := s.pause(ctx, attempt); err != nil {
			return err
		}
	}
}

func (s *retrying) attempt(ctx context.Context, size int64, operation func(context.Context) error) error {
	if size < 0 {
		return operation(ctx)
	}
	limit := s.retry.limit(size)
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := operation(limited)
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		return fmt.Errorf("%w: no answer within %v: %w", errTemporary, limit, err)
	}
	return err
}

// limit is how long an attempt with so many bytes may take.
func (r *Retry) limit(size int64) time.Duration {
	return r.Patience + time.Duration(float64(size)/float64(r.MinRate)*float64(time.Second))
}

// isTemporary reports whether an error may be over after a pause.
func isTemporary(err error) bool {
	return errors.Is(err, errTemporary) || errors.Is(err, io.ErrUnexpectedEOF)
}

// pause waits before the attempt after this one: between half of the pause and all of it, so that clients do not come back
// together.
func (s *retrying) pause(ctx context.Context, attempt int) error {
	pause := s.retry.MaxPause
	if shift := attempt - 1; shift < 20 {
		pause = min(pause, s.retry.FirstPause<<shift)
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(pause/2 + rand.N(pause/2+1)):
		return nil
	}
}

// resumingReader reads an object although connections break.
type resumingReader struct {
	ctx    context.Context // of the read
	store  *retrying
	name   string
	offset int64
	left   int64 // negative for everything

	current  io.ReadCloser // nil after a failure
	watch    *stall        // of the current one
	failures int           // without a byte between them
}

func (r *resumingReader) open() (err error) {
	ctx, watch := r.store.watch(r.ctx, r.store.retry.Patience)
	r.current, err = r.store.inner.Read(ctx, r.name, r.offset, r.left)
	if err != nil {
		r.current = nil
		watch.end()
		return watch.explain(err)
	}
	watch.rest()
	r.watch = watch
	return nil
}

func (r *resumingReader) Read(p []byte) (int, error) {
	for {
		n, err := r.readOnce(p)
		if n > 0 {
			r.failures = 0
			return n, nil
		}
		if err == nil || errors.Is(err, io.EOF) || r.ctx.Err() != nil || !isTemporary(err) {
			return 0, err
		}
		if r.failures++; r.failures == r.store.retry.Attempts {
			return 0, fmt.Errorf("%d attempts failed: %w", r.failures, err)
		}
		if err := r.store.pause(r.ctx, r.failures); err != nil {
			return 0, err
		}
	}
}

// readOnce reads once. After an error the next call opens the object again, at the byte that is missing.
func (r *resumingReader) readOnce(p []byte) (int, error) {
	if r.left == 0 {
		return 0, io.EOF
	}
	if r.current == nil {
		if err := r.open(); err != nil {
			return 0, err
		}
	}
	r.watch.wait()
	n, err := r.current.Read(p)
	r.watch.rest()
	err = r.watch.explain(err)
	r.offset += int64(n)
	if r.left > 0 {
		r.left -= int64(n)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		_ = r.close() // it has failed already
	}
	return n, err
}

func (r *resumingReader) Close() error {
	if r.current == nil {
		return nil
	}
	return r.close()
}

// close has the patience of the watch, or ends with the caller's context: its own context must not have ended before.
func (r *resumingReader) close() error {
	r.watch.wait()
	err := r.watch.explain(r.current.Close())
	r.watch.end()
	r.current = nil
	return err
}
