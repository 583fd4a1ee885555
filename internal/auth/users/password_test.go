package users

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestPasswordsAreCheckedAlike: a wrong password, an unknown user, one without a password and a disabled one have the same
// error, after one hash of the same cost.
func TestPasswordsAreCheckedAlike(t *testing.T) {
	ctx := context.Background()
	h := bootstrapped(t, vfs.NewMem())
	yes := true
	must(t, h.CreateUser(ctx, User{Name: "tokens-only"}, ""))
	must(t, h.CreateUser(ctx, User{Name: "disabled"}, "right secret"))
	must(t, h.UpdateUser(ctx, "disabled", &UserChange{Disabled: &yes}))
	for _, c := range []struct{ name, password string }{
		{"ann", "wrong secret"}, {"ann", ""}, {"nobody", "right secret"}, {"tokens-only", ""}, {"tokens-only", "right secret"}, {"disabled", "right secret"},
	} {
		before := h.hasher.computed.Load()
		_, _, err := h.Login(ctx, c.name, c.password, "", 0)
		if err != auth.ErrUnauthenticated {
			t.Errorf("%+v: %v", c, err)
		}
		if n := h.hasher.computed.Load() - before; n != 1 {
			t.Errorf("%+v: %d hashes", c, n)
		}
	}
	if h.hasher.dummy.cost != cheap || len(h.hasher.dummy.compute("x")) != hashBytes {
		t.Errorf("the hash for unknown users is %v", &h.hasher.dummy)
	}
	if _, _, err := h.Login(ctx, "ann", "ann's secret", "", 0); err != nil {
		t.Error(err)
	}
}

// TestUnknownUsersTakeAsLongAsWrongPasswords measures it, with hashes of some milliseconds. Each side has the fastest of its attempts,
// which are repeated until both have had a moment of a processor for themselves: a login without a hash would be a hundred times
// faster in all of them, one of twice the cost twice as slow. TestPasswordsAreCheckedAlike counts the hashes.
func TestUnknownUsersTakeAsLongAsWrongPasswords(t *testing.T) {
	const roundsMin, roundsMax, ratioMax = 9, 300, 1.5
	ctx := context.Background()
	h := bootstrapped(t, vfs.NewMem())
	h.hasher.cost = HashCost{KiB: 4 << 10, Passes: 2, Threads: 1}
	h.hasher.dummy.cost = h.hasher.cost
	must(t, h.CreateUser(ctx, User{Name: "bob"}, "bob's secret"))
	must(t, h.CreateUser(ctx, User{Name: "tokens-only"}, ""))
	names := []string{"bob", "nobody", "tokens-only"}
	fastest := map[string]time.Duration{}
	differ := func() bool {
		least, most := fastest[names[0]], fastest[names[0]]
		for _, name := range names {
			least, most = min(least, fastest[name]), max(most, fastest[name])
		}
		return float64(most) > ratioMax*float64(least)
	}
	for round := 0; round < roundsMin || round < roundsMax && differ(); round++ {
		h.now = h.now.Add(attemptsTime) // each round has attempts of its own
		for _, name := range names {
			start := time.Now()
			if _, err := h.Password(ctx, name, "wrong secret"); err != auth.ErrUnauthenticated {
				t.Fatalf("%s: %v", name, err)
			}
			if took := time.Since(start); fastest[name] == 0 || took < fastest[name] {
				fastest[name] = took
			}
		}
	}
	t.Log(fastest)
	if differ() {
		t.Errorf("wrong passwords of a user, of nobody and of a user without one take %v", fastest)
	}
}

// TestAttemptsAreLimited for each name, whether a user has it or not; logins that succeed do not count.
func TestAttemptsAreLimited(t *testing.T) {
	ctx := context.Background()
	h := bootstrapped(t, vfs.NewMem())
	for range 2 * attemptsMax {
		_, err := h.Password(ctx, "ann", "ann's secret")
		must(t, err)
	}
	for _, name := range []string{"ann", "nobody"} {
		for range attemptsMax {
			if _, err := h.Password(ctx, name, "wrong secret"); !errors.Is(err, auth.ErrUnauthenticated) {
				t.Fatalf("%s: %v", name, err)
			}
		}
		hashes := h.hasher.computed.Load()
		limit, ok := errors.AsType[*auth.LimitError](second(h.Password(ctx, name, "ann's secret")))
		if !ok || limit.Retry <= 0 || limit.Retry > attemptsTime || h.hasher.computed.Load() != hashes {
			t.Errorf("%s, one more: %+v, %d hashes", name, limit, h.hasher.computed.Load()-hashes)
		}
	}
	h.now = h.now.Add(attemptsTime)
	if _, err := h.Password(ctx, "ann", "ann's secret"); err != nil {
		t.Errorf("a minute later: %v", err)
	}
}

