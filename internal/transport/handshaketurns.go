package transport

import (
	"container/list"
	"net"
	"net/netip"
	"os"
	"time"
)

// computeTurns gives handshakes their turns to compute: to the networks in turn, and to the oldest of a network first. However many handshakes of a
// network wait, and however long each computes, one of another network waits for a turn of each network at most. It is guarded by Handshakes.mu.
type computeTurns struct {
	free     int
	networks list.List                      // of *waiting, those that have any, in the order of their next turns
	of       map[netip.Prefix]*list.Element // the same
}

// waiting are the handshakes of a network that wait for their turn.
type waiting struct {
	from netip.Prefix
	all  list.List // of chan struct{}, closed when it is the handshake's turn
}

// ask begins the wait for a turn.
func (t *computeTurns) ask(from netip.Prefix) *list.Element {
	e := t.of[from]
	if e == nil {
		e = t.networks.PushBack(&waiting{from: from})
		t.of[from] = e
	}
	place := waitingOf(e).all.PushBack(make(chan struct{}))
	t.give()
	return place
}

// give gives the turns that are free.
func (t *computeTurns) give() {
	for t.free > 0 && t.networks.Len() > 0 {
		e := t.networks.Front()
		network := waitingOf(e)
		t.free--
		close(network.all.Remove(network.all.Front()).(chan struct{})) //nolint:forcetypeassert // there is nothing else
		t.networks.MoveToBack(e)
		t.forget(e)
	}
}

// forget removes a network of which nothing waits any more.
func (t *computeTurns) forget(e *list.Element) {
	if network := waitingOf(e); network.all.Len() == 0 {
		t.networks.Remove(e)
		delete(t.of, network.from)
	}
}

// leave ends a wait, and the turn if it has been given meanwhile.
func (t *computeTurns) leave(from netip.Prefix, place *list.Element) {
	select {
	case <-grantOf(place):
		t.free++
		t.give()
	default:
		e := t.of[from]
		waitingOf(e).all.Remove(place)
		t.forget(e)
	}
}

func waitingOf(e *list.Element) *waiting { return e.Value.(*waiting) } //nolint:forcetypeassert // there is nothing else

func grantOf(place *list.Element) chan struct{} { return place.Value.(chan struct{}) } //nolint:forcetypeassert // there is nothing else

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
	case <-grantOf(place):
		t.held = true
		return nil
	default:
	}
	select {
	case <-grantOf(place):
		t.held = true
		return h.renew(t.of)
	case <-t.of.ended:
	case <-wait.C:
		err = os.ErrDeadlineExceeded
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.turns.leave(t.of.from, place)
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
