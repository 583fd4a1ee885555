package server

import (
	"bytes"
	"sync"
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// TestLargeValuesCountBeforeTheyAreCopied: a read is refused before it copies a large value that
// the share of answers has no room for, and small reads of the same connection go on, alone, in a
// pipeline, and in a transaction.
func TestLargeValuesCountBeforeTheyAreCopied(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Limits.InflightBytes = 64 * config.MiB })
	h.putLarge(t, 1, 4<<20)
	h.put(t, "small", "value")
	var conns []*connection
	for range 2 { // each gets half of the share
		conns = append(conns, new(connection))
	}
	var held []*memoryCharge
	for _, conn := range conns {
		c, err := h.admission.charge(conn, int(h.admission.words[shareAnswers].limit.bytes/2), false)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, c)
	}
	for range 3 {
		_, err := h.kv.Get(testContext(t), &pb.GetRequest{Key: []byte("large/000")})
		if f := failureOf(t, err); f.reason != "OVERLOADED" {
			t.Errorf("a large get: %v", err)
		}
		if string(h.get(t, "small").Value) != "value" {
			t.Error("a small get")
		}
	}
	stream := h.pipeline(t, testContext(t))
	mustSend(t, stream, getRequest(1, "large/000"))
	mustSend(t, stream, getRequest(2, "small"))
	answers := map[uint64]*pb.PipelineResponse{} // in any order
	for range 2 {
		got := mustRecv(t, stream)
		answers[got.Id] = got
	}
	if answers[1].GetError() == nil {
		t.Error("a large get of a pipeline was answered")
	}
	if string(answers[2].GetGet().GetValue()) != "value" {
		t.Errorf("a small get of a pipeline: %v", answers[2])
	}
	for _, c := range held {
		c.release()
	}
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			out, err := h.kv.Get(testContext(t), &pb.GetRequest{Key: []byte("large/000")})
			if err != nil && failureOf(t, err).reason != "OVERLOADED" || err == nil && !bytes.Equal(out.Value, bytes.Repeat([]byte("v"), 4<<20)) {
				t.Errorf("a large get: %v", err)
			}
		})
	}
	all.Wait()
}

// TestAnswerIsCountedWithItsLargeValue: a read whose value has found room is not refused when its
// answer, which is a little larger, is counted.
func TestAnswerIsCountedWithItsLargeValue(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Limits.InflightBytes = 64 * config.MiB })
	const value = 4 << 20
	h.putLarge(t, 1, value)
	room := int64(h.admission.words[shareAnswers].limit.bytes) - value // of which two connections take all
	for range 2 {
		c, err := h.admission.charge(new(connection), int(room/2), false)
		if err != nil {
			t.Fatal(err)
		}
		defer c.release()
	}
	for range 3 {
		out, err := h.kv.Get(testContext(t), &pb.GetRequest{Key: []byte("large/000")})
		if err != nil || len(out.Value) != value {
			t.Fatalf("a get for which there is room: %v", err)
		}
		eventually(t, "the answer is sent", func() bool { _, _, answers := h.admission.inflight(); return answers == room })
	}
	stream := h.pipeline(t, testContext(t))
	mustSend(t, stream, getRequest(1, "large/000"))
	if got := mustRecv(t, stream); got.GetError() != nil {
		t.Errorf("a get of a pipeline for which there is room: %v", got.GetError())
	}
}
