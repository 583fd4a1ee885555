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
	for i := range 4096 {
		n := s.take()
		if n < watchResponseBytesMin || n > watchResponseBytes || n&(n-1) != 0 {
			t.Fatalf("stream %d may have %d bytes", i, n)
		}
		if i < 64 && n != watchResponseBytes {
			t.Errorf("stream %d may have %d bytes although there is room", i, n)
		}
		taken, total = append(taken, n), total+n
	}
	if total > watchResponsesBytes || total < watchResponsesBytes*9/10 {
		t.Errorf("4096 responses have %d bytes, want %d", total, watchResponsesBytes)
	}
	if n := s.keep(taken[0], 100_000); n != 128<<10 {
		t.Errorf("a response of 100,000 bytes keeps %d", n)
	} else {
		taken[0] = n
	}
	if n := s.keep(taken[4095], 1); n != taken[4095] {
		t.Errorf("of the least, %d bytes were kept", n)
	}
	for _, n := range taken {
		s.give(n)
	}
	if n := s.used.Load(); n != 0 {
		t.Errorf("%d bytes are counted for ever", n)
	}
}

// TestDeafStreamsLeaveRoomForResponses: streams that are opened one after another, each with a part of a snapshot that its client does not take. What is
// counted is what they have, and other streams go on. The harness checks that nothing is counted afterwards.
func TestDeafStreamsLeaveRoomForResponses(t *testing.T) {
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		t.Run(string(transport), func(t *testing.T) {
			h := mustStart(t, func(c *config.Config) { c.Transport = transport })
			var e uint64
			const keys, streams = 400, 150
			for i := range keys {
				e = h.put(t, fmt.Sprint(i), string(make([]byte, 1<<10)))
			}
			hostile := &harness{conn: h.dialDeaf(t)}
			used := func() int64 { return h.feed.responses.used.Load() }
			for i := range streams {
				before := used()
				create := &pb.CreateWatch{Start: &pb.CreateWatch_Snapshot{Snapshot: &pb.WatchSnapshot{}}}
				if i%2 == 1 {
					create = &pb.CreateWatch{Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e - keys}}
				}
				mustWatch(t, hostile, create)
				eventually(t, "the part is on its way", func() bool { return used() > before })
			}
			if got := used(); got > watchResponsesMore || got < streams*watchResponseBytes/4 {
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
