package server

import "testing"

// TestAWantedMessageComesWhateverTheWindows: the client of a message in the place beside the share may keep its windows closed itself, with messages before
// it that are not taken. While another wants the place, that is no reason to keep it.
func TestAWantedMessageComesWhateverTheWindows(t *testing.T) {
	for name, windows := range map[string]struct{ stream, conn int64 }{"of the stream": {0, 1 << 20}, "of the connection": {1 << 20, 0}} {
		r := newReceiving(64 << 20)
		in, other := newFollowed(t, r), newFollowedOf(t, r, "other")
		large := prefixed(int(r.large.limit/2) + 1)[:16<<10]
		pass := func(steps int) (stalled bool) {
			for range steps {
				r.step.Add(1)
				stalled = in.findStalled() || stalled
			}
			return stalled
		}
		if err := in.follow(frame(frameData, 0, 1, large)); err != nil {
			t.Fatal(err)
		}
		in.change(1, func(m *receivedStream) { m.answered, m.window = true, windows.stream })
		in.window = windows.conn
		in.answerAll()
		if pass(10*stallSteps) || r.beside.bytes() == 0 {
			t.Errorf("without a window %s, a message that no other wants to end was ended", name)
		}
		if err := other.follow(frame(frameData, 0, 1, large)); err != nil || len(other.ending) != 1 {
			t.Fatalf("the place has two messages: %v", err)
		}
		if pass(stallSteps) {
			t.Errorf("without a window %s, a message was ended before its time", name)
		}
		if !pass(2) || len(in.ending) != 1 || r.beside.bytes() != 0 {
			t.Errorf("without a window %s, a message keeps the place", name)
		}
	}
}

// TestAMessageThatIsCompleteDoesNotKeepThePlace while its handler waits for its client to take answers, and another wants it.
func TestAMessageThatIsCompleteDoesNotKeepThePlace(t *testing.T) {
	for _, waits := range []bool{false, true} {
		r := newReceiving(8 << 20)
		in, other := newFollowed(t, r), newFollowedOf(t, r, "other")
		small, large := frame(frameData, 0, 1, prefixed(1)), int(r.large.limit/largePart)+1
		in.change(1, func(m *receivedStream) { m.answered, m.library = true, &libraryStream{waits: waits} })
		if err := in.follow(small); err != nil {
			t.Fatal(err)
		}
		in.answerAll()
		if !r.beside.take(in, &in.claim, int64(large)) {
			t.Fatal("the place is taken")
		}
		in.change(1, func(m *receivedStream) {
			m.beside = true
			m.untaken = []largeMessage{{bytes: int64(large), placed: true, step: r.step.Load()}}
		})
		if r.beside.take(other, &other.claim, 1) {
			t.Fatal("the place is given twice")
		}
		ended := func(steps int) (stalled bool) {
			for range steps {
				if err := in.follow(small); err != nil { // which is progress of something else
					t.Fatal(err)
				}
				r.step.Add(1)
				stalled = in.findStalled() || stalled
			}
			return stalled
		}
		if ended(stallSteps) {
			t.Error("it was ended before its time")
		}
		if got := ended(2); got != waits {
			t.Errorf("a handler waits for its client: %v, but the message has ended: %v", waits, got)
		}
	}
}

// answerAll says that the server has sent headers on all streams but the first: they are of methods that let streams go on.
func (in *inbound) answerAll() {
	for stream := uint32(3); stream < 20; stream += 2 {
		in.answered(frame(frameHeaders, flagEndHeaders, stream, nil))
	}
}

// TestAMessageIsWantedWhileAnotherIsRefused: the direct transport asks it of a message, which may be in the share.
func TestAMessageIsWantedWhileAnotherIsRefused(t *testing.T) {
	const size = 1 << 20
	c := &directClient{server: new(Server)}
	r := &c.server.receiving
	if !r.beside.take(c, nil, size) || c.IsWanted(size) {
		t.Error("a message is wanted that is in no other's way")
	}
	if r.beside.take(new(directClient), nil, size) || !c.IsWanted(size) || c.IsWanted(size-1) {
		t.Error("a message in the place is not wanted while another is refused, or one in the share is")
	}
}
