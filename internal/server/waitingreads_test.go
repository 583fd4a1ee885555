package server

import (
	"testing"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// TestReadsOfOneClientThatWaitForASyncLeaveRoomToOthers: what they have read could be lost in a crash. While the device is slow, one client with many connections
// had all small reads.
func TestReadsOfOneClientThatWaitForASyncLeaveRoomToOthers(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		const requests, conns, each = 40, 8, 8
		h := mustStart(t, with, func(c *config.Config) { c.Limits.InflightRequests = requests })
		h.put(t, "durable", "v")
		release, ctx, visible := h.holdSyncs(t), testContext(t), h.store.Visible()
		written := make(chan error, 1)
		go func() {
			_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k"), Durability: pb.Durability_DURABILITY_SYNC})
			written <- err
		}()
		eventually(t, "a put waits", func() bool { return h.store.Visible() > visible })
		ended := make(chan error, conns*each)
		for range conns {
			kv := pb.NewKVServiceClient(h.dialFrom(t, "127.0.0.2"))
			for range each {
				go func() {
					_, err := kv.Get(ctx, &pb.GetRequest{Key: []byte("k")})
					ended <- err
				}()
			}
		}
		share := &h.admission.words[shareSmallReads].word
		eventually(t, "all wait, or are refused", func() bool {
			return len(ended)+int(share.Load()>>admissionShift) == conns*each && h.admission.refused.Load() == uint64(len(ended))
		})
		refused := len(ended)
		if left := requests - (conns*each - refused); left < requests/4 {
			t.Errorf("%d of %d requests are left", left, requests)
		}
		if _, err := h.kv.Get(ctx, &pb.GetRequest{Key: []byte("durable")}); err != nil {
			t.Errorf("of another client: %v", err)
		}
		release()
		if err := <-written; err != nil {
			t.Error(err)
		}
		for range conns * each {
			if err := <-ended; err != nil {
				failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_OVERLOADED)
			}
		}
		eventually(t, "nothing is counted", func() bool { return share.Load() == 0 && h.clientsHave(ownedReadRequests) == 0 })
	})
}

// clientsHave is how much all clients have of a kind.
func (h *harness) clientsHave(kind ownedKind) (n int64) {
	c := &h.receiving.clients
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, client := range c.all {
		n += client.owned[kind].Load()
	}
	return n
}
