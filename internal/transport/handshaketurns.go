package transport

import (
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/epochkv/epochkv/internal/fairqueue"
)

// computeTurns gives handshakes their turns to compute: to the networks in turn, and to the oldest of a network first. However many handshakes of a
// network wait, and however long each computes, one of another network waits for a turn of each network at most. It is guarded by Handshakes.mu.
type computeTurns struct {
	free    int
	waiting fairqueue.Queue[netip.Prefix, chan struct{}] // closed when it is the handshake's turn
}

// turnPlace is that of a handshake that waits for its turn.
type turnPlace = fairqueue.Place[netip.Prefix, chan struct{}]

// ask begins the wait for a turn.
func (t *computeTurns) ask(from netip.Prefix) *turnPlace {
	place := t.waiting.Push(from, make(chan struct{}))
	t.give()
	return place
}

// give gives the turns that are free.
func (t *computeTurns) give() {
	for t.free > 0 && t.waiting.Len() > 0 {
		t.free--
		close(t.waiting.Pop())
	}
}

// leave ends a wait, and the turn if it has been given meanwhile.
func (t *computeTurns) leave(place *turnPlace) {
	if !t.waiting.Remove(place) {
		t.free++
		t.give()
	}
}

// turn is the right of a handshake to compute. It has it from when its client's bytes have come until it waits for the client again. A signature takes
// up to milliseconds, and the chain of a client's certificate tens of them; a client can ask for the one with bytes that it has recorded, and for the
// other with a chain that it has made up. Without turns a request that arrives would wait for all handshakes under way.
type turn struct {
	all      *Handshakes
	of       *begun
	held     bool
	over     bool // the handshake has ended: what comes then is cheap
	deadline time.Time
}

func (t *turn) begin() error {
	if t.over {
		return nil
	}
	wait := time.NewTimer(time.Until(t.deadline))
	defer wait.Stop()
	h := t.all
	h.mu.Lock()
	place := h.turns.ask(t.of.from)
	h.mu.Unlock()
	err := net.ErrClosed
	select {
	case <-place.Value:
		t.held = true
		return nil
	default:
	}
	select {
	case <-place.Value:
		t.held = true
		return h.renew(t.of)
	case <-t.of.ended:
	case <-wait.C:
		err = os.ErrDeadlineExceeded
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.turns.leave(place)
	return err
}

func (t *turn) end() {
	if t.held {
		t.held = false
		t.all.mu.Lock()
		defer t.all.mu.Unlock()
		t.all.turns.free++
		t.all.turns.give()
	}
}
