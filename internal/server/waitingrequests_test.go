package server

import (
	"errors"
	"io"
	"testing"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// TestRequestsThatWaitForTheirPipelineHaveABound: each stream has a window, and all windows together are far more than there is room for.
// Beyond it a pipeline ends, after the answers to what it has executed.
func TestRequestsThatWaitForTheirPipelineHaveABound(t *testing.T) {
	h := mustStart(t, withDirect, func(c *config.Config) {
		c.Limits.InflightBytes, c.Limits.BatchSize, c.Limits.ValueSize = 4*config.MiB, config.MiB, config.MiB
	})
	release := h.holdSyncs(t)
	first := h.pipeline(t, testContext(t))
	mustSend(t, first, putRequest(0, "k", "v", pb.Durability_DURABILITY_SYNC))
	eventually(t, "the put is visible", func() bool { return h.store.Visible() > 0 })
	for range 1200 {
		mustSend(t, first, getRequest(1, "k"))
	}
	eventually(t, "the pipelines of the client may have few answers", func() bool {
		q := &h.direct.streams
		q.mu.Lock()
		defer q.mu.Unlock()
		for _, s := range q.all {
			if h.admission.waiting.full(s.(*directPipeline).conn.owns(ownedWaiting)) { //nolint:forcetypeassert // the test opens nothing else
				return true
			}
		}
		return false
	})
	const pipelines, requests = 10, 250
	long := string(make([]byte, 1000))
	streams := make([]pipelineClient, pipelines)
	for i := range streams {
		streams[i] = h.pipeline(t, testContext(t))
		for range waitingOwn / waitingAnswerBytes {
			mustSend(t, streams[i], getRequest(1, "k"))
		}
		go func() {
			for range requests {
				if streams[i].Send(getRequest(1, long)) != nil {
					return
				}
			}
			_ = streams[i].CloseSend()
		}()
	}
	eventually(t, "messages are refused", func() bool { return h.receiving.refused.Load() > 0 })
	if n, most := h.receiving.small.reserved.Load(), h.receiving.small.limit/2; n > most {
		t.Errorf("a connection has %d bytes; want at most %d", n, most)
	}
	release()
	ended := 0
	for _, stream := range streams {
		for {
			out, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_OVERLOADED, pb.EarlierRequests)
				ended++
				break
			}
			if out.GetError() != nil {
				t.Fatal(out)
			}
		}
	}
	if ended == 0 || ended == pipelines {
		t.Errorf("%d of %d pipelines have ended early", ended, pipelines)
	}
	eventually(t, "everything is given back", func() bool { return h.receiving.small.reserved.Load() == 0 })
}
