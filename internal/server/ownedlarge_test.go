package server

import (
	"bytes"
	"fmt"
	"sync/atomic"
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// TestLargeWritesOfOneClientLeaveRoomToOthers while the disk takes long: by connection alone, a client with many of them had all of the share.
func TestLargeWritesOfOneClientLeaveRoomToOthers(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with, func(c *config.Config) {
			c.SegmentSize, c.MemtableSize = 16*config.MiB, 16*config.MiB
			c.Limits.InflightBytes, c.Limits.BatchSize, c.Limits.ValueSize = 16*config.MiB, config.MiB, config.MiB // 4 MiB for large writes
		})
		value := bytes.Repeat([]byte("v"), 64<<10)
		put := func(kv pb.KVServiceClient, key string) error {
			_, err := kv.Put(testContext(t), &pb.PutRequest{Key: []byte(key), Value: value, Durability: pb.Durability_DURABILITY_SYNC})
			return err
		}
		release, start := h.holdSyncs(t), h.store.Visible()
		const conns, each = 40, 5
		var refused atomic.Int64
		ended := make(chan struct{}, conns*each)
		for c := range conns {
			kv := pb.NewKVServiceClient(h.dialFrom(t, "127.0.0.2"))
			for i := range each {
				go func() {
					if put(kv, fmt.Sprintf("%d-%d", c, i)) != nil {
						refused.Add(1)
					}
					ended <- struct{}{}
				}()
			}
		}
		share := &h.admission.words[shareLargeWrites].word
		eventually(t, "all wait for the disk, or are refused", func() bool {
			wait := share.Load() >> admissionShift
			return refused.Load()+int64(wait) == conns*each && uint64(h.store.Visible()-start) >= wait
		})
		before, other := h.store.Visible(), make(chan error, 1)
		go func() { other <- put(h.kv, "of another client") }()
		eventually(t, "it is executed, or refused", func() bool { return h.store.Visible() > before || len(other) > 0 })
		release()
		if err := <-other; err != nil {
			t.Errorf("with %d of %d refused: %v", refused.Load(), conns*each, err)
		}
		for range conns * each {
			<-ended
		}
		if refused.Load() == 0 {
			t.Error("the share had room for all")
		}
	})
}
