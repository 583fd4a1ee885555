package server

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// TestALargeSlotHasOneOwner: nothing but what is in it changes or leaves it.
func TestALargeSlotHasOneOwner(t *testing.T) {
	var s largeSlot
	one, other := new(connection), new(connection)
	if !s.take(one, nil, 10) || s.take(other, nil, 10) || s.take(one, nil, 10) {
		t.Fatal("it has not one owner")
	}
	if s.drop(other); s.leave(other, 10) || s.leave(one, 5) || s.bytes() != 10 {
		t.Fatal("something else leaves it")
	}
	if s.change(other, 10, 20) || s.change(one, 5, 20) || !s.change(one, 10, 20) || s.bytes() != 20 {
		t.Fatal("its size is not its owner's to change")
	}
	if !s.leave(one, 20) || s.bytes() != 0 || s.leave(one, 20) {
		t.Fatal("its owner does not leave it")
	}
	if !s.take(other, nil, 7) {
		t.Fatal("it is not free")
	}
	if s.drop(other); s.bytes() != 0 {
		t.Fatal("it was not dropped")
	}
}

// claimant is an owner of a large slot.
type claimant struct{ claim claim }

func (c *claimant) take(s *largeSlot) bool { return s.take(c, &c.claim, 1) }

// TestALargeSlotIsTakenInTurns: one that was refused comes before others that ask later, however often these ask, and new ones; but only while it
// goes on asking.
func TestALargeSlotIsTakenInTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s largeSlot
		greedy, two, three := new(claimant), new(claimant), new(claimant)
		if !greedy.take(&s) || two.take(&s) || three.take(&s) {
			t.Fatal("the first is not the only one")
		}
		s.drop(greedy)
		if greedy.take(&s) || new(claimant).take(&s) || three.take(&s) {
			t.Error("one that comes later has the turn of another")
		}
		if !two.take(&s) {
			t.Fatal("the one that was refused first does not have its turn")
		}
		for range 3 {
			if new(claimant).take(&s) || greedy.take(&s) {
				t.Fatal("it is taken twice")
			}
		}
		if three.take(&s) { // after others, but its claim is older
			t.Fatal("it is taken twice")
		}
		s.drop(two)
		if greedy.take(&s) || !three.take(&s) {
			t.Error("the oldest claim is not the next")
		}
		if greedy.take(&s) {
			t.Fatal("it is taken twice")
		}
		s.drop(three) // at once
		time.Sleep(claimTimeMin)
		if two.take(&s) {
			t.Error("the turn of one that asked a moment ago is over")
		}
		time.Sleep(time.Nanosecond)
		if !two.take(&s) {
			t.Error("it is kept for one that does not ask any more")
		}
		time.Sleep(time.Hour)
		three.take(&s)
		s.drop(two)
		time.Sleep(claimTimeMax)
		if two.take(&s) {
			t.Error("after a long turn it is not kept for longer")
		}
		time.Sleep(time.Nanosecond)
		if !two.take(&s) {
			t.Error("it is kept for ever")
		}
	})
}

// TestClientsHaveALargeSlotInTurn: however many owners of one client wait, one of another client comes after the first of them at most, whether that has
// its turn, gives up, or asks no more.
func TestClientsHaveALargeSlotInTurn(t *testing.T) {
	for name, end := range map[string]func(s *largeSlot, first *claimant, askOn func()){
		"has its turn": func(s *largeSlot, first *claimant, _ func()) {
			first.take(s)
			s.drop(first)
		},
		"gives up": func(s *largeSlot, first *claimant, _ func()) { s.forget(&first.claim) },
		"asks no more": func(_ *largeSlot, _ *claimant, askOn func()) {
			time.Sleep(claimTimeMin)
			askOn()
			time.Sleep(time.Nanosecond)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var s largeSlot
				holder, one := new(claimant), &claimant{claim{client: new(streamClient)}}
				holder.take(&s)
				many, greedy := make([]*claimant, 100), new(streamClient)
				for i := range many {
					many[i] = &claimant{claim{client: greedy}}
					many[i].take(&s)
				}
				one.take(&s)
				askOn := func() {
					for _, c := range append(slices.Clone(many[1:]), one) {
						if c.take(&s) {
							t.Fatal("it has the turn of another")
						}
					}
				}
				s.drop(holder)
				askOn()
				end(&s, many[0], askOn)
				for _, c := range many[1:] {
					if c.take(&s) {
						t.Fatal("another one of the same client comes before it")
					}
				}
				if !one.take(&s) {
					t.Error("it is not its turn")
				}
			})
		})
	}
}

