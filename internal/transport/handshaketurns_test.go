package transport

import (
	"net/netip"
	"testing"
)

// TestATurnThatWasGivenToAHandshakeThatEndsIsGivenOn, and one that waits leaves no place.
func TestATurnThatWasGivenToAHandshakeThatEndsIsGivenOn(t *testing.T) {
	turns := computeTurns{free: 1}
	from := netip.MustParsePrefix("192.0.2.1/32")
	first, second, third := turns.ask(from), turns.ask(from), turns.ask(from)
	given := func(p *turnPlace) bool {
		select {
		case <-p.Value:
			return true
		default:
			return false
		}
	}
	if !given(first) || given(second) || given(third) {
		t.Fatal("one turn was not given to the first handshake alone")
	}
	turns.leave(second)
	turns.leave(first)
	if given(second) || !given(third) {
		t.Error("the turn was not given on to the handshake that waits")
	}
	if turns.leave(third); turns.free != 1 || turns.waiting.Len() != 0 {
		t.Errorf("%d turns are free, and %d handshakes wait", turns.free, turns.waiting.Len())
	}
}
