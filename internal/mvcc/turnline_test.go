package mvcc

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/epochkv/epochkv/internal/vfs"
)

// askAll has commits of owners wait for turns, and returns a function that gives the next turn and says whose it is.
func askAll(t *testing.T, l *turnLine, owners []Owner) (next func() Owner) {
	t.Helper()
	var places []*turnPlace
	for _, of := range owners {
		place := l.ask(of)
		if place == nil {
			t.Fatalf("a commit of %v has a turn that another has", of)
		}
		places = append(places, place)
	}
	return func() Owner {
		l.leave()
		for i, place := range places {
			if place != nil && isClosed(place.own.Value) {
				places[i] = nil
				return owners[i]
			}
		}
		return Owner{Client: "none"}
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// TestOwnersHaveTurnsInRotation: however many large commits of a client wait, those of another wait for one turn of it each, and the connections of a
// client for one of each other.
func TestOwnersHaveTurnsInRotation(t *testing.T) {
	var l turnLine
	l.init(nil, runtime.GOMAXPROCS(0))
	for l.free > 0 {
		if l.ask(Owner{}) != nil {
			t.Fatal("a commit waits for a turn that is free")
		}
	}
	var flood []Owner
	for i := range 200 {
		flood = append(flood, Owner{"flood", i % 50})
	}
	next := askAll(t, &l, append(flood, Owner{"flood", "last"}, Owner{"other", 1}, Owner{"other", 1}, Owner{}))
	got := make([]Owner, len(flood)+4)
	for i := range got {
		got[i] = next()
	}
	want := []Owner{{"flood", 0}, {"other", 1}, {}, {"flood", 1}, {"other", 1}, {"flood", 2}, {"flood", 3}}
	if !slices.Equal(got[:len(want)], want) {
		t.Errorf("the turns were of %v, not of %v", got[:len(want)], want)
	}
	if i := slices.Index(got, Owner{"flood", "last"}); i != 53 { // 50 turns of others of its client, and 3 of other clients
		t.Errorf("a new connection of the client had turn %d", i)
	}
	if l.clients.Len() != 0 || l.free != 0 {
		t.Errorf("%d clients wait, and %d turns are free", l.clients.Len(), l.free)
	}
}

// TestTurnsAreNeitherLostNorTwice: whatever commits wait, give up, or end their turns, as many as there are processors have turns while others wait, and a commit
// that waits has its turn before any other client has had two.
func TestTurnsAreNeitherLostNorTwice(t *testing.T) {
	type waiter struct {
		of     Owner
		place  *turnPlace
		others map[string]int // turns of each other client since it became the only one of its own
	}
	rapid.Check(t, func(t *rapid.T) {
		var l turnLine
		l.init(nil, runtime.GOMAXPROCS(0))
		most, working := l.free, 0
		var waiting []*waiter
		given := func() {
			for i := 0; i < len(waiting); i++ {
				w := waiting[i]
				if !isClosed(w.place.own.Value) {
					continue
				}
				working++
				waiting = slices.Delete(waiting, i, i+1)
				i--
				for _, other := range waiting {
					if other.of.Client == w.of.Client {
						clear(other.others)
					} else if other.others[w.of.Client]++; other.others[w.of.Client] > 1 {
						t.Fatalf("a commit of %v waited for two of %v", other.of, w.of)
					}
				}
			}
		}
		for range 100 {
			switch step := rapid.IntRange(0, 4).Draw(t, "step"); {
			case step < 2:
				of := Owner{fmt.Sprint(rapid.IntRange(0, 2).Draw(t, "client")), rapid.IntRange(0, 2).Draw(t, "connection")}
				if place := l.ask(of); place != nil {
					waiting = append(waiting, &waiter{of, place, map[string]int{}})
				} else {
					working++
				}
			case step == 2 && working > 0:
				working--
				l.leave()
				given()
			case step == 3 && len(waiting) > 0:
				i := rapid.IntRange(0, len(waiting)-1).Draw(t, "waiter")
				w := waiting[i]
				waiting = slices.Delete(waiting, i, i+1)
				l.quit(w.place)
			case step == 4 && working > 0 && len(waiting) > 0: // a turn is given while its commit gives up
				working--
				before := len(waiting)
				l.leave()
				var quits *turnPlace
				for _, w := range waiting {
					if isClosed(w.place.own.Value) {
						quits = w.place
					}
				}
				given()
				if quits == nil || len(waiting) != before-1 {
					t.Fatal("a turn was given to none")
				}
				working--
				l.quit(quits)
				given()
			}
			if working > most || working < most && len(waiting) > 0 || l.free != most-working {
				t.Fatalf("%d of %d have turns, %d are free, and %d wait", working, most, l.free, len(waiting))
			}
		}
	})
}

type ownerKey struct{}

// TestACommitWaitsAsOneOfItsOwner, which its context tells, and one that gives up leaves no place in the line.
func TestACommitWaitsAsOneOfItsOwner(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Owner = func(ctx context.Context) Owner {
		of, _ := ctx.Value(ownerKey{}).(Owner)
		return of
	}
	s := mustOpen(t, o)
	giveBack := takeAllTurns(s)
	defer giveBack()
	l := &s.turns.large
	begin := func(of Owner, name string) (done chan error, giveUp func()) {
		x := mustSession(t, s)
		ctx, giveUp := context.WithCancel(context.WithValue(t.Context(), ownerKey{}, of))
		done = make(chan error, 1)
		before := waitingOf(l, of)
		go func() {
			defer x.Close()
			_, err := x.Commit(ctx, largeWrite(name, false))
			done <- err
		}()
		eventually(t, "the commit waits", func() bool { return waitingOf(l, of) == before+1 })
		return done, giveUp
	}
	flood, other := Owner{"flood", 1}, Owner{"other", 1}
	first, _ := begin(flood, "a")
	second, _ := begin(flood, "b")
	givesUp, giveUp := begin(Owner{"given up", 1}, "c")
	done, _ := begin(other, "d")
	giveUp()
	if err := <-givesUp; err == nil {
		t.Error("a commit that gave up is done")
	}
	giveBack()
	for _, done := range []chan error{first, second, done} {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.clients.Len() != 0 {
		t.Errorf("%d clients wait for ever", l.clients.Len())
	}
}

// waitingOf is how many commits of an owner wait.
func waitingOf(l *turnLine, of Owner) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if place := l.clients.Oldest(of.Client); place != nil {
		return place.Value.waiting.Of(of.Connection)
	}
	return 0
}
