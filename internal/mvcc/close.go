package mvcc

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// StuckError means that the store could not be closed in time: an operation of its device has not
// returned. The process should end: nothing else ends the operation, and the store cannot be used
// any more.
type StuckError struct {
	Step    string     // what Shutdown waited for
	Durable keys.Epoch // every commit up to here is on stable storage
	Visible keys.Epoch // commits after Durable up to here may be lost; no SYNC commit among them was acknowledged
}

func (e *StuckError) Error() string {
	lost := fmt.Sprintf("every commit is durable, up to epoch %d", e.Durable)
	if e.Visible > e.Durable {
		lost = fmt.Sprintf("commits after epoch %d up to %d may be lost, none of them a SYNC commit that was acknowledged", e.Durable, e.Visible)
	}
	return fmt.Sprintf("mvcc: the device does not answer: still waiting for %s; %s", e.Step, lost)
}

// Steps of closing.
var (
	stepSessions   = "sessions to end"
	stepBackground = "work in the background to end"
	stepMerge      = "the last checkpoint"
	stepFiles      = "the log to be synced and the files to be closed"
	stepClosed     = "nothing"
)

// lifecycle is how a store ends: its background goroutines, and how far closing has come.
type lifecycle struct {
	closing atomic.Bool
	step    atomic.Pointer[string] // what closing is doing; nil before
	stop    context.CancelFunc     // ends the background goroutines
	done    sync.WaitGroup         // of these goroutines
}

// Close refuses new work, makes every commit durable, and closes the files. Sessions must be closed before. Closing twice
// returns nil. It waits for the device for as long as that takes; Shutdown does not.
func (s *Store) Close() error { return s.Shutdown(context.Background()) }

// Shutdown is Close with a bound. The last checkpoint has half of the time until the deadline of
// ctx; without it the next start replays more of the log. When ctx ends, Shutdown returns Stuck,
// and the goroutine that does not return stays.
func (s *Store) Shutdown(ctx context.Context) error {
	if !s.sessions.close() {
		return nil
	}
	s.lifecycle.closing.Store(true)
	s.lifecycle.step.Store(&stepBackground)
	s.lifecycle.stop()
	ended := make(chan error, 1)
	go func() { ended <- s.close(ctx) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return s.Stuck()
	}
}

// Stuck says how far closing has come and what a process that ends now may lose.
func (s *Store) Stuck() *StuckError {
	e := &StuckError{Step: stepSessions, Durable: s.Durable(), Visible: s.Visible()}
	if step := s.lifecycle.step.Load(); step != nil {
		e.Step = *step
	}
	return e
}

// Closed reports whether closing has ended, in time or later.
func (s *Store) Closed() bool { return s.lifecycle.step.Load() == &stepClosed }

func (s *Store) close(ctx context.Context) error {
	s.lifecycle.done.Wait()
	s.lifecycle.step.Store(&stepMerge)
	err := s.mergeLast(ctx)
	s.lifecycle.step.Store(&stepFiles)
	err = errors.Join(err, s.engine.Close())
	s.lifecycle.step.Store(&stepClosed)
	return err
}

// mergeLast merges everything, so that the next start has nothing to replay. If it fails, the log
// has everything.
func (s *Store) mergeLast(ctx context.Context) error {
	ctx, cancel := halfOf(ctx)
	defer cancel()
	err := s.Checkpoint(ctx)
	if s.engine.Err() != nil || foundNoRoom(err) || err != nil && ctx.Err() != nil {
		return nil // known already, or the time was up
	}
	return err
}

// foundNoRoom reports whether a merge has failed only because there was no space, no log segment or no memory for it in time.
func foundNoRoom(err error) bool {
	return errors.Is(err, vfs.ErrNoSpace) || errors.Is(err, storage.ErrNoSegment) || errors.Is(err, ErrMemoryFull)
}

// halfOf is ctx with half of the time that it has left.
func halfOf(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, time.Until(deadline)/2)
}
