package server

import (
	"bytes"
	"io"
	"strings"
	"testing"
	"time"

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
		return all == 0 && lists == 0 && h.admission.waiting.held.Load() == 0
	})
}

// deafPipelines serves pipelines of one connection, one after the other, whose client has no window, and lets answers with values of 4 KB wait for a sync on each
// of them. It returns how much more the heap has then.
func (h *harness) deafPipelines(t *testing.T, pipelines, gets int) int64 {
	t.Helper()
	before := liveHeap()
	c := h.dialRaw(t)
	c.send(frame(4, 0, 0, []byte{0, 4, 0, 0, 0, 0})) // SETTINGS_INITIAL_WINDOW_SIZE
	go func() { _, _ = io.Copy(io.Discard, c) }()
	value := strings.Repeat("v", 4000)
	for i := range pipelines {
		release, visible := h.holdSyncs(t), h.store.Visible()
		c.begin(streamID(i), pb.KVService_Pipeline_FullMethodName, "100S")
		requests := encodedRequest(t, putRequest(0, "k", value, pb.Durability_DURABILITY_SYNC))
		c.send(frame(frameData, 0, streamID(i), append(requests, bytes.Repeat(encodedRequest(t, getRequest(1, "k")), gets)...)))
		eventually(t, "the put is executed", func() bool { return h.store.Visible() > visible })
		time.Sleep(5 * time.Millisecond) // as many of the others as there may be
		release()
		eventually(t, "it is durable", func() bool { return h.store.Durable() >= h.store.Visible() })
	}
	return liveHeap() - before
}

// TestAnswersThatHaveWaitedAndAreNotTakenHaveABound, beside a little of each pipeline: what waited for a sync is sent whatever the windows are, and the next sync
// must not find room for as much again.
func TestAnswersThatHaveWaitedAndAreNotTakenHaveABound(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with, func(c *config.Config) {
			c.Limits.InflightBytes, c.Limits.BatchSize, c.Limits.ValueSize = 4*config.MiB, config.MiB, config.MiB
		})
		const pipelines, gets = 64, 200
		const each = 128 << 10 // waitingOwn, as much in the transport, and a stream; without a bound 800 KB
		if got, most := h.deafPipelines(t, pipelines, gets), int64(4<<20/waitingPart+pipelines*each); got > most {
			t.Errorf("%d bytes more are in use; want at most %d", got, most)
		} else {
			t.Logf("%d bytes more are in use; at most %d may be", got, most)
		}
	})
}

// TestWhatAClientHasTooMuchTakesNothingFromOthers: each of its pipelines may have waitingOwn, and more than that of the rounding, however many there are. It
// does not count beyond what the client may have.
func TestWhatAClientHasTooMuchTakesNothingFromOthers(t *testing.T) {
	var clients streamClients
	own := func(name string) owned {
		return (&connection{connectionLayers: connectionLayers{streams: clients.enter(name)}}).owns(ownedWaiting)
	}
	var w waitingAnswers
	w.init(64 << 20)
	pipelines := make([]struct {
		own     owned
		counted int64
	}, 1000)
	for i := range pipelines {
		pipelines[i].own = own("many")
		w.count(pipelines[i].own, &pipelines[i].counted, waitingOwn+1)
	}
	if !w.full(pipelines[0].own) {
		t.Error("a client may have more than three quarters")
	}
	other, counted := own("other"), int64(0)
	for bytes := int64(1 << 10); bytes <= w.limit/16; bytes += 1 << 10 {
		if w.count(other, &counted, bytes); w.full(other) {
			t.Fatalf("another client has %d of %d bytes, and may have no more", bytes, w.limit)
		}
	}
	w.count(other, &counted, 0)
	for i := range pipelines {
		w.count(pipelines[i].own, &pipelines[i].counted, 0)
	}
	if n := w.held.Load(); n != 0 {
		t.Errorf("%d bytes are counted of nothing", n)
	}
}
