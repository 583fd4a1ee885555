package server

import (
	"fmt"
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// TestResponsesOfAllStreamsStayInTheirShare, in whatever order the streams come, and each may have the least.
func TestResponsesOfAllStreamsStayInTheirShare(t *testing.T) {
	var s responseShare
	var taken []int64
	total := int64(0)
	for i := range 1024 {
		n := s.take(fmt.Sprint(i))
		if n < watchResponseBytesMin || n > watchResponseBytes || n&(n-1) != 0 {
			t.Fatalf("stream %d may have %d bytes", i, n)
		}
		if i < 64 && n != watchResponseBytes {
			t.Errorf("stream %d may have %d bytes although there is room", i, n)
		}
		taken, total = append(taken, n), total+n
	}
	if total > watchResponsesBytes || total < watchResponsesBytes*9/10 {
		t.Errorf("1024 responses have %d bytes, want %d", total, watchResponsesBytes)
	}
	if n := s.keep("0", taken[0], 100_000); n != 128<<10 {
		t.Errorf("a response of 100,000 bytes keeps %d", n)
	} else {
		taken[0] = n
	}
	if n := s.keep("1023", taken[1023], 1); n != taken[1023] {
		t.Errorf("of the least, %d bytes were kept", n)
	}
	for i, n := range taken {
		s.give(fmt.Sprint(i), n)
	}
	if n := s.taken(); n != 0 || len(s.clients) != 0 {
		t.Errorf("%d bytes of %d clients are counted for ever", n, len(s.clients))
	}
}

// taken is what responses have, or have for ever, beyond the least.
func (s *responseShare) taken() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used
}

// useUp lets each response have the least, until it is undone.
func (s *responseShare) useUp() (undo func()) {
	add := func(bytes int64) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.addLocked("all", bytes)
	}
	add(watchResponsesMore)
	return func() { add(-watchResponsesMore) }
}

// TestAClientLeavesResponsesToOthers: however many streams it has.
func TestAClientLeavesResponsesToOthers(t *testing.T) {
	var s responseShare
	for i := range 4096 {
		s.take("hostile")
		if i%64 == 0 {
			n := s.take("other")
			if n < 128<<10 {
				t.Fatalf("beside %d streams of another client a response has %d bytes", i+1, n)
			}
			s.give("other", n)
		}
	}
	if n := s.taken(); n > watchResponsesMore*3/4 {
		t.Errorf("one client has %d of %d bytes", n, watchResponsesMore)
	}
}

// TestDeafStreamsLeaveRoomForResponses: streams that are opened one after another, each with a part of a snapshot that its client does not take. What is
// counted is what they have, and other streams go on. The harness checks that nothing is counted afterwards.
func TestDeafStreamsLeaveRoomForResponses(t *testing.T) {
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		t.Run(string(transport), func(t *testing.T) {
			h := mustStart(t, func(c *config.Config) { c.Transport = transport })
			var e uint64
			const keys, streams = 400, 60
			for i := range keys {
				e = h.put(t, fmt.Sprint(i), string(make([]byte, 1<<10)))
			}
			hostile := &harness{conn: h.dialDeaf(t)}
			used := func() int64 { return h.feed.responses.taken() }
			for i := range streams {
				create := &pb.CreateWatch{Start: &pb.CreateWatch_Snapshot{Snapshot: &pb.WatchSnapshot{}}}
				if i%2 == 1 {
					create = &pb.CreateWatch{Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e - keys}}
				}
				mustWatch(t, hostile, create)
				eventually(t, "the part is on its way", func() bool { return used() >= int64(i+1)*watchResponseBytes/4 })
			}
			if got := used(); got > watchResponsesMore {
				t.Errorf("%d streams have %d bytes", streams, got)
			}
			for range 2 { // one that listens takes all of it, again and again
				w := mustWatch(t, h, &pb.CreateWatch{Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e - keys}})
				for n := 0; n < keys; {
					for _, c := range w.recv().GetChanges().GetCommits() {
						n += len(c.Events)
					}
				}
				w.cancel()
			}
		})
	}
}

// TestPartsOfWalksFitTheirResponses: an entry that does not fit into what is left of a part begins the next one.
func TestPartsOfWalksFitTheirResponses(t *testing.T) {
	h := mustStart(t)
	const keys, size = 4, 200_000
	var e uint64
	for i := range keys {
		e = h.put(t, fmt.Sprint(i), string(make([]byte, size)))
	}
	for name, create := range map[string]*pb.CreateWatch{
		"snapshot": {Start: &pb.CreateWatch_Snapshot{Snapshot: &pb.WatchSnapshot{}}},
		"log":      {Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e - keys}},
	} {
		w := mustWatch(t, h, create)
		for n := 0; n < keys; {
			r := w.recv()
			n += len(r.GetSnapshot().GetEntries())
			for _, c := range r.GetChanges().GetCommits() {
				n += len(c.Events)
			}
			if bytes := r.SizeVT(); bytes > watchResponseBytes {
				t.Errorf("%s: a response has %d bytes", name, bytes)
			}
		}
		w.cancel()
	}
}
