package pager

import (
	"sync"

	"github.com/epochkv/epochkv/internal/storage/page"
)

// Sink takes finished pages from several goroutines at once, in any order. Each call borrows one of a few
// writers. It prefers the writer that has the preceding page, so that neighbours are still written in one
// piece.
type Sink struct {
	ck   *Checkpoint
	mu   sync.Mutex
	idle []*Writer
}

// Sink returns a new sink of the checkpoint. Flush it before Commit.
func (ck *Checkpoint) Sink() *Sink { return &Sink{ck: ck} }

// AllocExtent takes at least one and at most n neighbouring pages. Pages that are not written are free
// again when the checkpoint ends.
func (s *Sink) AllocExtent(n int) (first page.ID, count int, err error) {
	e := s.ck.AllocExtent(n)
	return e.First, e.Count, nil
}

// WritePage takes page id, complete and sealed. The caller may reuse p afterwards.
func (s *Sink) WritePage(id page.ID, p []byte) error {
	w := s.borrow(id)
	err := w.Write(id, p)
	s.mu.Lock()
	s.idle = append(s.idle, w)
	s.mu.Unlock()
	return err
}

func (s *Sink) borrow(id page.ID) *Writer {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.idle)
	if n == 0 {
		return s.ck.Writer()
	}
	take := n - 1
	for i, w := range s.idle {
		if w.follows(id) {
			take = i
			break
		}
	}
	w := s.idle[take]
	s.idle[take] = s.idle[n-1]
	s.idle = s.idle[:n-1]
	return w
}

// Flush writes the pages that the writers hold. No WritePage may be running.
func (s *Sink) Flush() error {
	for _, w := range s.idle {
		if err := w.Flush(); err != nil {
			return err
		}
	}
	return nil
}
