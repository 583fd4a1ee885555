package auth

import (
	"maps"
	"testing"
)

// TestWhatATableDoesNotHaveAnyMoreHasEnded, whether it was followed before or is asked for later; what it still has has not.
func TestWhatATableDoesNotHaveAnyMoreHasEnded(t *testing.T) {
	ended := func(e *Ended) bool {
		select {
		case <-e.Done():
			return true
		default:
			return false
		}
	}
	for _, followed := range []bool{true, false} {
		users := map[string]*User{"stays": {}, "changes": {}, "goes": {}}
		stays, goes := &Token{}, &Token{}
		before := &Table{Users: maps.Clone(users)}
		before.Tokens[1], before.Tokens[2] = map[TokenHash]*Token{{1}: stays}, map[TokenHash]*Token{{2}: goes, {2, 1}: stays}
		next := &Table{Users: map[string]*User{"stays": users["stays"], "changes": {}, "is new": {}}}
		next.Tokens = before.Tokens
		next.Tokens[2] = map[TokenHash]*Token{{2, 1}: stays}
		if followed && (ended(&users["stays"].Ended) || ended(&users["goes"].Ended) || ended(&goes.Ended) || ended(&stays.Ended)) {
			t.Fatal("ended too early")
		}
		before.Retire(next)
		before.Retire(next) // changes nothing
		for name, u := range users {
			if ended(&u.Ended) != (name != "stays") {
				t.Errorf("the user that %s: %v", name, ended(&u.Ended))
			}
		}
		if !ended(&goes.Ended) || ended(&stays.Ended) {
			t.Errorf("tokens: %v, %v", ended(&goes.Ended), ended(&stays.Ended))
		}
	}
}
