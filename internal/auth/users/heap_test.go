package users

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/auth"
)

// liveHeap is what is alive.
func liveHeap() int64 {
	runtime.GC()
	runtime.GC() // what finalizers have kept
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestUsersTakeWhatIsCounted: the limit of the heap follows the count, so it is not less than what they take, and not several times as much.
func TestUsersTakeWhatIsCounted(t *testing.T) {
	const n = 20_000
	tokens := func(name, label string) func(*state) {
		return func(s *state) {
			for i := range n {
				k := &token{live: &auth.Token{User: name, Expires: time.Unix(1, 0)}, label: label, session: true, created: time.Unix(1, 0)}
				stored, err := decodeToken(k.encode())
				must(t, err)
				s.enterToken(hashToken(fmt.Sprint(i)), stored)
			}
		}
	}
	people := func(grants int) func(*state) {
		return func(s *state) {
			role := &Role{Name: "role"}
			for i := range grants {
				role.Grants = append(role.Grants, auth.Grant{Lower: fmt.Appendf(nil, "key%04d", 2*i), Upper: fmt.Appendf(nil, "key%04d", 2*i+1), Read: true, Write: true})
			}
			s.roles = map[string]*Role{}
			for i := range n / max(grants, 1) {
				name := fmt.Sprint("somebody", i)
				s.roles[name] = role // others with the same role have the same rights
				s.users[name] = &User{Name: name, Roles: []string{name}}
			}
		}
	}
	for what, fill := range map[string]func(*state){
		"short tokens": tokens("bob", ""), "long tokens": tokens(strings.Repeat("n", NameBytesMax), strings.Repeat("l", LabelBytesMax)),
		"users": people(0), "users with many ranges": people(100),
	} {
		m := &Manager{}
		before := liveHeap()
		s := &state{users: map[string]*User{}}
		fill(s)
		table := m.compile(s, 1, nil, nil)
		for i := range s.tokens {
			table.Tokens[i] = liveTokens(s.tokens[i])
		}
		took := liveHeap() - before
		if counted := s.heapBytes(); took > counted || counted > 3*took {
			t.Errorf("%s take %d bytes, and count %d", what, took, counted)
		}
		if again := m.compile(s, 2, table, func(*User) bool { return false }); len(again.Users) != len(table.Users) || s.heapBytes() < took {
			t.Errorf("%s that have not changed count %d", what, s.heapBytes())
		}
		runtime.KeepAlive(table)
	}
}
