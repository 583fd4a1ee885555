package server

import (
	"slices"
	"testing"
)

// TestSmallFramesOfLargeMessagesAreTaken: the end of a large message often is a small frame, which counts until the server has taken the message, also if
// no small message ever comes on the stream.
func TestSmallFramesOfLargeMessagesAreTaken(t *testing.T) {
	const size, frames = receivedBytesMin, 100
	r := newReceiving(4 << 20)
	in := newFollowed(t, r)
	m := prefixed(size)
	follow := func(b []byte) {
		t.Helper()
		if err := in.follow(frame(frameData, 0, 1, b)); err != nil {
			t.Fatal(err)
		}
	}
	end := func() {
		for i := range frames {
			follow(m[len(m)-frames+i:][:1])
		}
	}
	follow(m[:len(m)-frames])
	end()
	follow(m[:3]) // of the next one
	follow(m[3 : len(m)-frames])
	if got := in.small; got < (frames-smallStep/frameOverhead)*frameOverhead {
		t.Errorf("%d bytes are counted for small frames", got)
	}
	for range 1000 {
		end()
		in.took(1, size)
		in.answered(frame(frameData, 0, 1, nil))
		follow(m[:3])
		follow(m[3 : len(m)-frames])
	}
	if got := in.small; got > 2*frames*frameOverhead {
		t.Errorf("%d bytes are counted for small frames of messages that were taken", got)
	}
	end()
	in.took(1, size)
	in.took(1, size)
	in.answered(frame(frameData, 0, 1, nil))
	if got := r.reserved(); got != 0 {
		t.Errorf("%d bytes are reserved after all was taken", got)
	}
}

// mustFollow follows data of stream 1, in frames of 16 KiB.
func (in *inbound) mustFollow(t *testing.T, b []byte) {
	t.Helper()
	for part := range slices.Chunk(b, 16<<10) {
		if err := in.follow(frame(frameData, 0, 1, part)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestAnAnswerLeavesThePlaceWhileLargeMessagesWait: a client that sends one large message after the other does not keep the place beside the share, nor
// what its largest message had.
func TestAnAnswerLeavesThePlaceWhileLargeMessagesWait(t *testing.T) {
	for _, first := range []int{receivedBytesMin * 2, receivedBytesMin * 12} {
		r := newReceiving(16 * 4 * receivedBytesMin)
		in := newFollowed(t, r)
		in.mustFollow(t, prefixed(first))
		if got := r.beside.held.Load() != nil; got != (int64(first) > r.large.limit/2) {
			t.Fatalf("a message of %d: beside the share: %v", first, got)
		}
		in.mustFollow(t, prefixed(receivedBytesMin))
		in.answered(frame(frameData, 0, 1, nil))
		if r.beside.held.Load() == nil && in.large != int64(first) {
			t.Errorf("a message of %d that was not taken does not count", first)
		}
		in.took(1, int64(first))
		in.answered(frame(frameData, 0, 1, nil))
		if r.beside.held.Load() != nil || in.large > receivedBytesMin {
			t.Errorf("a message of %d that was answered counts, because another one waits", first)
		}
	}
}

// TestAnAnswerLeavesThePlaceOfAMessageThatFoundNoRoom: also while the next message of its stream, which is in the share or small, is received.
func TestAnAnswerLeavesThePlaceOfAMessageThatFoundNoRoom(t *testing.T) {
	const first, second = 2 * receivedBytesMin, 3 * receivedBytesMin
	for _, third := range []int{receivedBytesMin, 2 * receivedBytesMin, 1000} {
		r := newReceiving(16 * 4 * receivedBytesMin)
		in := newFollowed(t, r)
		in.mustFollow(t, prefixed(first))
		others := r.large.limit - first
		r.large.reserved.Add(others)
		in.mustFollow(t, prefixed(second))
		if got := r.beside.bytes(); got != second || in.large != first {
			t.Fatalf("%d bytes are beside the share, and %d in it", got, in.large)
		}
		r.large.reserved.Add(-others)
		in.took(1, first)
		in.answered(frame(frameData, 0, 1, nil))
		if got := r.beside.bytes(); got != second {
			t.Errorf("a message that was not taken has left its place, with %d bytes in it", got)
		}
		in.mustFollow(t, prefixed(third)[:third/2])
		in.took(1, second)
		in.answered(frame(frameData, 0, 1, nil))
		if got := r.beside.bytes(); got != 0 {
			t.Errorf("a message of %d follows: %d bytes are beside the share", third, got)
		}
		in.end()
		if got := r.reserved() + r.beside.bytes(); got != 0 {
			t.Errorf("%d bytes are reserved at the end", got)
		}
	}
}

// TestADroppedMessageLeavesTheRoomOfTheNext: the server keeps nothing of what it has taken before it has answered. What it has not taken, and what arrives,
// counts on; and the client must still end its request.
func TestADroppedMessageLeavesTheRoomOfTheNext(t *testing.T) {
	const first, next = 3 * receivedBytesMin, 2 * receivedBytesMin
	for _, placed := range []bool{false, true} {
		for _, part := range []int{0, next / 2, grpcPrefixBytes + next} {
			r := newReceiving(16 * 4 * receivedBytesMin)
			in := newFollowed(t, r)
			others := r.large.limit - receivedBytesMin
			if placed {
				r.large.reserved.Add(others)
			}
			in.mustFollow(t, prefixed(first))
			if placed {
				r.large.reserved.Add(-others)
			}
			if got := r.beside.bytes() > 0; got != placed {
				t.Fatalf("beside the share: %v, want %v", got, placed)
			}
			in.mustFollow(t, prefixed(next)[:part])
			in.change(1, in.drop)
			if got := in.large + r.beside.bytes(); got < first {
				t.Errorf("%d bytes are counted for a message of %d that was not taken", got, first)
			}
			in.took(1, first)
			in.change(1, in.drop)
			want := int64(0)
			if part > 0 {
				want = next
			}
			if got := in.large; got != want || r.beside.bytes() != 0 {
				t.Errorf("%d bytes of the next one have come: %d are counted, and %d beside the share", part, got, r.beside.bytes())
			}
			if m := in.open[1]; !m.incomplete() {
				t.Error("the request counts as answered")
			}
		}
	}
}

// TestSmallFramesOfAPrefixAreTaken: a frame that has only a part of the prefix counts with the small message that has begun in it.
func TestSmallFramesOfAPrefixAreTaken(t *testing.T) {
	r := newReceiving(4 << 20)
	in := newFollowed(t, r)
	m := prefixed(100)
	for range 1000 {
		for _, part := range [][]byte{m[:3], m[3:]} {
			if err := in.follow(frame(frameData, 0, 1, part)); err != nil {
				t.Fatal(err)
			}
		}
		in.took(1, 100)
		if in.small != 0 {
			t.Fatalf("%d bytes are counted after all was taken", in.small)
		}
	}
}
