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
		for stream := uint32(3); stream < 20; stream += 2 { // they are of methods that let streams go on
			in.answered(frame(frameHeaders, flagEndHeaders, stream, nil))
		}
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
