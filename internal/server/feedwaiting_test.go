package server

import (
	"runtime"
	"testing"
	"weak"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/feed"
)

// TestAResponseThatWaitsForItsClientKeepsNoMessage: the messages of a response take 330 KB, whatever is in it, and thousands of streams may wait with one.
func TestAResponseThatWaitsForItsClientKeepsNoMessage(t *testing.T) {
	r := newChangesResponse()
	r.begin(&feed.Commit{Epoch: 7}, false)
	r.add(eventBytes, feed.Position{Epoch: 7}).Key = []byte("k")
	r.changes.Commits, r.body.Changes = r.commitsTo[:r.begun], &r.changes
	r.WatchId, r.Body = 1, &r.body
	filled := weak.Make(r)
	m := newCountedMessage(r)
	encoded, err := pb.NewCodec().Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	got := new(pb.WatchResponse)
	if err := pb.NewCodec().Unmarshal(encoded, got); err != nil || got.GetChanges().GetCommits()[0].GetEpoch() != 7 {
		t.Fatalf("%v: %v", err, got)
	}
	for range 3 { // the pool lets go of it
		runtime.GC()
	}
	if filled.Value() != nil {
		t.Fatal("what waits for the client keeps the messages from which it was encoded")
	}
	runtime.KeepAlive(m)
	encoded.Free()
}
