package server

import (
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// TestTokensOfOneClientEndNoneOfOthers: a client gets more tokens than there are leases, and also for each epoch of which another client has one.
func TestTokensOfOneClientEndNoneOfOthers(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.fill(t, 10)
		victim := pb.NewKVServiceClient(h.dialFrom(t, "127.0.0.2"))
		token := scanToken(t, victim)
		most := h.store.Stats().Limits.SnapshotLeases
		var newest []byte
		for i := range most + 10 {
			if i > 0 { // the first is of the same epoch
				h.put(t, "000", "flood")
			}
			newest = scanToken(t, h.kv)
		}
		eventually(t, "every place is taken", func() bool { return h.counters.streams.Load() == 0 && h.store.Stats().Snapshots.Leases == most })
		later := h.put(t, "001", "later")
		eventually(t, "the epochs have only their leases", func() bool { return uint64(h.store.LowWatermark()) >= later })
		for name, token := range map[string][]byte{"of another client": token, "the newest": newest} {
			if _, err := firstPage(t, h.kv, &pb.ScanRequest{ResumeToken: token}); err != nil {
				t.Errorf("a token %s: %v", name, err)
			}
		}
	})
}

// scanToken is the token of a scan that has more to return.
func scanToken(t *testing.T, kv pb.KVServiceClient) []byte {
	t.Helper()
	page, err := firstPage(t, kv, &pb.ScanRequest{Limit: 5, Tokens: pb.ResumeTokens_RESUME_TOKENS_ALL})
	if err != nil || len(page.GetResumeToken()) == 0 {
		t.Fatalf("%v, %v: no token", page, err)
	}
	return page.GetResumeToken()
}

func firstPage(t *testing.T, kv pb.KVServiceClient, r *pb.ScanRequest) (*pb.ScanResponse, error) {
	t.Helper()
	stream, err := kv.Scan(testContext(t), r)
	if err != nil {
		t.Fatal(err)
	}
	page, err := stream.Recv()
	for last := err; last == nil; {
		_, last = stream.Recv()
	}
	return page, err
}
