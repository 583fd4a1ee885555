package server

import (
	"bytes"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// TestAPipelinedRequestKeepsNoPlaceForItsAnswer: nor does one that ends the pipeline, whose status comes after the answers. The client takes no answers.
func TestAPipelinedRequestKeepsNoPlaceForItsAnswer(t *testing.T) {
	before := keepaliveParams
	t.Cleanup(func() { keepaliveParams = before })
	keepaliveParams.Time = time.Hour // the client answers no pings
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with, func(c *config.Config) {
			c.Limits.InflightBytes, c.Limits.BatchSize, c.Limits.ValueSize, c.MessageTimeout = 8*config.MiB, 2*config.MiB, 2*config.MiB, time.Hour
		})
		size := int(h.receiving.large.limit/2) + 1 // more than the share may have
		malformed := new(pb.PipelineRequest)
		malformed.ProtoReflect().SetUnknown(append(protowire.AppendTag(nil, 2, protowire.VarintType), bytes.Repeat([]byte{0xff}, size)...))
		for name, large := range map[string]*pb.PipelineRequest{
			"executed":  putRequest(2, "k", string(make([]byte, size)), pb.Durability_DURABILITY_ASYNC),
			"malformed": malformed,
		} {
			c := h.dialRaw(t)
			c.send(frame(4, 0, 0, []byte{0, 4, 0, 0, 0, 0})) // no window
			c.begin(1, pb.KVService_Pipeline_FullMethodName, "120S")
			puts := h.observer.requests.Totals(telemetry.MethodPut).Count
			c.sendWhole(putRequest(1, "k", "", pb.Durability_DURABILITY_ASYNC))
			eventually(t, "the first is executed", func() bool { return h.observer.requests.Totals(telemetry.MethodPut).Count == puts+1 })
			c.sendWhole(large)
			if name == "executed" {
				eventually(t, "the large one is executed", func() bool { return h.observer.requests.Totals(telemetry.MethodPut).Count == puts+2 })
			}
			eventually(t, name+": it leaves the place", func() bool { return h.receiving.beside.bytes() == 0 })
			if n := h.receiving.large.reserved.Load(); n != 0 {
				t.Errorf("%s: %d bytes are reserved", name, n)
			}
			_ = c.Close()
		}
	})
}
