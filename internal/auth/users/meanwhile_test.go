package users

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/vfs"
)

// hold keeps all hashers busy until the returned function is called.
func (h *harness) hold() (release func()) {
	held, begun := make(chan struct{}), make(chan struct{})
	for range h.hasher.count {
		go func() { _ = h.hasher.do(context.Background(), func() { begun <- struct{}{}; <-held }) }()
	}
	for range h.hasher.count {
		<-begun
	}
	return func() { close(held) }
}

// awaitWaiting returns when so many jobs wait.
func (h *hasher) awaitWaiting(n int) {
	for h.waiting() != n {
		time.Sleep(time.Millisecond)
	}
}

// waiting is how many jobs wait.
func (h *hasher) waiting() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.queue.Len()
}

// whileHashed calls do while the password of a request waits for its hash, and returns the error of the request.
func (h *harness) whileHashed(request func() error, do func()) error {
	h.t.Helper()
	release, done := h.hold(), make(chan error, 1)
	go func() { done <- request() }()
	h.hasher.awaitWaiting(1)
	do()
	release()
	return <-done
}

// TestAPasswordThatWasChangedMeanwhilePermitsNothing: neither a token, which would outlive the change of the password, nor another
// password.
func TestAPasswordThatWasChangedMeanwhilePermitsNothing(t *testing.T) {
	ctx, yes, no := context.Background(), true, false
	for name, change := range map[string]func(*harness){
		"removed": func(h *harness) { must(t, h.SetPassword(ctx, "bob", "")) },
		"another user of the name": func(h *harness) {
			must(t, h.DeleteUser(ctx, "bob"))
			must(t, h.CreateUser(ctx, User{Name: "bob"}, ""))
		},
		"disabled": func(h *harness) { must(t, h.UpdateUser(ctx, "bob", &UserChange{Disabled: &yes})) },
	} {
		t.Run(name, func(t *testing.T) {
			h := bootstrapped(t, vfs.NewMem())
			must(t, h.CreateUser(ctx, User{Name: "bob"}, "bob's secret"))
			err := h.whileHashed(func() error {
				_, _, err := h.Login(ctx, "bob", "bob's secret", "", 0)
				return err
			}, func() { change(h) })
			if !errors.Is(err, auth.ErrUnauthenticated) {
				t.Errorf("a login: %v", err)
			}
			if all, err := h.Tokens(ctx, "bob"); err != nil || len(all) != 0 {
				t.Errorf("the tokens are %+v, %v", all, err)
			}
			must(t, h.UpdateUser(ctx, "bob", &UserChange{Disabled: &no}))
			must(t, h.SetPassword(ctx, "bob", "bob's secret"))
			err = h.whileHashed(func() error {
				return h.ChangePassword(ctx, "bob", "bob's secret", "eve's secret")
			}, func() { change(h) })
			if !errors.Is(err, auth.ErrUnauthenticated) {
				t.Errorf("a new password: %v", err)
			}
			must(t, h.UpdateUser(ctx, "bob", &UserChange{Disabled: &no}))
			if _, err := h.Password(ctx, "bob", "eve's secret"); !errors.Is(err, auth.ErrUnauthenticated) {
				t.Errorf("the password of the change that was refused: %v", err)
			}
		})
	}
}

// TestAChangeIsPermittedInItsTurn: also if what it waits for takes its right away.
func TestAChangeIsPermittedInItsTurn(t *testing.T) {
	h := bootstrapped(t, vfs.NewMem())
	refused, asked := errors.New("refused"), 0
	ctx := WithPermit(context.Background(), func(a *auth.Table) error {
		asked++
		if a != h.Table() || len(h.turn) != 1 {
			t.Error("asked about another table, or before the turn")
		}
		return refused
	})
	revision := h.Table().Revision
	yes := true
	changes := map[string]func() error{
		"CreateUser":     func() error { return h.CreateUser(ctx, User{Name: "bob"}, "bob's secret") },
		"UpdateUser":     func() error { return h.UpdateUser(ctx, "ann", &UserChange{Disabled: &yes}) },
		"DeleteUser":     func() error { return h.DeleteUser(ctx, "ann") },
		"SetPassword":    func() error { return h.SetPassword(ctx, "ann", "eve's secret") },
		"ChangePassword": func() error { return h.ChangePassword(ctx, "ann", "ann's secret", "eve's secret") },
		"CreateRole":     func() error { return h.CreateRole(ctx, &Role{Name: "x"}) },
		"CreateToken":    func() error { _, _, err := h.CreateToken(ctx, NewToken{User: "ann"}); return err },
		"Disable":        func() error { return h.Disable(ctx) },
	}
	for name, change := range changes {
		if err := change(); !errors.Is(err, refused) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if asked != len(changes) || h.Table().Revision != revision {
		t.Errorf("asked %d times; the revision was %d and is %d", asked, revision, h.Table().Revision)
	}
}

// TestAClientHasFewChangesInTheLine: those of others do not wait for a flood, each of which takes a sync of the device.
func TestAClientHasFewChangesInTheLine(t *testing.T) {
	h := bootstrapped(t, vfs.NewMem())
	type key struct{}
	h.hasher.client = func(ctx context.Context) string {
		client, _ := ctx.Value(key{}).(string)
		return client
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // ends only a test that fails
	defer cancel()
	change := func(client string) error {
		_, _, err := h.CreateToken(context.WithValue(ctx, key{}, client), NewToken{User: "ann"})
		return err
	}
	waiting := func(client string) int {
		h.line.mu.Lock()
		defer h.line.mu.Unlock()
		return h.line.waiting[client]
	}
	h.turn <- struct{}{} // a change waits for the device
	const flood = 2 * changesMax
	done := make(chan error, flood+1)
	for range flood {
		go func() { done <- change("a flood") }()
	}
	for range flood - changesMax {
		err := <-done
		if limit, ok := errors.AsType[*auth.LimitError](err); !ok || limit.Retry <= 0 {
			t.Fatalf("one of too many changes: %v", err)
		}
	}
	if n := waiting("a flood"); n != changesMax {
		t.Fatalf("%d changes of a client wait", n)
	}
	go func() { done <- change("another") }()
	for waiting("another") == 0 {
		time.Sleep(time.Millisecond)
	}
	h.endTurn()
	for range changesMax + 1 {
		must(t, <-done)
	}
	if len(h.line.waiting) != 0 {
		t.Errorf("clients of which no change waits are known: %v", h.line.waiting)
	}
}
