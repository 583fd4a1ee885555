package auth

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// everyKey are all keys of up to three bytes of a small alphabet, and the smallest keys after them.
func everyKey() (all [][]byte) {
	level := [][]byte{{}}
	for range 3 {
		var next [][]byte
		for _, k := range level {
			for _, c := range []byte{0, 'a', 'b', 0xff} {
				next = append(next, append(bytes.Clone(k), c))
			}
		}
		all, level = append(all, next...), next
	}
	return all
}

func randomBound(r *rand.Rand) []byte {
	b := make([]byte, r.IntN(3))
	for i := range b {
		b[i] = []byte{0, 'a', 'b', 0xff}[r.IntN(4)]
	}
	return b
}

func within(lower, upper, key []byte) bool {
	return bytes.Compare(lower, key) <= 0 && (len(upper) == 0 || bytes.Compare(key, upper) < 0)
}

// TestRightsContainExactlyTheGrantedKeys compares checks with the grants, key by key.
func TestRightsContainExactlyTheGrantedKeys(t *testing.T) {
	universe := everyKey()
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		grants := make([]Grant, r.IntN(6))
		for i := range grants {
			grants[i] = Grant{Lower: randomBound(r), Upper: randomBound(r), Read: r.IntN(2) == 0, Write: r.IntN(2) == 0, Lease: r.IntN(2) == 0}
		}
		rights := Compile(grants)
		granted := func(right Right, key []byte) bool {
			for i := range grants {
				if grants[i].gives(right) && within(grants[i].Lower, grants[i].Upper, key) {
					return true
				}
			}
			return false
		}
		for right := range Right(keyRights) {
			for _, key := range universe {
				var f Footprint
				f.Key(right, key)
				if got, want := rights.Check(&f) == nil, granted(right, key); got != want {
					t.Fatalf("seed %d: %v of key %q: permitted %v, granted %v by %+v", seed, right, key, got, want, grants)
				}
			}
			for range 20 {
				lower, upper := randomBound(r), randomBound(r)
				var f Footprint
				f.Span(right, lower, upper)
				if rights.Check(&f) != nil {
					continue
				}
				for _, key := range universe {
					if within(lower, upper, key) && !granted(right, key) {
						t.Fatalf("seed %d: %v of %q to %q is permitted, and %q is not granted by %+v", seed, right, lower, upper, key, grants)
					}
				}
			}
		}
	}
}

// TestAdjoiningGrantsPermitARangeAcrossThem: what is granted in pieces is granted.
func TestAdjoiningGrantsPermitARangeAcrossThem(t *testing.T) {
	rights := Compile([]Grant{
		{Lower: []byte("m"), Read: true}, {Lower: []byte("a"), Upper: []byte("f"), Read: true}, {Lower: []byte("f"), Upper: []byte("m"), Read: true},
	})
	for _, c := range []struct {
		lower, upper string
		want         bool
	}{{"a", "", true}, {"b", "z", true}, {"a", "m", true}, {"", "b", false}, {"", "", false}} {
		var f Footprint
		f.Span(RightRead, []byte(c.lower), []byte(c.upper))
		if got := rights.Check(&f) == nil; got != c.want {
			t.Errorf("%q to %q is permitted: %v", c.lower, c.upper, got)
		}
	}
	if grants, _ := rights.Grants(); len(grants) != 1 || string(grants[0].Lower) != "a" || len(grants[0].Upper) > 0 {
		t.Errorf("the merged grants are %+v", grants)
	}
}

// TestARefusalSaysWhatIsMissing, and names keys only that the request has named.
func TestARefusalSaysWhatIsMissing(t *testing.T) {
	rights := Compile([]Grant{{Lower: []byte("a"), Upper: []byte("b"), Read: true, Actions: ActionObserve}})
	for _, c := range []struct {
		name string
		add  func(*Footprint)
		want string
	}{
		{"key", func(f *Footprint) { f.Key(RightWrite, []byte("ab")) }, `user "eve" lacks the write right to key "ab"`},
		{"range", func(f *Footprint) { f.Span(RightRead, []byte("a"), []byte("c")) }, `user "eve" lacks the read right to the keys from "a" to "c"`},
		{"open range", func(f *Footprint) { f.Span(RightRead, []byte("a"), nil) }, `user "eve" lacks the read right to the keys from "a" on`},
		{"hidden", func(f *Footprint) { f.HiddenKey(RightWrite, []byte("secret")) }, `user "eve" lacks the write right to a key that the request would touch`},
		{"lease", func(f *Footprint) { f.AnyLease() }, `user "eve" has the lease right to no key`},
		{"action", func(f *Footprint) { f.Action(ActionObserve | ActionUsers) }, `user "eve" has no right to the administrative actions: users`},
	} {
		var f Footprint
		f.Key(RightRead, []byte("aa")) // granted
		c.add(&f)
		err := (&User{Name: "eve", Rights: rights}).Check(&f)
		denied, ok := errors.AsType[*DeniedError](err)
		if !ok || err.Error() != c.want {
			t.Errorf("%s: %v, want %s", c.name, err, c.want)
		}
		if c.name == "hidden" && (len(denied.Range.Lower) > 0 || len(denied.Range.Upper) > 0) {
			t.Errorf("the refusal has the key %q", denied.Range.Lower)
		}
	}
	if err := rights.Check(new(Footprint)); err != nil {
		t.Errorf("a footprint of nothing: %v", err)
	}
}

