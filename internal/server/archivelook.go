package server

import (
	"context"
	"fmt"
	"sync"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/archive"
)

// Times of a look at the archive.
const (
	// intervalsTimeout bounds a look: the rest of the status is wanted most when the target does not answer.
	intervalsTimeout = 2 * time.Second
	// lookWaitMax is how long a request waits for a look, which may end a moment after its time.
	lookWaitMax = intervalsTimeout + time.Second
)

// archiveLooks let requests for the status of the archive share one look at it: a look lists the archive, and has thousands of its files in memory.
// A request that comes while a look runs gets the answer of that one, so none is older than lookWaitMax.
type archiveLooks struct {
	mu  sync.Mutex
	now *archiveLook // the one that runs; nil if none does
}

// archiveLook is what one look has found. Only done may be read before it is closed; status may, too.
type archiveLook struct {
	status archive.Status // from before it
	done   chan struct{}

	intervals []*pb.ArchiveInterval // never changed
	err       error
}

// look returns the look that runs, or begins one. It belongs to no request, and so ends with none.
func (s *Server) look() *archiveLook {
	looks := &s.feed.looks
	looks.mu.Lock()
	defer looks.mu.Unlock()
	if looks.now == nil {
		l := &archiveLook{status: s.feed.archive.Status(), done: make(chan struct{})}
		looks.now = l
		s.drain.background.Go(func() {
			l.intervals, l.err = s.archiveIntervals()
			looks.mu.Lock()
			defer looks.mu.Unlock()
			looks.now = nil
			close(l.done)
		})
	}
	return looks.now
}

func (s *Server) archiveIntervals() (list []*pb.ArchiveInterval, err error) {
	ctx, cancel := context.WithTimeout(s.drain.requests, intervalsTimeout)
	defer cancel()
	intervals, err := s.feed.archive.Intervals(ctx)
	for _, i := range intervals {
		list = append(list, &pb.ArchiveInterval{FirstEpoch: uint64(i.First), LastEpoch: uint64(i.Last), OldestUs: micros(i.Oldest), NewestUs: micros(i.Newest)})
	}
	return list, err
}

// wait returns what the look has found.
func (l *archiveLook) wait(ctx context.Context) ([]*pb.ArchiveInterval, error) {
	late := time.NewTimer(lookWaitMax)
	defer late.Stop()
	select {
	case <-l.done:
		return l.intervals, l.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-late.C:
		return nil, fmt.Errorf("the archive has not answered for %v", lookWaitMax)
	}
}
