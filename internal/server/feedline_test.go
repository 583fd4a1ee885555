package server

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
)

// given reports whether a stream has room.
func (r *watchRoom) hasRoom() bool {
	select {
	case <-r.given:
		return true
	default:
		return false
	}
}

// isAwaited reports whether some stream waits.
func (l *watchLine) isAwaited() bool { return l.awaiting() > 0 }

func newTestLine(bytes uint64) *watchLine {
	a := new(admission)
	a.init(100, 16*bytes) // of which watches have a sixteenth
	return &a.watches
}

// TestRoomForWatchesIsGivenInTurn: a stream that needs much of the share is not kept waiting by others that need little, however many come.
func TestRoomForWatchesIsGivenInTurn(t *testing.T) {
	l := newTestLine(1 << 20)
	beside := l.join(new(connection), 900<<10, nil)
	var small []*watchRoom
	next := func() { small = append(small, l.join(new(connection), 100<<10, nil)) }
	for range 5 {
		next()
	}
	large := l.join(new(connection), 400<<10, nil)
	for range 20 { // there is always one more, and never room in the share for the large one beside all of them
		next()
		if i := slices.IndexFunc(small, func(r *watchRoom) bool { return !r.hasRoom() }); i >= 0 {
			t.Fatalf("stream %d waits although the share has room for it", i)
		}
		small[0].leave()
		small = small[1:]
	}
	if large.hasRoom() {
		t.Fatal("room beside more than is free")
	}
	beside.leave()
	if !large.hasRoom() {
		t.Fatal("a stream that needs much has got no room")
	}
	large.leave()
	for _, r := range small {
		r.leave()
		r.leave()
	}
	l.mustBeEmpty(t)
}

func (l *watchLine) mustBeEmpty(t *testing.T) {
	t.Helper()
	if _, _, answers := l.admission.inflight(); l.isAwaited() || answers != 0 {
		t.Fatalf("the line is not empty: %d bytes", answers)
	}
}

// TestAnOversizedResponseGetsThePlaceBesideTheShare, whatever the share has, and whatever its size is: a value and its previous value may be
// larger than the share. Smaller ones pass those that wait for the place.
func TestAnOversizedResponseGetsThePlaceBesideTheShare(t *testing.T) {
	l := newTestLine(1 << 20)
	small := l.join(new(connection), 100<<10, nil)
	large, second := l.join(new(connection), 5<<20, nil), l.join(new(connection), 600<<10, nil)
	after := l.join(new(connection), 100<<10, nil)
	if !large.hasRoom() || second.hasRoom() {
		t.Fatal("of two large responses not one has the place")
	}
	if !after.hasRoom() {
		t.Fatal("a small response waits for a large one")
	}
	if _, _, answers := l.admission.inflight(); answers != 5<<20+200<<10 {
		t.Fatalf("%d bytes are counted", answers)
	}
	large.leave()
	if !second.hasRoom() {
		t.Fatal("no room after it")
	}
	for _, r := range []*watchRoom{small, second, after} {
		r.leave()
	}
	l.mustBeEmpty(t)
}

// TestConnectionsHaveThePlaceBesideTheShareInTurn, however many streams they have.
func TestConnectionsHaveThePlaceBesideTheShareInTurn(t *testing.T) {
	l := newTestLine(1 << 20)
	enter := func(c *connection) *watchRoom { return l.join(c, 2<<20, nil) }
	one, two, third := new(connection), new(connection), new(connection)
	rooms := []*watchRoom{enter(one), enter(one), enter(one), enter(two), enter(two), enter(third)}
	for turn, want := range []int{0, 3, 5, 1, 4, 2} {
		if i := slices.IndexFunc(rooms, func(r *watchRoom) bool { return r.has }); i != want {
			t.Fatalf("turn %d: stream %d has the place, want %d", turn, i, want)
		}
		rooms[want].leave()
	}
	l.mustBeEmpty(t)
}

