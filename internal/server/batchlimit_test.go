package server

import (
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// TestBatchLimitCountsKeysAndValues: a batch whose keys and values are exactly as long as the limit
// is accepted, in one operation or in many, and one byte more is refused with the limit's own
// error, not the transport's.
func TestBatchLimitCountsKeysAndValues(t *testing.T) {
	const limit = config.MiB
	h := mustStart(t, func(c *config.Config) { c.Limits.BatchSize, c.Limits.ValueSize = limit, limit })
	for _, operations := range []int{1, 2, 1000, 20_000} {
		for _, excess := range []int{0, 1} {
			var batch pb.BatchWriteRequest
			left := int(limit) + excess
			for i := range operations {
				m := &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "%d/%06d", operations, i)}
				size := left / (operations - i)
				m.Value = make([]byte, size-len(m.Key))
				left -= size
				batch.Mutations = append(batch.Mutations, m)
			}
			_, err := h.kv.BatchWrite(testContext(t), &batch)
			if excess == 0 {
				if err != nil {
					t.Errorf("%d operations at the limit: %v", operations, err)
				}
				continue
			}
			failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE, "limit", "size", "unit")
		}
	}
}