// TestRevokedIdentitiesEnd: an identity of an earlier table does not outlive its user, its token, or the token's time.
func TestRevokedIdentitiesEnd(t *testing.T) {
	now := time.Unix(1000, 0)
	table := &Table{Enabled: true, Users: map[string]*User{"eve": {Name: "eve", Rights: Compile(nil)}}}
	hash := TokenHash{7, 1}
	table.Tokens[7] = map[TokenHash]*Token{hash: {User: "eve", Expires: now.Add(time.Second)}}
	id := Identity{User: "eve", Method: MethodToken, Token: hash}
	var f Footprint
	for _, c := range []struct {
		name   string
		id     Identity
		at     time.Time
		change func()
		want   error
	}{
		{"valid", id, now, func() {}, nil},
		{"unknown client", Identity{}, now, func() {}, ErrUnauthenticated},
		{"expired", id, now.Add(time.Second), func() {}, ErrTokenExpired},
		{"token of another user", id, now, func() { table.Tokens[7][hash] = &Token{User: "bob"} }, ErrUnauthenticated},
		{"token revoked", id, now, func() { delete(table.Tokens[7], hash) }, ErrUnauthenticated},
		{"by certificate", Identity{User: "eve", Method: MethodCertificate}, now, func() {}, nil},
		{"disabled", Identity{User: "eve", Method: MethodCertificate}, now, func() { table.Users["eve"].Disabled = true }, ErrUnauthenticated},
		{"off", Identity{}, now, func() { table.Enabled = false }, nil},
	} {
		c.change()
		if err := table.Authorize(&c.id, c.at, &f); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

func TestActionsHaveNames(t *testing.T) {
	if len(ActionsAll.Names()) != len(actionNames) || ActionsAll != 1<<len(actionNames)-1 {
		t.Errorf("%d names for the actions %b", len(actionNames), ActionsAll)
	}
	for _, name := range ActionsAll.Names() {
		if got := ParseAction(name).Names(); len(got) != 1 || got[0] != name {
			t.Errorf("%q is parsed as %q", name, got)
		}
	}
	if ParseAction("all") != ActionsAll || ParseAction("none") != 0 {
		t.Error("all or an unknown name")
	}
}

func hundredRanges() *Rights {
	var grants []Grant
	for i := range 100 {
		grants = append(grants, Grant{
			Lower: fmt.Appendf(nil, "tenant/%03d/", 2*i), Upper: fmt.Appendf(nil, "tenant/%03d0", 2*i), Read: true, Write: true,
		})
	}
	return Compile(grants)
}

// TestAPermittedCheckAllocatesNothing, also when footprints are computed anew for each request.
func TestAPermittedCheckAllocatesNothing(t *testing.T) {
	rights, key := hundredRanges(), []byte("tenant/132/orders/1")
	var f Footprint
	if n := testing.AllocsPerRun(100, func() {
		f.Reset()
		f.Key(RightRead, key)
		f.Key(RightWrite, key)
		if err := rights.Check(&f); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkCheck(b *testing.B) {
	rights := hundredRanges()
	for _, keys := range []int{1, 10} {
		b.Run(fmt.Sprintf("ranges=100/keys=%d", keys), func(b *testing.B) {
			var f Footprint
			for i := range keys {
				f.Key(RightWrite, fmt.Appendf(nil, "tenant/%03d/orders/123", i*18))
			}
			b.ReportAllocs()
			for b.Loop() {
				if err := rights.Check(&f); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func TestRangeOfAKey(t *testing.T) {
	r := Compile([]Grant{
		{Lower: []byte("k"), Upper: []byte("l"), Write: true},
		{Lower: []byte("ka"), Upper: []byte("kb"), Write: true},
		{Lower: []byte("m"), Upper: []byte("n"), Read: true},
		{Lower: []byte("x"), Write: true},
	})
	for key, want := range map[string]int{"": -1, "j": -1, "k": 0, "ka": 0, "kz": 0, "l": -1, "m": -1, "w": -1, "x": 1, "z": 1} {
		if got := r.RangeOf(RightWrite, []byte(key)); got != want {
			t.Errorf("%q: got %d, want %d", key, got, want)
		}
	}
}
