package server

import (
	"slices"
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

func newTestLine(bytes uint64) *watchLine {
	a := new(admission)
	a.init(100, 16*bytes) // of which watches have a sixteenth
	return &a.watches
}

// TestRoomForWatchesIsGivenInTurn: a stream that needs much is not overtaken by others that need little, however many come.
func TestRoomForWatchesIsGivenInTurn(t *testing.T) {
	l := newTestLine(1 << 20)
	var small []*watchRoom
	next := func() { small = append(small, l.enter(new(connection), 100<<10, nil)) }
	for range 5 {
		next()
	}
	large := l.enter(new(connection), 900<<10, nil)
	for range 20 { // there is always one more, and never room for the large one beside all of them
		next()
		small[0].leave()
		small = small[1:]
		if large.hasRoom() {
			break
		}
		if i := slices.IndexFunc(small[min(5, len(small)):], (*watchRoom).hasRoom); i >= 0 {
			t.Fatalf("the stream that came %d after the large one has overtaken it", i)
		}
	}
	if !large.hasRoom() {
		t.Fatal("a stream that needs much has got no room")
	}
	large.leave()
	for i, r := range small {
		if i < 10 && !r.hasRoom() {
			t.Errorf("stream %d has no room", i)
		}
		r.leave()
		r.leave()
	}
	if l.isAwaited() || l.admission.words[shareWatches].word.Load() != 0 {
		t.Fatal("the line is not empty")
	}
}

// TestAnOversizedResponseGetsTheShareAlone: a value and its previous value may be larger than the share.
func TestAnOversizedResponseGetsTheShareAlone(t *testing.T) {
	l := newTestLine(1 << 20)
	small := l.enter(new(connection), 100<<10, nil)
	large, after := l.enter(new(connection), 5<<20, nil), l.enter(new(connection), 100<<10, nil)
	if large.hasRoom() || after.hasRoom() {
		t.Fatal("room beside another response")
	}
	small.leave()
	if !large.hasRoom() || after.hasRoom() {
		t.Fatal("the large response is not alone in the share")
	}
	large.leave()
	if !after.hasRoom() {
		t.Fatal("no room after it")
	}
	after.leave()
}

// TestAStreamThatLeavesTheLineIsNotAwaited, nor keeps what it was given.
func TestAStreamThatLeavesTheLineIsNotAwaited(t *testing.T) {
	l := newTestLine(1 << 20)
	held := l.enter(new(connection), 900<<10, nil)
	first, second := l.enter(new(connection), 900<<10, nil), l.enter(new(connection), 100<<10, nil)
	if second.hasRoom() {
		t.Fatal("overtaken")
	}
	first.leave()
	if !second.hasRoom() {
		t.Fatal("a stream that has left is awaited")
	}
	third := l.enter(new(connection), 900<<10, nil)
	held.leave()
	if third.leave(); l.isAwaited() { // whether it has room or not
		t.Fatal("a stream that has left is in the line")
	}
	second.leave()
	if word := l.admission.words[shareWatches].word.Load(); word != 0 {
		t.Fatalf("%x", word)
	}
}

// TestNoStreamWaitsForTheClientOfAnother: a connection that has so much of the share that it gets no more does not keep the others
// waiting, and is next when it has nothing any more.
func TestNoStreamWaitsForTheClientOfAnother(t *testing.T) {
	l := newTestLine(1 << 20)
	deaf := new(connection)
	held := l.enter(deaf, 400<<10, nil)
	more := l.enter(deaf, 400<<10, nil)
	if !held.hasRoom() || more.hasRoom() {
		t.Fatal("a connection got more than it leaves to others")
	}
	other := l.enter(new(connection), 300<<10, nil)
	if !other.hasRoom() {
		t.Fatal("a stream waits for the client of another")
	}
	held.leave()
	if !more.hasRoom() {
		t.Fatal("no room")
	}
	other.leave()
	more.leave()
}
