package server

import (
	"runtime"
	"testing"
	"weak"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
)

// TestIdleClientsKeepNoTable: each change of users makes a table, and any user may change its own tokens as often as it likes. A connection or
// stream that is idle since must not keep the table of then: there may be thousands, each with a table of its own.
func TestIdleClientsKeepNoTable(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		for i := range 200 {
			h.put(t, string(rune('k'))+string(rune(0x100+i)), string(make([]byte, 8<<10)))
		}
		ctx := as(testContext(t), "alice")
		for _, kind := range []struct {
			name  string
			begin func(*clients) error
		}{
			{"bulk load", func(c *clients) error {
				stream, err := c.kv.BulkLoad(ctx)
				if err == nil {
					err = stream.Send(&pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: []byte("k"), Value: []byte("v")}}})
				}
				if err == nil {
					eventually(t, "the load has begun", func() bool {
						requests, _, _ := h.admission.inflight()
						return requests > 0
					})
				}
				return err
			}},
			{"connection", func(c *clients) error {
				_, err := c.kv.Get(ctx, &pb.GetRequest{Key: []byte("k")})
				return err
			}},
			{"pipeline", func(c *clients) error {
				stream, err := c.kv.Pipeline(ctx)
				if err == nil {
					_ = stream.Send(&pb.PipelineRequest{Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte("k")}}})
					_, err = stream.Recv()
				}
				return err
			}},
			{"transaction", func(c *clients) error {
				stream, err := c.txn.Transact(ctx)
				for _, m := range []*pb.TransactRequest{
					{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{}}},
					{Request: &pb.TransactRequest_Get{Get: &pb.KeyReadRequest{Key: []byte("k")}}},
				} {
					if err == nil {
						_ = stream.Send(m)
						_, err = stream.Recv()
					}
				}
				return err
			}},
			{"scan", func(c *clients) error {
				stream, err := c.kv.Scan(ctx, &pb.ScanRequest{Range: prefixRange("k"), PageBytes: 8 << 10})
				if err == nil {
					_, err = stream.Recv() // windows and buffers are full then
				}
				return err
			}},
			{"watch", func(c *clients) error {
				stream, err := c.feed.Watch(ctx)
				if err == nil {
					_ = stream.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{Ranges: []*pb.KeyRange{prefixRange("k")}}}})
					_, err = stream.Recv()
				}
				return err
			}},
			{"lock", func(c *clients) error {
				stream, err := c.lock.ObserveLock(ctx, &pb.ObserveLockRequest{Name: []byte("k")})
				if err == nil {
					_, err = stream.Recv()
				}
				return err
			}},
		} {
			h.setUsers(map[string][]auth.Grant{"alice": {grant("rwl", "k")}})
			if err := kind.begin(clientsOf(h.dial(t))); err != nil {
				t.Fatal(kind.name, err)
			}
			old := weak.Make(h.gate.table.Load().Table)
			h.setUsers(map[string][]auth.Grant{"alice": {grant("rwl", "k")}})
			eventually(t, "the table is not kept by an idle "+kind.name, func() bool {
				runtime.GC()
				return old.Value() == nil
			})
		}
	})
}
