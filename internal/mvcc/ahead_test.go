//go:build invariants

package mvcc

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// slowNeighbour stops a commit after its reservation, so that nothing after it becomes visible until end is called.
func slowNeighbour(t *testing.T, s *Store) (epoch keys.Epoch, end func()) {
	t.Helper()
	x := mustSession(t, s)
	h := haltAtStep(t, x, stepReserved, asyncPut(x, "neighbour", "slow"))
	return s.Visible() + 1, sync.OnceFunc(func() {
		if o := h.end(); o.err != nil {
			t.Error(o.err)
		}
		x.Close()
	})
}

// apart are keys that share no latch with each other or with that of the neighbour.
func apart(s *Store, n int) (list []string) {
	used := map[int]bool{}
	for i := -1; len(list) < n; i++ {
		key := "neighbour"
		if i >= 0 {
			key = "own-" + strconv.Itoa(i)
		}
		var set latchSet
		set.add(s.latches, keys.Append(nil, keys.SpaceUser, []byte(key)))
		if !used[set.only] && i >= 0 {
			list = append(list, key)
		}
		used[set.only] = true
	}
	return list
}

// TestSessionRunsAheadOfASlowNeighbour: while a neighbour with a smaller epoch is being installed, a session commits
// epochsAheadMax times. The next commit waits, and a context that ends leaves no trace of it. No reader sees any of the
// commits before the neighbour is installed, and then they are all there, in their order.
func TestSessionRunsAheadOfASlowNeighbour(t *testing.T) {
	s := mustOpen(t, quiet(vfs.NewMem()))
	mustPut(t, s, "before", "1")
	epoch, end := slowNeighbour(t, s)
	defer end()
	x := mustSession(t, s)
	defer x.Close()
	list := apart(s, epochsAheadMax+1)
	for i, key := range list[:epochsAheadMax] {
		got, err := asyncPut(x, key, strconv.Itoa(i))()
		if want := epoch + 1 + keys.Epoch(i); err != nil || got != want {
			t.Fatalf("commit %d got epoch %d, %v; want %d", i, got, err, want)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), aMoment)
	defer cancel()
	var w Write
	w.Set([]byte(list[epochsAheadMax]), nil)
	if _, err := x.Commit(ctx, &w); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a commit further ahead than %d: %v", epochsAheadMax, err)
	}
	if all := dump(t, s); len(all) != 1 || s.Visible() != epoch-1 {
		t.Errorf("before the neighbour is installed a reader sees %v at %d", all, s.Visible())
	}
	end()
	if err := s.Wait(t.Context(), epoch+epochsAheadMax, DurabilityAsync); err != nil {
		t.Fatal(err)
	}
	if all := dump(t, s); len(all) != 2+epochsAheadMax {
		t.Errorf("after it a reader sees %v", all)
	}
	for i, key := range list[:epochsAheadMax] {
		before, at := get(t, s, key, epoch+keys.Epoch(i)), get(t, s, key, epoch+1+keys.Epoch(i))
		if before != "-" || at != strconv.Itoa(i) {
			t.Errorf("%s is %s one epoch before its commit, and %s at it", key, before, at)
		}
	}
	if next, err := asyncPut(x, list[epochsAheadMax], "")(); err != nil || next != epoch+epochsAheadMax+1 {
		t.Errorf("the next commit got epoch %d, %v", next, err)
	}
}

// TestSessionAheadSeesItsOwnWritesInConditions: conditions and operations see the commits of their own session that are
// not visible yet, and an outcome that reveals them is returned once they are visible. A snapshot after Wait has them.
func TestSessionAheadSeesItsOwnWritesInConditions(t *testing.T) {
	s := mustOpen(t, quiet(vfs.NewMem()))
	mustPut(t, s, "before", "1")
	epoch, end := slowNeighbour(t, s)
	defer end()
	x := mustSession(t, s)
	defer x.Close()
	key := apart(s, 1)[0]
	first, err := asyncPut(x, key, "1")()
	if err != nil {
		t.Fatal(err)
	}
	w := Write{Durability: DurabilityAsync}
	w.Conditions = []Condition{{Kind: ValueEquals, Key: []byte(key), Value: []byte("1")}, {Kind: EpochEquals, Key: []byte(key), Epoch: first}}
	w.Set([]byte(key), []byte("2"))
	if _, err := x.Commit(t.Context(), &w); err != nil {
		t.Fatalf("compare-and-set of the session's own write: %v", err)
	}
	out := make([]Invoked, 1)
	if _, err := x.InvokeAll(t.Context(), []Invoke{{Kind: InvokeAdd, Key: []byte(key), Delta: 3}}, nil, DurabilityAsync, out); err != nil || string(out[0].Old) != "2" {
		t.Fatalf("an addition saw %q, %v", out[0].Old, err)
	}
	if s.Visible() >= epoch {
		t.Fatal("the neighbour is visible: this tests nothing")
	}
	refused := make(chan error, 1)
	go func() {
		w := Write{Durability: DurabilityAsync}
		w.Conditions = []Condition{{Kind: KeyAbsent, Key: []byte(key)}}
		w.Set([]byte(key), nil)
		_, err := x.Commit(context.Background(), &w)
		refused <- err
	}()
	select {
	case err := <-refused:
		t.Errorf("an error reveals what is not visible: %v", err)
		refused <- err
	case <-time.After(aMoment):
	}
	end()
	if err := <-refused; !errors.As(err, new(*PreconditionError)) {
		t.Errorf("the refused condition: %v", err)
	}
	if got := get(t, s, key, 0); got != "5" {
		t.Errorf("the key is %s in the end", got)
	}
}

