package mvcc

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// executeLosing executes what changes a key, and loses against other writers so often before that.
func executeLosing(ctx context.Context, t *testing.T, s *Store, x *Session, key string, losses int, last func()) error {
	attempts := 0
	_, err := x.Execute(ctx, &Execution{Write: &Write{Durability: DurabilityAsync}, Operate: func(_ context.Context, tx *Txn, _ bool) error {
		if _, err := tx.Get(nil, []byte(key)); err != nil {
			return err
		}
		if attempts++; attempts <= losses {
			mustPut(t, s, key, "of another writer")
		} else {
			last()
		}
		return tx.Set([]byte(key), []byte("own"))
	}})
	return err
}

// ownedStore is a store whose commits are of the owner that their context has.
func ownedStore(t *testing.T, adjust ...func(*Options)) *Store {
	o := tiny(vfs.NewMem())
	for _, f := range adjust {
		f(&o)
	}
	o.Owner = func(ctx context.Context) Owner {
		of, _ := ctx.Value(ownerKey{}).(Owner)
		return of
	}
	return mustOpen(t, o)
}

func contextOf(t *testing.T, client string) context.Context {
	return context.WithValue(t.Context(), ownerKey{}, Owner{client, 1})
}

// startLosing has an execution wait for a turn in a line.
func startLosing(ctx context.Context, t *testing.T, s *Store, line *turnLine, key string, losses int) (done chan error) {
	t.Helper()
	done = make(chan error, 1)
	of := s.turns.execute.owner(ctx)
	before := waitingOf(line, of)
	x := mustSession(t, s)
	go func() {
		defer x.Close()
		done <- executeLosing(ctx, t, s, x, key, losses, func() {})
	}()
	eventually(t, "the execution waits", func() bool { return waitingOf(line, of) == before+1 })
	return done
}

// keepTurn takes a turn that lasts until it is given back.
func keepTurn(t *testing.T, line *turnLine) {
	t.Helper()
	if line.ask(Owner{}) != nil {
		t.Fatal("a turn that is free is not given")
	}
}

// checkNoTurns checks that no execution has a turn, and that no line of a client is left.
func checkNoTurns(t *testing.T, s *Store) {
	t.Helper()
	turns := &s.turns.execute
	turns.mu.Lock()
	defer turns.mu.Unlock()
	if len(turns.clients) != 0 || turns.all.free != 1 || turns.all.clients.Len() != 0 {
		t.Errorf("%d clients have lines, %d turns are free, and %d clients wait", len(turns.clients), turns.all.free, turns.all.clients.Len())
	}
}

// TestExecutionsWaitForThoseOfTheirClientOnly: while one of a client has its turn and others of it wait, one of another client has its own.
func TestExecutionsWaitForThoseOfTheirClientOnly(t *testing.T) {
	s := ownedStore(t)
	flood := contextOf(t, "flood")
	line := s.turns.execute.use("flood")
	keepTurn(t, line)
	first, second := startLosing(flood, t, s, line, "a", executeAttemptsFree), startLosing(flood, t, s, line, "b", executeAttemptsFree)
	x := mustSession(t, s)
	defer x.Close()
	ctx, cancel := context.WithTimeout(contextOf(t, "other"), 5*time.Second)
	defer cancel()
	if err := executeLosing(ctx, t, s, x, "c", executeAttemptsOfClient-1, func() {}); err != nil {
		t.Errorf("an execution of another client: %v", err)
	}
	if len(first)+len(second) > 0 {
		t.Error("an execution did not wait for its turn")
	}
	line.leave()
	s.turns.execute.unuse("flood")
	for _, done := range []chan error{first, second} {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	checkNoTurns(t, s)
}

// TestExecutionsThatLoseAgainTakeTurnsWithAllClients, so that clients that change one key do not defeat each other for ever.
func TestExecutionsThatLoseAgainTakeTurnsWithAllClients(t *testing.T) {
	s := ownedStore(t)
	all := &s.turns.execute.all
	keepTurn(t, all)
	first := startLosing(contextOf(t, "a"), t, s, all, "a", executeAttemptsOfClient)
	second := startLosing(contextOf(t, "b"), t, s, all, "b", executeAttemptsOfClient)
	if len(first)+len(second) > 0 {
		t.Error("an execution did not wait for its turn")
	}
	all.leave()
	for _, done := range []chan error{first, second} {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	checkNoTurns(t, s)
}

// TestAnExecutionThatGivesUpLeavesNoTurn: in neither line, and without an owner all executions have one.
func TestAnExecutionThatGivesUpLeavesNoTurn(t *testing.T) {
	for _, losses := range []int{executeAttemptsFree, executeAttemptsOfClient} {
		s := mustOpen(t, tiny(vfs.NewMem()))
		turns := &s.turns.execute
		line := turns.use("")
		if losses == executeAttemptsOfClient {
			turns.unuse("")
			line = &turns.all
		}
		keepTurn(t, line)
		ctx, giveUp := context.WithCancelCause(t.Context())
		done := startLosing(ctx, t, s, line, "k", losses)
		cause := errors.New("given up")
		giveUp(cause)
		if err := <-done; !errors.Is(err, cause) {
			t.Errorf("after %d losses: %v", losses, err)
		}
		line.leave()
		if line != &turns.all {
			turns.unuse("")
		}
		checkNoTurns(t, s)
	}
}

// TestATurnOfAnExecutionEndsOnce: after a while, and not again when the execution ends.
func TestATurnOfAnExecutionEndsOnce(t *testing.T) {
	s := ownedStore(t)
	turns := &s.turns.execute
	for _, attempts := range []int{executeAttemptsFree, executeAttemptsOfClient} {
		leave, err := turns.enter(contextOf(t, "a"), attempts)
		if err != nil {
			t.Fatal(err)
		}
		next, err := turns.enter(contextOf(t, "a"), attempts)
		if err != nil {
			t.Fatal(err)
		}
		leave()
		next()
		next()
		checkNoTurns(t, s)
	}
}

// TestASlowExecutionKeepsNoOtherWaiting: both have lost so often that they take turns, and they are about different keys. The first one
// takes as long as it likes.
func TestASlowExecutionKeepsNoOtherWaiting(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x, y := mustSession(t, s), mustSession(t, s)
	defer x.Close()
	defer y.Close()
	begun, release, slow := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		slow <- executeLosing(context.Background(), t, s, x, "slow", executeAttemptsFree, func() {
			close(begun)
			<-release
		})
	}()
	<-begun
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := executeLosing(ctx, t, s, y, "other", executeAttemptsFree, func() {}); err != nil {
		t.Errorf("the other one: %v", err)
	}
	close(release)
	if err := <-slow; err != nil {
		t.Errorf("the slow one: %v", err)
	}
	for _, key := range []string{"slow", "other"} {
		if got := get(t, s, key, 0); got != "own" {
			t.Errorf("%s is %q", key, got)
		}
	}
}
