package server

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/protobuf/proto"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// heldTarget does not list anything until it is released, or as long as the caller waits.
type heldTarget struct {
	objectstore.Store // nil
	began, released   chan struct{}
	lists             atomic.Int32
}

var errHeldTarget = errors.New("the target has nothing")

func (t *heldTarget) List(ctx context.Context, _ string, _ func(objectstore.Object) error) error {
	t.lists.Add(1)
	t.began <- struct{}{}
	select {
	case <-t.released:
		return errHeldTarget
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (t *heldTarget) String() string { return "held" }

// serverBeside is a server that has nothing but an archive, to a target that is held.
func serverBeside(t *testing.T) (*Server, *heldTarget) {
	target := &heldTarget{began: make(chan struct{}, 100), released: make(chan struct{})}
	s := new(Server)
	s.drain.init()
	s.feed.archive = archive.New(nil, archive.Options{Target: target, Identity: func() archive.Identity { return archive.Identity{} }})
	t.Cleanup(func() {
		s.drain.noRequests()
		s.drain.background.Wait()
	})
	return s, target
}

// waitsContext says when something waits for it.
type waitsContext struct {
	context.Context
	waited func()
}

func (c *waitsContext) Done() <-chan struct{} {
	c.waited()
	return c.Context.Done()
}

// TestRequestsForTheArchiveShareOneLook: each list of the archive has thousands of files in memory, and processors.
func TestRequestsForTheArchiveShareOneLook(t *testing.T) {
	s, target := serverBeside(t)
	ask := func(ctx context.Context) error {
		_, err := s.look().wait(ctx)
		return err
	}
	given, giveUp := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() { first <- ask(given) }()
	<-target.began
	const others = 30
	var waiting sync.WaitGroup
	waiting.Add(others)
	answers := make(chan error, others)
	for range others {
		go func() { answers <- ask(&waitsContext{t.Context(), sync.OnceFunc(waiting.Done)}) }()
	}
	waiting.Wait()
	giveUp()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("the request that began the look, and was given up: %v", err)
	}
	close(target.released)
	for range others {
		if err := <-answers; !errors.Is(err, errHeldTarget) {
			t.Errorf("another one: %v", err)
		}
	}
	if n := target.lists.Load(); n != 1 {
		t.Errorf("%d requests have listed the archive %d times", others+1, n)
	}
	if err := ask(t.Context()); !errors.Is(err, errHeldTarget) || target.lists.Load() != 2 {
		t.Errorf("a later request: %v, after %d lists", err, target.lists.Load())
	}
}

// TestALookAtTheArchiveEndsWithoutItsRequests: by its own time, and when the server has no request left.
func TestALookAtTheArchiveEndsWithoutItsRequests(t *testing.T) {
	for want, end := range map[error]func(*Server){context.DeadlineExceeded: func(*Server) {}, context.Canceled: func(s *Server) { s.drain.noRequests() }} {
		t.Run(want.Error(), func(t *testing.T) {
			t.Parallel() // one waits for two seconds
			s, target := serverBeside(t)
			ctx, giveUp := context.WithCancel(t.Context())
			giveUp()
			l := s.look()
			<-target.began
			if _, err := l.wait(ctx); !errors.Is(err, context.Canceled) {
				t.Errorf("the request: %v", err)
			}
			end(s)
			if <-l.done; !errors.Is(l.err, want) {
				t.Errorf("the look has found: %v", l.err)
			}
		})
	}
}

// TestAStatusOfTheArchiveIsThatOfTheLook: clients that ask while one runs get what it finds.
func TestAStatusOfTheArchiveIsThatOfTheLook(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "archive")
	h := mustStart(t, func(c *config.Config) { c.Archive.URL = dir })
	l := &archiveLook{status: h.feed.archive.Status(), done: make(chan struct{})}
	setLook := func(l *archiveLook) {
		h.feed.looks.mu.Lock()
		defer h.feed.looks.mu.Unlock()
		h.feed.looks.now = l
	}
	setLook(l)
	answers := make(chan *pb.ArchiveStatusResponse, 4)
	for range cap(answers) {
		go func() {
			answer, err := h.admin.ArchiveStatus(testContext(t), new(pb.ArchiveStatusRequest))
			if err != nil {
				t.Error(err)
			}
			answers <- answer
		}()
	}
	l.intervals = []*pb.ArchiveInterval{{FirstEpoch: 7, LastEpoch: 9}, {FirstEpoch: 11, LastEpoch: 11, OldestUs: 1, NewestUs: 2}}
	close(l.done)
	for range cap(answers) {
		got := <-answers
		if len(got.GetIntervals()) != 2 || !proto.Equal(got.Intervals[0], l.intervals[0]) || !proto.Equal(got.Intervals[1], l.intervals[1]) {
			t.Errorf("an answer while the look runs: %v", got)
		}
	}
	setLook(nil)
	if s, err := h.admin.ArchiveStatus(testContext(t), new(pb.ArchiveStatusRequest)); err != nil || len(s.GetIntervals()) == 2 {
		t.Errorf("an answer after it: %v, %v", s, err)
	}
}