// TestSessionsAheadLeaveRoomInTheRing: every session of the store runs as far ahead as it can, in rounds, and all epochs
// become visible. The ring has room for them: otherwise an assertion fails.
func TestSessionsAheadLeaveRoomInTheRing(t *testing.T) {
	o := quiet(vfs.NewMem())
	o.Limits.Sessions = 63 - ownSessionsMax - epochsAheadMax // all that the smallest ring holds
	s := mustOpen(t, o)
	if ring := len(s.watermark.ring); ring != 64 {
		t.Fatalf("the ring has %d entries: this tests nothing", ring)
	}
	_, end := slowNeighbour(t, s)
	defer end()
	ctx, cancel := context.WithTimeout(t.Context(), 10*aMoment)
	defer cancel()
	var writers sync.WaitGroup
	for i := range o.Limits.Sessions - 1 {
		x := mustSession(t, s)
		writers.Go(func() {
			defer x.Close()
			for n := 0; ; n++ {
				w := Write{Durability: DurabilityAsync}
				w.Set(fmt.Appendf(nil, "%d/%d", i, n), nil)
				if _, err := x.Commit(ctx, &w); err != nil {
					return
				}
			}
		})
	}
	writers.Wait()
	end()
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	if newest := s.engine.SealedEpoch(); s.Visible() != newest || newest <= epochsAheadMax {
		t.Errorf("visible is %d of %d", s.Visible(), newest)
	}
}

// TestOutcomeThatWritesNothingIsVisible: operations that do not apply, and those that fail, tell of the newest commit of
// their key, which may be before a slow neighbour in its installation. They return once a reader that begins then sees it, too.
func TestOutcomeThatWritesNothingIsVisible(t *testing.T) {
	absent := []Condition{{Kind: KeyAbsent, Key: []byte("neither")}}
	for name, attempt := range map[string]struct {
		op         Invoke
		conditions func(key []byte) []Condition
		fails      bool
	}{
		"put if absent": {op: Invoke{Kind: InvokePutIfAbsent}},
		"comparison":    {op: Invoke{Kind: InvokeCompareSet, Expect: []byte("other")}},
		"wrong type":    {op: Invoke{Kind: InvokeAdd, Delta: 1}, fails: true},
		"condition that holds": {op: Invoke{Kind: InvokeCompareSet, Key: []byte("missing")}, conditions: func(key []byte) []Condition {
			return append([]Condition{{Kind: KeyPresent, Key: key}}, absent...)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := mustOpen(t, quiet(vfs.NewMem()))
			_, end := slowNeighbour(t, s)
			defer end()
			x, y := mustSession(t, s), mustSession(t, s)
			defer x.Close()
			defer y.Close()
			key := []byte(apart(s, 1)[0])
			epoch, err := asyncPut(x, string(key), "text")()
			if err != nil {
				t.Fatal(err)
			}
			op, out, told := attempt.op, make([]Invoked, 1), make(chan error, 1)
			if op.Key == nil {
				op.Key = key
			}
			var conditions []Condition
			if attempt.conditions != nil {
				conditions = attempt.conditions(key)
			}
			go func() {
				_, err := y.InvokeAll(context.Background(), []Invoke{op}, conditions, DurabilityAsync, out)
				told <- err
			}()
			select {
			case err := <-told:
				t.Errorf("told at visible %d of epoch %d: %v", s.Visible(), epoch, err)
				told <- err
			case <-time.After(aMoment):
			}
			end()
			if err := <-told; (err != nil) != attempt.fails {
				t.Error(err)
			}
			if s.Visible() < epoch {
				t.Errorf("visible is %d of %d", s.Visible(), epoch)
			}
		})
	}
}
