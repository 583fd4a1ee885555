package server

import (
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// waitingOf is how many answers of each pipeline wait, and what the connections keep for them.
func (h *harness) waitingOf() (each []int, all, lists int) {
	q := &h.direct.streams
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, s := range q.all {
		p := s.(*directPipeline) //nolint:forcetypeassert // the test opens nothing else
		p.mu.Lock()
		each, all = append(each, p.waiting), all+p.waiting
		p.mu.Unlock()
		p.client.acks.mu.Lock()
		lists = max(lists, cap(p.client.acks.waiting))
		p.client.acks.mu.Unlock()
	}
	return each, all, lists
}

// TestAnswersOfManyPipelinesThatWaitHaveABoundTogether: while a device does not return from a sync, each pipeline may have a few, whatever its
// client sends, and when it returns, all go on. Nothing is kept afterwards.
func TestAnswersOfManyPipelinesThatWaitHaveABoundTogether(t *testing.T) {
	h := mustStart(t, withDirect, func(c *config.Config) {
		c.Limits.InflightBytes, c.Limits.BatchSize, c.Limits.ValueSize = 4*config.MiB, config.MiB, config.MiB
	})
	release := h.holdSyncs(t)
	const pipelines, requests = 40, 300
	const most = 4<<20/waitingPart/waitingAnswerBytes + pipelines*(waitingOwn+waitingStep)/waitingAnswerBytes
	streams := make([]pipelineClient, pipelines)
	for i := range streams {
		streams[i] = h.pipeline(t, testContext(t))
		if i == 0 {
			mustSend(t, streams[i], putRequest(0, "k", "v", pb.Durability_DURABILITY_SYNC))
			eventually(t, "the put is visible", func() bool { return h.store.Visible() > 0 })
		}
		for range requests {
			mustSend(t, streams[i], getRequest(1, "k"))
		}
	}
	eventually(t, "each pipeline has what it may always have", func() bool {
		each, all, _ := h.waitingOf()
		if all > most {
			t.Fatalf("%d answers wait; want at most %d", all, most)
		}
		for _, n := range each {
			if n < waitingOwn/waitingAnswerBytes {
				return false
			}
		}
		return len(each) == pipelines
	})
	release()
	for i, stream := range streams {
		n := requests
		if i == 0 {
			n++
		}
		for range n {
			if got := mustRecv(t, stream); got.GetError() != nil {
				t.Fatal(got)
			}
		}
	}
	eventually(t, "nothing is kept", func() bool {
		_, all, lists := h.waitingOf()
		return all == 0 && lists == 0 && h.direct.waiting.held.Load() == 0
	})
}
