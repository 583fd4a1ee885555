//go:build invariants

package mvcc

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestLookUpSeesTheCutoffOfTheMergeThatDroppedTheRecord: between the begin of a look-up and its reading of the record the cut-off
// passes the id, and a merge drops the record. The id has expired; it must not count as one that was not applied.
func TestLookUpSeesTheCutoffOfTheMergeThatDroppedTheRecord(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	r := newRequest()
	if _, err := putOnce(t, x, r, "k", "v"); err != nil {
		t.Fatal(err)
	}
	x.committing.atStep = func(at commitStep) {
		if at != stepLookUp {
			return
		}
		x.committing.atStep = nil
		if err := s.advanceCutoff(t.Context(), s.newSession(), r.ID.Time()); err != nil {
			t.Error(err)
		}
		if err := s.Checkpoint(t.Context()); err != nil {
			t.Error(err)
		}
	}
	w := &Write{Durability: DurabilityAsync}
	w.Identify(r)
	w.Set([]byte("k"), []byte("again"))
	if _, err := x.Commit(t.Context(), w); !errors.As(err, new(*RequestExpiredError)) {
		t.Fatalf("the second attempt: %v", err)
	}
}

// TestRepeatedRequestIsAnsweredOnceItsFirstAttemptIsVisible: the first attempt is installed, and an older commit is not. A read after
// the answer of the second attempt must see the write.
func TestRepeatedRequestIsAnsweredOnceItsFirstAttemptIsVisible(t *testing.T) {
	for name, attempt := range map[string]func(ctx context.Context, x *Session, r *Request) error{
		"commit": func(ctx context.Context, x *Session, r *Request) error {
			w := &Write{Durability: DurabilityAsync}
			w.Identify(r)
			w.Set([]byte("k"), []byte("v"))
			_, err := x.Commit(ctx, w)
			return err
		},
		"outcome": func(ctx context.Context, x *Session, r *Request) error {
			out, err := x.Outcome(ctx, r)
			if err == nil {
				err = &AppliedError{out}
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := mustOpen(t, quiet(vfs.NewMem()))
			x, again, other := mustSession(t, s), mustSession(t, s), mustSession(t, s)
			h := haltAtStep(t, other, stepCopied, asyncPut(other, "neighbour", "slow"))
			r, w := newRequest(), &Write{Durability: DurabilityAsync}
			w.Identify(r)
			w.Set([]byte(elsewhere(s, "neighbour")), []byte("v"))
			if _, err := x.Commit(t.Context(), w); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), aMoment)
			defer cancel()
			if err := attempt(ctx, again, r); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("an answer before the write is visible: %v", err)
			}
			if end := h.end(); end.err != nil {
				t.Fatal(end.err)
			}
			ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			applied(t, attempt(ctx, again, r))
		})
	}
}

// TestSecondAttemptWaitsForTheFirstOne: while the first attempt is at any step before it is installed, the second one has
// no answer, and is then told of the first.
func TestSecondAttemptWaitsForTheFirstOne(t *testing.T) {
	for _, step := range []commitStep{stepLatched, stepChecked, stepReserved, stepCopied} {
		s := mustOpen(t, quiet(vfs.NewMem()))
		x, again := mustSession(t, s), mustSession(t, s)
		r := newRequest()
		put := func(x *Session) func() (epoch keys.Epoch, err error) {
			return func() (keys.Epoch, error) {
				w := &Write{Durability: DurabilityAsync}
				w.Identify(r)
				w.Set([]byte("k"), []byte("v"))
				return x.Commit(context.Background(), w)
			}
		}
		h := haltAtStep(t, x, step, put(x))
		second := make(chan error, 1)
		go func() {
			_, err := put(again)()
			second <- err
		}()
		select {
		case err := <-second:
			t.Errorf("step %d: the second attempt ends before the first: %v", step, err)
			second <- err
		case <-time.After(aMoment):
		}
		first := h.end()
		if first.err != nil {
			t.Fatal(first.err)
		}
		if out := applied(t, <-second); out.Epoch != first.epoch {
			t.Errorf("step %d: the second attempt is told of epoch %d, the first one has %d", step, out.Epoch, first.epoch)
		}
	}
}

// TestRotationDuringAnAttemptDoesNotHideIt: an epoch is reserved, the memtable rotates, and the next look-up learns how new the ids in the
// immutable one are. The record that is installed there afterwards is found.
func TestRotationDuringAnAttemptDoesNotHideIt(t *testing.T) {
	s := mustOpen(t, quiet(vfs.NewMem()))
	x, other := mustSession(t, s), mustSession(t, s)
	r, older := newRequest(), newRequest()
	r.ID = requestID(milliseconds(time.Now()) + 1000)
	if _, err := asyncPut(other, "before", "v")(); err != nil { // an empty memtable does not rotate
		t.Fatal(err)
	}
	w := &Write{Durability: DurabilityAsync}
	w.Identify(r)
	w.Set([]byte("k"), []byte("v"))
	h := haltAtStep(t, x, stepReserved, func() (keys.Epoch, error) { return x.Commit(t.Context(), w) })
	before := s.engine.Pin().ActiveSince()
	if err := s.engine.Rotate(t.Context()); err != nil || s.engine.Pin().ActiveSince() == before {
		t.Fatalf("not rotated: %v", err)
	}
	asked := &Write{Durability: DurabilityAsync}
	asked.Identify(older)
	asked.Set([]byte(elsewhere(s, "k")), []byte("v"))
	if _, err := other.Commit(t.Context(), asked); err != nil {
		t.Fatal(err)
	}
	first := h.end()
	if first.err != nil {
		t.Fatal(first.err)
	}
	_, err := putOnce(t, other, r, "k", "again")
	if out := applied(t, err); out.Epoch != first.epoch {
		t.Errorf("epoch %d, want %d", out.Epoch, first.epoch)
	}
}
