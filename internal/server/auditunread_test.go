package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/audit"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// withBlockingAudit refuses requests whose lines find no room.
func withBlockingAudit(c *config.Config) { c.Audit.Full = audit.FullBlock }

// invokeRequest sets a key, and is answered with the value.
func invokeRequest(id uint64, key string, value []byte) *pb.PipelineRequest {
	return &pb.PipelineRequest{Id: id, Request: &pb.PipelineRequest_Invoke{Invoke: &pb.InvokeRequest{
		Durability: pb.Durability_DURABILITY_SYNC,
		Invocation: &pb.Invocation{Key: []byte(key), ReturnNew: true, Operation: &pb.Invocation_GetAndSet{GetAndSet: value}},
	}}}
}

// wantOneLineEach expects one line for each key.
func wantOneLineEach(t *testing.T, all []auditLine, keys ...string) {
	t.Helper()
	for _, key := range keys {
		n := 0
		for _, l := range all {
			if slices.Contains(l.Writes, key) {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%s is written, and has %d lines", key, n)
		}
	}
}

// TestWritesOfABrokenPipelineHaveTheirLines: also the one whose answer waits for room among those that the client has not read. startAudited looks at
// the room of their lines, too.
func TestWritesOfABrokenPipelineHaveTheirLines(t *testing.T) {
	h, lines := startAudited(t, withBlockingAudit)
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	stream, err := pb.NewKVServiceClient(h.dialDeaf(t)).Pipeline(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for i := range uint64(3) {
		key := fmt.Sprintf("key-%d", i)
		mustSend(t, stream, invokeRequest(i+1, key, bytes.Repeat([]byte("v"), 600<<10)))
		keys = append(keys, key)
	}
	eventually(t, "all are written", func() bool { return h.get(t, keys[2]).Found })
	cancel()
	eventually(t, "the stream has ended", func() bool { return h.counters.streams.Load() == 0 })
	wantOneLineEach(t, lines(), keys...)
}

// brokenAfter is a stream that breaks after some messages.
type brokenAfter struct {
	grpc.ServerStream
	messages int
}

func (b *brokenAfter) SendMsg(any) error {
	if b.messages--; b.messages < 0 {
		return errors.New("broken")
	}
	return nil
}

// TestAnswersOfABrokenPipelineEndOnce: those that were sent, that which failed, and those that were not.
func TestAnswersOfABrokenPipelineEndOnce(t *testing.T) {
	h := mustStart(t)
	later := ackWait{epoch: 1 << 40, durability: mvcc.DurabilitySync}
	waiting := []answer{{id: 1}, {id: 2, ackWait: later}, {id: 3}, {id: 4}, {id: 5, ackWait: later}}
	for i := range waiting {
		waiting[i].method = telemetry.MethodPut
	}
	p := &pipeline{stream: &brokenAfter{messages: 1}}
	p.server, p.ctx, p.conn = h.Server, t.Context(), &connection{shard: new(telemetry.Requests).Shard()}
	p.init()
	left, err := p.sendAcknowledged(waiting)
	var ids []uint64
	for i := range left {
		ids = append(ids, left[i].id)
	}
	if err == nil || !slices.Equal(ids, []uint64{2, 4, 5}) {
		t.Errorf("%v: %d are left", err, ids)
	}
}
