package inspect

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

// TestVerifyFindsAccountsThatDoNotAddUp breaks one account at a time, as a defect of the engine
// would.
func TestVerifyFindsAccountsThatDoNotAddUp(t *testing.T) {
	for name, breakIt := range map[string]func(ck *pager.Checkpoint, state *pager.State) error{
		"nothing": func(*pager.Checkpoint, *pager.State) error { return nil },
		"keys": func(_ *pager.Checkpoint, s *pager.State) error {
			s.Entries++
			return nil
		},
		"records of the store": func(_ *pager.Checkpoint, s *pager.State) error {
			s.Engine[120]++
			return nil
		},
		"bytes": func(_ *pager.Checkpoint, s *pager.State) error {
			s.EntryBytes--
			return nil
		},
		"a page that nothing reaches": func(ck *pager.Checkpoint, _ *pager.State) error {
			w := ck.Writer()
			id := ck.AllocExtent(1).First
			buf, err := w.Page(id)
			page.PutHeader(buf, page.Header{Type: page.TypeOverflow, ID: id, Checkpoint: ck.Number()})
			page.Seal(buf)
			return errors.Join(err, w.Flush())
		},
		"a page in use that is free": func(ck *pager.Checkpoint, _ *pager.State) error {
			ck.Free(ck.LiveFrom(2)[0])
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			s.put(0, 300, 50)
			s.put(300, 320, 2000)
			s.checkpoint()
			s.close()
			s.commitState(breakIt)
			s.open()
			kinds := s.verify()
			if sound := name == "nothing"; sound != (len(kinds) == 0) {
				t.Errorf("found %v", kinds)
			}
		})
	}
}

// commitState makes a checkpoint of the data file past the engine.
func (s *store) commitState(change func(ck *pager.Checkpoint, state *pager.State) error) {
	s.t.Helper()
	p, err := pager.Open(s.fs, storage.Files{FS: s.fs, Dir: "db"}.DataPath(), pager.Options{PageSize: 512})
	if err != nil {
		s.t.Fatal(err)
	}
	ck, err := p.Begin()
	if err != nil {
		s.t.Fatal(err)
	}
	state := p.State()
	if err := errors.Join(change(ck, &state), ck.Commit(s.t.Context(), state), p.Close()); err != nil {
		s.t.Fatal(err)
	}
}

// TestVerificationReadsOneStateWhileCheckpointsGoOn stops a verification in the middle while
// everything is overwritten five times: it reports the state with which it began, and finds nothing
// damaged.
func TestVerificationReadsOneStateWhileCheckpointsGoOn(t *testing.T) {
	s := newStore(t)
	s.put(0, 2000, 60)
	s.checkpoint()
	type outcome struct {
		report *VerifyReport
		err    error
	}
	reached, goOn := make(chan struct{}), make(chan struct{})
	done := make(chan outcome)
	go func() {
		var once sync.Once
		report, err := Verify(context.Background(), s.engine, VerifyOptions{Progress: func(VerifyProgress) {
			once.Do(func() {
				close(reached)
				<-goOn
			})
		}})
		done <- outcome{report, err}
	}()
	<-reached
	stats := s.engine.Stats()
	pinned := stats.Checkpoints.Newest
	for range 5 {
		s.put(0, 2000, 60)
		s.checkpoint()
	}
	close(goOn)
	out := <-done
	if out.err != nil || !out.report.OK() || !out.report.Accounted || out.report.Checkpoint != pinned {
		t.Fatalf("%+v, %v", out.report, out.err)
	}
	s.mustPinNothing()
}

// mustPinNothing fails if the pages of an old state, or log segments before the newest one, are
// kept, and closes the store.
func (s *store) mustPinNothing() {
	s.t.Helper()
	s.put(0, 2000, 60)
	s.checkpoint() // frees all pages of the state before it
	for range 3 {
		s.put(0, 1, 1)
		s.checkpoint()
	}
	stats := s.engine.Stats()
	if stats.Pages.Pending > stats.Pages.Live/2 {
		s.t.Errorf("%d pages are kept, and %d are live", stats.Pages.Pending, stats.Pages.Live)
	}
	if n := stats.Log.Segments; n > 6 { // a listing of the directory would meet segments that the log renames meanwhile
		s.t.Errorf("%d log segments are kept, and the tree is at %d", n, stats.Tree.Epoch)
	}
	if kinds := s.verify(); len(kinds) > 0 {
		s.t.Error(kinds)
	}
}

// TestCanceledVerificationReleasesItsState and the log, which a later checkpoint would keep
// otherwise.
func TestCanceledVerificationReleasesItsState(t *testing.T) {
	s := newStore(t)
	s.put(0, 2000, 60)
	s.checkpoint()
	for _, inspect := range []func(ctx context.Context) error{
		func(ctx context.Context) error {
			_, err := Verify(ctx, s.engine, VerifyOptions{PagesPerSecond: 10})
			return err
		},
		func(ctx context.Context) error {
			_, err := Space(ctx, s.engine, SpaceOptions{PagesPerSecond: 10})
			return err
		},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		if err := inspect(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		cancel()
	}
	s.mustPinNothing()
}