// TestAttemptsOfAClientAreItsOwn: one that knows no more than a name does not keep its user out, until there are very many.
func TestAttemptsOfAClientAreItsOwn(t *testing.T) {
	h := bootstrapped(t, vfs.NewMem())
	type client struct{}
	h.hasher.client = func(ctx context.Context) string { name, _ := ctx.Value(client{}).(string); return name }
	password := func(from, password string) error {
		_, err := h.Password(context.WithValue(context.Background(), client{}, from), "ann", password)
		return err
	}
	refused := func(from string) bool { return errors.As(password(from, "ann's secret"), new(*auth.LimitError)) }
	for i := range attemptsOfAll / attemptsMax {
		must(t, password("home", "ann's secret"))
		from := fmt.Sprint("other", i)
		for range attemptsMax {
			if err := password(from, "wrong secret"); !errors.Is(err, auth.ErrUnauthenticated) {
				t.Fatalf("%s: %v", from, err)
			}
		}
		if !refused(from) {
			t.Errorf("%s has more attempts", from)
		}
	}
	if !refused("home") {
		t.Error("all together have more attempts")
	}
	h.now = h.now.Add(attemptsTime)
	must(t, password("other0", "ann's secret"))
}

// TestManyLoginsAtOnceMayComeAgainSoon: their passwords are right, as far as is known.
func TestManyLoginsAtOnceMayComeAgainSoon(t *testing.T) {
	var now time.Duration
	a := attempts{elapsed: func() time.Duration { return now }}
	for range attemptsMax {
		must(t, a.begin("ann", "home"))
	}
	limit, ok := errors.AsType[*auth.LimitError](a.begin("ann", "home"))
	if !ok || limit.Retry != retryHash {
		t.Errorf("one more at once: %+v", limit)
	}
	for range attemptsMax {
		a.end("ann", "home", false)
	}
	must(t, a.begin("ann", "home"))
	now = attemptsTime
	must(t, a.begin("bob", "home"))
	a.end("ann", "home", true) // which has begun in the minute before
	if n := a.count[attempter{name: "ann", client: "home"}]; n != (attemptCount{failed: 1}) || len(a.count) != 4 {
		t.Errorf("%+v of %d", n, len(a.count))
	}
}

// TestOnlyComparedPasswordsAreAttempts: a flood that the queue refuses, or whose clients leave, uses up no attempts of its name, nor of
// other names.
func TestOnlyComparedPasswordsAreAttempts(t *testing.T) {
	ctx := context.Background()
	h := bootstrapped(t, vfs.NewMem())
	gone, cancel := context.WithCancel(ctx)
	cancel()
	for i := range attemptedNames + 1 {
		if _, err := h.Password(gone, fmt.Sprint("name", i), "some secret"); !errors.Is(err, context.Canceled) && !errors.As(err, new(*auth.LimitError)) {
			t.Fatal(err)
		}
	}
	release := sync.OnceFunc(h.hold())
	t.Cleanup(release)
	for range hashQueue {
		go func() { _ = h.hasher.do(ctx, func() {}) }()
	}
	h.hasher.awaitWaiting(hashQueue)
	for range 2 * attemptsMax {
		if limit, ok := errors.AsType[*auth.LimitError](second(h.Password(ctx, "ann", "ann's secret"))); !ok || limit.Limit != hashQueue {
			t.Fatalf("the queue is full: %+v", limit)
		}
	}
	release()
	h.hasher.awaitWaiting(0)
	if _, err := h.Password(ctx, "ann", "ann's secret"); err != nil {
		t.Errorf("after the flood: %v", err)
	}
}

func second[A any](_ A, err error) error { return err }

// TestHashesAreKept: the form of stored hashes, computed by another program (argon2 of the reference implementation).
func TestHashesAreKept(t *testing.T) {
	const stored = "$argon2id$v=19$m=65536,t=2,p=1$c29tZXNhbHQ$CTFhFdXPJO1aFaMaO6Mm5c8y7cJHAph8ArZWb2GRPPc"
	p, err := parseHash(stored)
	must(t, err)
	if !p.matches("password") || p.String() != stored || p.cost != hashDefault {
		t.Errorf("%v", &p)
	}
	for _, bad := range []string{
		"", "$", strings.Replace(stored, "argon2id", "argon2i", 1), strings.Replace(stored, "v=19", "v=16", 1), strings.Replace(stored, "m=65536", "m=4294967295", 1),
		strings.Replace(stored, "t=2", "t=0", 1), strings.Replace(stored, "p=1", "p=99", 1), strings.Replace(stored, "c29tZXNhbHQ", "", 1), stored + "!", stored + "$x",
	} {
		if _, err := parseHash(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

// TestPasswordsTakeHalfOfTheProcessors: every client may log in, also one that is not known.
func TestPasswordsTakeHalfOfTheProcessors(t *testing.T) {
	for processors, want := range map[int]int{1: 1, 2: 1, 3: 1, 4: 2, 64: hashersMax} {
		if got := hashersOn(processors); got != want {
			t.Errorf("%d processors: %d hash", processors, got)
		}
	}
}