// TestClaimsThatWereGivenUpCostNoTurn: of a client with many connections some ask once. One that goes on asking does not wait a turn of another client
// for each of these.
func TestClaimsThatWereGivenUpCostNoTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s largeSlot
		client, another := new(streamClient), new(streamClient)
		holder, next := &claimant{claim{client: another}}, &claimant{claim{client: another}}
		holder.take(&s)
		given := make([]*claimant, 20)
		for i := range given {
			given[i] = &claimant{claim{client: client}}
			given[i].take(&s)
		}
		one := &claimant{claim{client: client}}
		one.take(&s)
		next.take(&s)
		time.Sleep(2 * claimTimeMax)
		for turns := 0; ; turns++ {
			if one.take(&s) {
				t.Error("it is taken twice")
			}
			next.take(&s)
			s.forget(&given[turns].claim) // its connection ends
			s.drop(holder)
			if one.take(&s) {
				break
			}
			if turns > 1 {
				t.Fatal("the other client has many turns before it")
			}
			if !next.take(&s) {
				t.Fatal("nothing has its turn")
			}
			holder, next = next, holder
			time.Sleep(claimTimeMin)
		}
	})
}

// TestALargeSlotIsOverdueForOthers: the time of its client counts from when what is there waits for it, and only if another wants the slot.
func TestALargeSlotIsOverdueForOthers(t *testing.T) {
	const most = 10 * time.Second
	synctest.Test(t, func(t *testing.T) {
		var s largeSlot
		one, other := new(claimant), new(claimant)
		want := func(what string, overdue, overstays bool) {
			t.Helper()
			if got := s.isOverdue(one, most, 0); got != overdue {
				t.Errorf("%s: overdue is %v", what, got)
			}
			if got := s.overstays(one, 1, most); got != overstays {
				t.Errorf("%s: it overstays: %v", what, got)
			}
		}
		one.take(&s)
		one.take(&s)
		s.handOver(one, 1)
		time.Sleep(2 * most)
		want("no other wants it", false, false)
		other.take(&s)
		want("another wants it", true, true)
		if s.isOverdue(other, most, 0) || s.overstays(one, 2, most) {
			t.Error("something else is overdue")
		}
		s.drop(one)
		time.Sleep(2 * claimTimeMax)
		one.take(&s)
		other.take(&s)
		time.Sleep(most - 1)
		s.handOver(one, 2)
		want("its time begins anew", false, false)
		time.Sleep(2 * time.Nanosecond)
		want("the server has not made it yet", false, true)
		s.handOver(one, 1)
		want("it is made", false, true)
		time.Sleep(most + 1)
		s.handOver(one, 1)
		want("its client does not take it", true, true)
	})
}

// TestTurnsAreShorterWhileMoreWait: the time of one other is divided by the claims, up to slotParts.
func TestTurnsAreShorterWhileMoreWait(t *testing.T) {
	const most, grace = 12 * time.Second, time.Second
	for others, want := range []time.Duration{most, most, most / 2, most / 3, most / 4, most / 4, most / 4} {
		synctest.Test(t, func(t *testing.T) {
			var r receiving
			r.init(16<<20, 100, 64<<20)
			one, s := new(claimant), &r.beside
			one.take(s)
			s.handOver(one, 1)
			for range others {
				other := new(claimant)
				other.take(s)
				other.take(s)
			}
			time.Sleep(want)
			if s.overstays(one, 1, most) || s.isOverdue(one, most, 0) {
				t.Errorf("%d others: its time is over before %v", others, want)
			}
			time.Sleep(time.Nanosecond)
			if is := others > 0; s.overstays(one, 1, most) != is || s.isOverdue(one, most, 0) != is || s.isOverdue(one, most, grace) {
				t.Errorf("%d others: it has another time than %v", others, want)
			}
			time.Sleep(grace)
			if s.isOverdue(one, most, grace) != (others > 0) {
				t.Errorf("%d others: it has another grace", others)
			}
			must := int64(progressBytes)
			if others > 0 {
				must = int64(most/want) * (12 << 20) / slotParts
			}
			if got := r.progress(12<<20, true); got != must {
				t.Errorf("%d others: %d bytes of a message must come at a time", others, got)
			}
		})
	}
}

// TestAClaimEndsWithItsOwner: one that does not ask any more is not waited for, and connections that come and go leave nothing.
func TestAClaimEndsWithItsOwner(t *testing.T) {
	var a admission
	a.init(10, 16<<20)
	slot, holder := &a.words[shareScans].large, new(connection)
	if !a.enter(holder, shareScans, 6<<20) {
		t.Fatal("the slot is not free")
	}
	connections := connections{admission: &a}
	for range 10 {
		conn := new(connection)
		if a.enter(conn, shareScans, 6<<20) {
			t.Fatal("it is taken twice")
		}
		connections.release(conn)
	}
	if n := slot.claims.Len(); n != 0 {
		t.Errorf("there are %d claims", n)
	}
	a.leave(holder, shareScans, 6<<20)
	if !a.enter(new(connection), shareScans, 6<<20) {
		t.Error("it is kept for one that has ended")
	}
}
