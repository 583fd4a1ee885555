package server

import (
	"flag"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

var (
	shareSeed  = flag.Uint64("shares.seed", 0, "seed of the random test of the shares; 0: a new one")
	shareSteps = flag.Int("shares.steps", 20_000, "steps of the random test of the shares")
)

// modelShare predicts what one share of requests, or that of answers, does. It keeps a list of what is admitted, where the share has sums.
type modelShare struct {
	share           share
	requests, bytes int
	answers         bool
	all             []*modelThing
	line            []*connection // whose claims there are, the oldest first
	asked           map[*connection]time.Time
	taken           time.Time
	keep            time.Duration
}

// modelThing is a request or an answer that was admitted.
type modelThing struct {
	conn   *connection
	bytes  int
	made   int  // by a request, beside its bytes
	apart  bool // what it has made is in the share, wherever its bytes are
	beside bool // in the slot
	charge *memoryCharge
}

func (m *modelShare) used(conn *connection) (all, own int) {
	for _, x := range m.all {
		for i, part := range []int{x.bytes, x.made} {
			if x.beside && (i == 0 || !x.apart) {
				continue
			}
			if all += part; x.conn == conn && part >= countedBytesMin {
				own += part
			}
		}
	}
	return all, own
}

// inSlot is how much of a thing is in the slot if that has it.
func (x *modelThing) inSlot() int {
	if x.apart {
		return x.bytes
	}
	return x.bytes + x.made
}

// fits reports whether the share has room for more bytes of a connection.
func (m *modelShare) fits(conn *connection, more int) bool {
	all, own := m.used(conn)
	free := m.bytes - all - more
	if free < 0 {
		return false
	}
	if more < countedBytesMin {
		return true
	}
	own += more
	return own <= free && (4*own <= free || 4*free >= m.bytes-3)
}

func (m *modelShare) holder() *modelThing {
	for _, x := range m.all {
		if x.beside {
			return x
		}
	}
	return nil
}

// slot reports whether a connection gets the slot for so many bytes.
func (m *modelShare) slot(conn *connection, bytes int) bool {
	if bytes <= m.bytes/20 {
		return false
	}
	for {
		h, now := m.holder(), time.Now()
		for h == nil && len(m.line) > 0 && now.After(m.asked[m.line[0]].Add(m.keep)) {
			m.line = m.line[1:]
		}
		at := slices.Index(m.line, conn)
		switch {
		case h != nil && h.conn == conn: // it asks for no other turn
		case h == nil && (at == 0 || len(m.line) == 0):
			m.line, m.taken = m.line[at+1:], now
			return true
		default:
			if m.asked[conn] = now; at < 0 {
				m.line = append(m.line, conn)
			}
		}
		if h == nil || m.answers || !m.fits(h.conn, h.inSlot()) {
			return false
		}
		m.leaveSlot(h)
	}
}

// of is the thing that is meant by one that changes: of two that are alike, it is the one in the slot.
func (m *modelShare) of(x *modelThing) *modelThing {
	if h := m.holder(); h != nil && h.conn == x.conn && h.inSlot() == x.inSlot() {
		h.beside, x.beside = x.beside, h.beside
	}
	return x
}

func (m *modelShare) leaveSlot(x *modelThing) {
	if x.beside {
		x.beside = false
		m.keep = min(max(time.Since(m.taken), 100*time.Millisecond), time.Second)
	}
}

// make lets a request make something, or reports that it is refused.
func (m *modelShare) make(x *modelThing, bytes int) bool {
	switch {
	case m.of(x).beside:
	case m.fits(x.conn, bytes):
		x.apart = true
	case m.slot(x.conn, x.bytes+bytes):
		x.beside = true
	default:
		return false
	}
	x.made = bytes
	return true
}

// must adds an answer that cannot be refused.
func (m *modelShare) must(conn *connection, bytes int) *modelThing {
	if x := m.admit(conn, bytes); x != nil {
		return x
	}
	x := &modelThing{conn: conn, bytes: bytes}
	m.all = append(m.all, x)
	return x
}

// admit adds a thing, or reports that it is refused.
func (m *modelShare) admit(conn *connection, bytes int) *modelThing {
	x := &modelThing{conn: conn, bytes: bytes}
	switch {
	case len(m.all) < m.requests && m.fits(conn, bytes):
	case m.slot(conn, bytes):
		if len(m.all) >= m.requests {
			return nil
		}
		x.beside = true
	default:
		return nil
	}
	m.all = append(m.all, x)
	return x
}

// grow adds bytes to an answer, or reports that it is refused.
func (m *modelShare) grow(x *modelThing, more int) bool {
	switch {
	case x.beside:
	case m.fits(x.conn, more):
	case m.slot(x.conn, x.bytes+more):
		x.beside = true
	default:
		return false
	}
	x.bytes += more
	return true
}

func (m *modelShare) remove(x *modelThing) {
	m.leaveSlot(x)
	for i, y := range m.all {
		if x == y {
			m.all = append(m.all[:i:i], m.all[i+1:]...)
			return
		}
	}
}

// TestSharesAgreeWithTheModel: what is admitted, refused, and in the slot, and whose turn it is, is as the model predicts, and all is given back.
func TestSharesAgreeWithTheModel(t *testing.T) {
	seed := *shareSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-shares.seed %d", seed)
	synctest.Test(t, func(t *testing.T) {
		const requests = 24
		var a admission
		a.init(requests, 16<<20)
		r := rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // repeatable
		conns := make([]*connection, 6)
		for i := range conns {
			conns[i] = new(connection)
		}
		writes := &modelShare{share: shareLargeWrites, requests: requests, bytes: 4 << 20, asked: map[*connection]time.Time{}}
		answers := &modelShare{share: shareAnswers, requests: 1 << 20, bytes: 3 << 20, answers: true, asked: map[*connection]time.Time{}}
		unique := 0
		size := func(limit int) int { // few things are alike
			unique++
			return []int{10 << 10, 100 << 10, 400 << 10, limit / 3, limit * 2}[r.IntN(5)] + unique%100
		}
		admitted, refused, beside := 0, 0, 0
		for step := range *shareSteps {
			conn := conns[r.IntN(len(conns))]
			switch op := r.IntN(12); {
			case op < 2:
				bytes := size(writes.bytes)
				got, x := a.enter(conn, writes.share, bytes), writes.admit(conn, bytes)
				if got != (x != nil) {
					t.Fatalf("step %d: a request of %d bytes was admitted: %v", step, bytes, got)
				}
				count(got, &admitted, &refused)
			case op < 4:
				bytes := size(answers.bytes)
				must := r.IntN(50) == 0
				c, err := a.charge(conn, bytes, must)
				var x *modelThing
				if must {
					x = answers.must(conn, bytes)
				} else {
					x = answers.admit(conn, bytes)
				}
				if (err == nil) != (x != nil) {
					t.Fatalf("step %d: an answer of %d bytes: %v", step, bytes, err)
				}
				if x != nil {
					x.charge = c
				}
				count(err == nil, &admitted, &refused)
			case op < 7 && len(writes.all) > 0:
				x := writes.of(writes.all[r.IntN(len(writes.all))])
				if x.made > 0 {
					a.leaveBeside(x.conn, writes.share, x.bytes, x.made)
					x.made, x.apart = 0, false
				} else if to := x.bytes / 3; op == 6 && to > 0 {
					a.shrink(x.conn, writes.share, x.bytes, to)
					x.bytes = to
				} else {
					a.leave(x.conn, writes.share, x.bytes)
					writes.remove(x)
				}
			case op < 9 && len(answers.all) > 0:
				x := answers.of(answers.all[r.IntN(len(answers.all))])
				if op == 8 {
					more := countedBytesMin + size(answers.bytes)
					_, err := a.chargeAnswer(x.charge, x.conn, x.bytes+more, false)
					if (err == nil) != answers.grow(x, more) {
						t.Fatalf("step %d: an answer that grows by %d bytes: %v", step, more, err)
					}
					if err == nil {
						continue
					}
				}
				x.charge.release()
				answers.remove(x)
			case op == 9 && len(writes.all) > 0:
				x, bytes := writes.all[r.IntN(len(writes.all))], size(writes.bytes)
				if x.made > 0 || x.bytes <= smallRequestMax {
					continue
				}
				got := a.enterBeside(x.conn, writes.share, x.bytes, bytes)
				if got != writes.make(writes.of(x), bytes) {
					t.Fatalf("step %d: a request with %d bytes made %d more: %v", step, x.bytes, bytes, got)
				}
				count(got, &admitted, &refused)
			case op == 10 && r.IntN(10) == 0:
				time.Sleep(time.Duration(r.IntN(1500)) * time.Millisecond)
			}
			for _, s := range []*modelShare{writes, answers} {
				w, inSlot := &a.words[s.share], int64(0)
				all, _ := s.used(nil)
				if h := s.holder(); h != nil {
					inSlot = int64(h.inSlot())
					beside++
				}
				if word := w.word.Load(); int(word&admissionBytes) != all || int(word>>admissionShift) != len(s.all) || w.large.bytes() != inSlot {
					t.Fatalf("step %d: share %d has %d things of %d bytes and %d in the slot, want %d of %d and %d", step, s.share,
						word>>admissionShift, word&admissionBytes, w.large.bytes(), len(s.all), all, inSlot)
				}
			}
		}
		if t.Logf("%d admitted, %d refused, %d steps with a slot taken", admitted, refused, beside); *shareSteps >= 20_000 && (admitted < 1000 || refused < 1000 || beside < 1000) {
			t.Error("hardly anything was tested")
		}
		for _, x := range writes.all {
			if x.made > 0 {
				a.leaveBeside(x.conn, writes.share, x.bytes, x.made)
			}
			a.leave(x.conn, writes.share, x.bytes)
		}
		for _, conn := range conns {
			conn.end(&a)
			if n := conn.bytes(writes.share); n != 0 {
				t.Errorf("a connection has %d bytes", n)
			}
		}
		if n, bytes, left := a.inflight(); n != 0 || bytes != 0 || left != 0 || a.words[shareAnswers].word.Load() != 0 {
			t.Errorf("%d requests of %d bytes, %d bytes of answers are left", n, bytes, left)
		}
	})
}

// TestEachClaimHasItsTurn: while one goes on asking for a slot no other has it twice, and it waits for no more than a turn and a reservation of each,
// and turns are the shorter, the more wait, whatever they do: some ask only while another has it, some only when they would have it, some give it back at once, and some never.
func TestEachClaimHasItsTurn(t *testing.T) {
	const most, step = 3 * time.Second, 10 * time.Millisecond // of a turn; of the clock
	seed := *shareSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-shares.seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 2)) //nolint:gosec // repeatable
	served, lapsed := 0, 0
	for range 40 {
		synctest.Test(t, func(t *testing.T) {
			var s largeSlot
			type hostile struct {
				claimant
				asks, asksFree int // of a hundred
				turn           time.Duration
				turns          int // since the honest one asked first
			}
			honest, others := new(claimant), make([]*hostile, 1+r.IntN(12))
			for i := range others {
				others[i] = &hostile{
					asks: []int{0, 1, 10, 100}[r.IntN(4)], asksFree: []int{0, 0, 1, 100}[r.IntN(4)],
					turn: []time.Duration{0, 50 * time.Millisecond, time.Second, most}[r.IntN(4)],
				}
			}
			var holder *hostile
			var began, since, next time.Time // of the holder's turn; since when the honest one asks; when it asks again
			ends := func(now time.Time) bool {
				return holder != nil && (!now.Before(began.Add(holder.turn)) || s.overstays(holder, 1, most))
			}
			for range 3000 {
				now := time.Now()
				for _, i := range r.Perm(len(others)) {
					x, chance := others[i], others[i].asks
					if holder == nil {
						chance = x.asksFree
					} else if x.asks > 0 && ends(now) {
						chance = 100 // the best moment for one that does not want it
					}
					if holder != x && r.IntN(100) < chance && s.take(x, &x.claim, 1) {
						holder, began = x, now
						if x.turns++; x.turns > 1 && !since.IsZero() {
							t.Fatalf("another has it twice, with %v and %v of a hundred for %v", x.asks, x.asksFree, x.turn)
						}
					}
				}
				if !now.Before(next) {
					if honest.take(&s) {
						served++
						s.drop(honest)
						since = time.Time{}
						next = now.Add(time.Duration(r.IntN(50)) * step)
					} else {
						if since.IsZero() {
							since = now
							for _, x := range others {
								x.turns = 0
							}
						}
						longest := most
						for i := range others { // when the last of them has the slot only its claim is left, and so on
							longest += most/time.Duration(haste(i+1)) + claimTimeMax
						}
						if wait := now.Sub(since); wait > longest {
							t.Fatalf("it has waited for %v beside %d", wait, len(others))
						}
						next = now.Add(time.Duration(1+r.IntN(int(claimTimeMin/step))) * step)
					}
				}
				if ends(now) {
					s.drop(holder)
					holder = nil
				}
				if next := s.claims.Next(); next != nil && holder == nil && now.Sub(next.Value.asked) > s.keep {
					lapsed++
				}
				time.Sleep(step)
			}
		})
	}
	if t.Logf("%d turns of the honest one, %d steps with a claim that has lapsed", served, lapsed); served < 100 || lapsed < 10 {
		t.Error("hardly anything was tested")
	}
}

