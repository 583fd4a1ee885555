package server

import (
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// TestUnreadWalksLeaveSessionsToOthers: watches that begin with a walk have sessions for as long as their clients take nothing. They
// are bounded, so that other requests find some; one connection leaves some to the walks of others; and what is beyond is refused.
func TestUnreadWalksLeaveSessionsToOthers(t *testing.T) {
	for what, start := range map[string]func(c *pb.CreateWatch){
		"snapshots": func(c *pb.CreateWatch) { c.Start = &pb.CreateWatch_Snapshot{Snapshot: &pb.WatchSnapshot{}} },
		"differences": func(c *pb.CreateWatch) {
			c.Start, c.OnGap = &pb.CreateWatch_AfterEpoch{AfterEpoch: 2}, pb.OnGap_ON_GAP_DIFF
		},
	} {
		t.Run(what, func(t *testing.T) {
			h := mustStart(t, func(c *config.Config) {
				c.Limits.InflightRequests, c.Limits.Transactions, c.Retention, c.Feed.Retention = 64, 1, time.Hour, 0
			})
			h.put(t, string(coldKey(0)), "value")
			for i := range 30 { // each walk is more than the windows of its stream take
				h.put(t, "walk/"+strconv.Itoa(i), string(make([]byte, 100<<10)))
			}
			for h.Server.feed.feed.Oldest() <= 3 {
				if _, err := h.admin.Checkpoint(testContext(t), new(pb.CheckpointRequest)); err != nil {
					t.Fatal(err)
				}
				h.put(t, "more", string(make([]byte, 100_000)))
			}
			watches := func(conn *harness) *watcher {
				w := mustWatch(t, conn)
				for id := range uint64(watchWalksMax) {
					create := &pb.CreateWatch{WatchId: id, Ranges: []*pb.KeyRange{prefixRange("walk/")}}
					start(create)
					w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: create}})
				}
				return w
			}
			hostile := &harness{conn: h.dial(t)}
			for range 40 {
				watches(hostile)
			}
			most := 0
			eventually(t, "no more walks are begun", func() bool {
				before := most
				most, _ = h.store.Sessions()
				return h.Server.feed.streams.Load() == 40 && most > 0 && most == before
			})
			for range 3 {
				h.mustServeOthers(t)
			}
			refused := watches(hostile)
			failureOf(t, refused.ended()).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
			if w := watches(&harness{conn: h.dial(t)}); w.recv().GetEnded() != nil {
				t.Error("a walk of another connection was refused")
			}
		})
	}
}