// TestAStreamThatLeavesTheLineIsNotAwaited, nor keeps what it was given.
func TestAStreamThatLeavesTheLineIsNotAwaited(t *testing.T) {
	l := newTestLine(1 << 20)
	held := l.join(new(connection), 900<<10, nil)
	first, second := l.join(new(connection), 900<<10, nil), l.join(new(connection), 800<<10, nil)
	if second.hasRoom() {
		t.Fatal("overtaken")
	}
	if first.leave(); !l.isAwaited() {
		t.Fatal("the stream behind it has left the line, too")
	}
	if held.leave(); !second.hasRoom() {
		t.Fatal("a stream that has left is awaited")
	}
	third := l.join(new(connection), 900<<10, nil)
	second.leave()
	if third.leave(); l.isAwaited() { // whether it has room or not
		t.Fatal("a stream that has left is in the line")
	}
	l.mustBeEmpty(t)
}

// TestStreamsOfAConnectionAreAwaitedOnce: those of several connections make the turn of the one that has room shorter.
func TestStreamsOfAConnectionAreAwaitedOnce(t *testing.T) {
	l := newTestLine(1 << 20)
	rooms := []*watchRoom{l.join(new(connection), 900<<10, nil)}
	for _, want := range []int{1, 2, 3, slotParts, slotParts} {
		conn := new(connection)
		for range 3 {
			rooms = append(rooms, l.join(conn, 900<<10, nil))
		}
		if got := l.awaiting(); got != want {
			t.Errorf("%d streams of %d connections wait: %d", len(rooms)-1, want, got)
		}
	}
	for _, r := range rooms {
		r.leave()
	}
	l.mustBeEmpty(t)
}

// TestNoStreamWaitsForTheClientOfAnother: each, also the first, leaves as much free as it has, and the next one finds room.
func TestNoStreamWaitsForTheClientOfAnother(t *testing.T) {
	l := newTestLine(1 << 20)
	deaf := new(connection)
	rooms := []*watchRoom{l.join(deaf, 512<<10, nil), l.join(deaf, 512<<10, nil), l.join(deaf, 100<<10, nil), l.join(new(connection), 512<<10, nil)}
	for i, want := range []bool{true, true, false, false} { // the second has the place beside the share
		if rooms[i].hasRoom() != want {
			t.Fatalf("stream %d has room: %v", i, !want)
		}
	}
	if rooms = append(rooms, l.join(new(connection), 256<<10, nil)); !rooms[4].hasRoom() {
		t.Fatal("a stream waits for the clients of others")
	}
	for _, r := range rooms {
		r.leave()
	}
	l.mustBeEmpty(t)
}

// join enters the line with a client of its own for each connection.
func (l *watchLine) join(conn *connection, bytes int, holds *atomic.Bool) *watchRoom {
	return l.enter(conn, fmt.Sprintf("%p", conn), bytes, holds)
}

// TestConnectionsOfOneClientLeaveRoomToOthers: however many it has.
func TestConnectionsOfOneClientLeaveRoomToOthers(t *testing.T) {
	l := newTestLine(1 << 20)
	most := int(l.admission.words[shareWatches].limit.bytes)
	rooms := takenWatches{l.enter(new(connection), "hostile", 2*most, nil)} // has the place beside the share
	for size := most / 2; size > 8<<10; size /= 2 {                         // what each connection alone would leave
		for range 4 {
			rooms = append(rooms, l.enter(new(connection), "hostile", size, nil))
		}
	}
	other := l.enter(new(connection), "other", most/8, nil)
	if !other.hasRoom() {
		t.Error("a client has taken the room of others")
	}
	if held := l.hold(new(connection), "hostile", most/16); held {
		t.Error("requests of a client that has its part of the share have room")
	}
	other.leave()
	rooms.leave()
	if len(l.clients) != 0 {
		t.Errorf("%d clients are counted for ever", len(l.clients))
	}
}
