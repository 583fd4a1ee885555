package mvcc

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// largeWrite is the smallest large commit by its operations, or by its bytes.
func largeWrite(name string, byBytes bool) *Write {
	w := &Write{Durability: DurabilityAsync}
	if byBytes {
		w.Set([]byte(name), make([]byte, turnBytes))
		return w
	}
	for i := range turnOperations {
		w.Set(fmt.Append(nil, name, i), nil)
	}
	return w
}

// takeAllTurns leaves none for others until they are given back.
func takeAllTurns(s *Store) (giveBack func()) {
	l := &s.turns.large
	l.mu.Lock()
	defer l.mu.Unlock()
	taken := l.free
	l.free = 0
	return sync.OnceFunc(func() {
		for range taken {
			l.leave()
		}
	})
}

// turnsTaken is how many turns commits have.
func turnsTaken(s *Store) int {
	l := &s.turns.large
	l.mu.Lock()
	defer l.mu.Unlock()
	return runtime.GOMAXPROCS(0) - l.free
}

// TestLargeCommitsTakeTurns: a small one needs none, a large one waits without latches for as long as its context lasts, and changes nothing if that ends.
func TestLargeCommitsTakeTurns(t *testing.T) {
	for _, byBytes := range []bool{false, true} {
		t.Run(fmt.Sprint("by bytes ", byBytes), func(t *testing.T) {
			s := mustOpen(t, tiny(vfs.NewMem()))
			if turnsTaken(s) != 0 {
				t.Errorf("%d turns are taken", turnsTaken(s))
			}
			giveBack := takeAllTurns(s)
			defer giveBack()
			x := mustSession(t, s)
			defer x.Close()
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			if _, err := x.Commit(ctx, largeWrite("expired", byBytes)); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("without a turn: %v", err)
			}
			done := startCommit(t, s, largeWrite("k", byBytes))
			conditional := largeWrite("c", byBytes) // which reads before it takes its turn for good
			for i := range turnOperations {
				conditional.Conditions = append(conditional.Conditions, Condition{Key: fmt.Append(nil, "none", i), Kind: KeyAbsent})
			}
			alsoDone := startCommit(t, s, conditional)
			for i := range turnOperations - 1 { // of its keys, so it has no latches; and smaller ones need no turn
				mustPutAsync(t, s, fmt.Sprint("k", i), "other")
			}
			small := largeWrite("small", byBytes)
			small.Reset()
			for i := range turnOperations - 1 {
				small.Set(fmt.Append(nil, "small", i), nil)
			}
			if _, err := x.Commit(t.Context(), small); err != nil {
				t.Error(err)
			}
			if len(done)+len(alsoDone) > 0 {
				t.Error("a large commit had no turn to wait for")
			}
			giveBack()
			for _, done := range []chan error{done, alsoDone} {
				if err := <-done; err != nil {
					t.Error(err)
				}
			}
			if get(t, s, "expired", 0) != "-" || get(t, s, "expired0", 0) != "-" {
				t.Error("a commit that was refused is there")
			}
		})
	}
}

// TestEveryEndOfACommitLeavesItsTurn: also an error, and TakeTurn without a commit.
func TestEveryEndOfACommitLeavesItsTurn(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Limits.BatchOps = 2 * turnOperations
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	failing := map[string]func(w *Write){
		"too many":      func(w *Write) { *w = *largeWriteOf(3 * turnOperations) },
		"twice":         func(w *Write) { w.Set([]byte("k1"), nil) },
		"a condition":   func(w *Write) { w.Conditions = []Condition{{Key: []byte("none"), Kind: KeyPresent}} },
		"nothing wrong": func(*Write) {},
	}
	for name, spoil := range failing {
		if err := x.TakeTurn(t.Context(), turnOperations); err != nil || turnsTaken(s) != 1 {
			t.Fatalf("%s: %v, %d turns are taken", name, err, turnsTaken(s))
		}
		w := largeWrite("k", false)
		spoil(w)
		if _, err := x.Commit(t.Context(), w); (err == nil) != (name == "nothing wrong") {
			t.Errorf("%s: %v", name, err)
		}
		if turnsTaken(s) != 0 {
			t.Errorf("%s: %d turns are taken for ever", name, turnsTaken(s))
		}
	}
	if err := x.TakeTurn(t.Context(), turnOperations-1); err != nil || turnsTaken(s) != 0 {
		t.Errorf("a small request: %v, %d turns", err, turnsTaken(s))
	}
	if err := x.TakeTurn(t.Context(), turnOperations); err != nil || turnsTaken(s) != 1 {
		t.Errorf("%v, %d turns", err, turnsTaken(s))
	}
	x.LeaveTurn()
	x.LeaveTurn()
	if turnsTaken(s) != 0 {
		t.Errorf("%d turns are taken for ever", turnsTaken(s))
	}
}

func largeWriteOf(operations int) *Write {
	w := &Write{Durability: DurabilityAsync}
	for i := range operations {
		w.Set(fmt.Append(nil, "many", i), nil)
	}
	return w
}

// TestATurnEndsAfterAWhile: a commit that waits for latches keeps it from others for no longer, and it is given back once.
func TestATurnEndsAfterAWhile(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	var keeping []*Session
	began := time.Now()
	for range runtime.GOMAXPROCS(0) {
		x := mustSession(t, s)
		defer x.Close()
		if err := x.TakeTurn(t.Context(), turnOperations); err != nil {
			t.Fatal(err)
		}
		keeping = append(keeping, x)
	}
	x := mustSession(t, s)
	defer x.Close()
	if _, err := x.Commit(t.Context(), largeWrite("k", false)); err != nil || time.Since(began) < turnMost {
		t.Errorf("beside turns that last: %v after %v", err, time.Since(began))
	}
	eventually(t, "the turns have ended", func() bool { return turnsTaken(s) == 0 })
	other := takeAllTurns(s)
	for _, x := range keeping {
		x.LeaveTurn()
	}
	if turnsTaken(s) != runtime.GOMAXPROCS(0) {
		t.Error("a turn was given back twice")
	}
	other()
}

// TestCommitsThatReadUnderLatchesHaveNoTurn: large commits of others would wait for the device with them.
func TestCommitsThatReadUnderLatchesHaveNoTurn(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	defer takeAllTurns(s)()
	x := mustSession(t, s)
	defer x.Close()
	w := largeWrite("k", true)
	for i := range readBeforeMin - 1 {
		w.Conditions = append(w.Conditions, Condition{Key: fmt.Append(nil, "none", i), Kind: KeyAbsent})
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := x.Commit(ctx, w); err != nil {
		t.Error(err)
	}
}