func count(got bool, admitted, refused *int) {
	if got {
		*admitted++
	} else {
		*refused++
	}
}

// TestSharesAreGivenBackByManyAtOnce: things of one connection that are alike may leave the slot or the share for each other, and what goes back
// from the slot to its share may end meanwhile.
func TestSharesAreGivenBackByManyAtOnce(t *testing.T) {
	var a admission
	a.init(1000, 16<<20)
	conns := []*connection{new(connection), new(connection)}
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			conn := conns[i%2]
			for n := range 5000 {
				bytes := []int{8 << 20, 1 << 20}[n%2]
				if a.enter(conn, shareLargeWrites, bytes) {
					a.shrink(conn, shareLargeWrites, bytes, bytes/16)
					if a.enterBeside(conn, shareLargeWrites, bytes/16, 6<<20) {
						a.leaveBeside(conn, shareLargeWrites, bytes/16, 6<<20)
					}
					a.leave(conn, shareLargeWrites, bytes/16)
				}
				if c, err := a.charge(conn, bytes, n%3 == 0); err == nil {
					c.handOver()
					c.release()
				}
			}
		})
	}
	all.Wait()
	n, bytes, answers := a.inflight()
	if n != 0 || bytes != 0 || answers != 0 || conns[0].bytes(shareLargeWrites) != 0 || conns[1].bytes(shareLargeWrites) != 0 || a.words[shareAnswers].word.Load() != 0 {
		t.Errorf("%d requests of %d bytes, and %d bytes of answers are left", n, bytes, answers)
	}
}
