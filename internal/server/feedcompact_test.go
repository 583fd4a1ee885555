package server

import (
	"fmt"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// TestAWatchKeepsNoMoreThanItsKeys: a message may have the field of a key twice, first with a long one, whose memory the decoder uses for the second.
func TestAWatchKeepsNoMoreThanItsKeys(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		const watches, long = 64, 250 << 10
		h := mustStart(t, with)
		stream, err := pb.NewFeedServiceClient(h.conn).Watch(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		var before int64
		for i := range uint64(watches) {
			r := new(pb.KeyRange)
			twice := protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), make([]byte, long))
			r.ProtoReflect().SetUnknown(protowire.AppendString(protowire.AppendTag(twice, 1, protowire.BytesType), fmt.Sprint(i)))
			create := &pb.CreateWatch{WatchId: i + 1, Ranges: []*pb.KeyRange{r}, Start: &pb.CreateWatch_Now{Now: new(pb.WatchNow)}}
			if err := stream.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: create}}); err != nil {
				t.Fatal(err)
			}
			if got, err := stream.Recv(); err != nil || got.GetCreated() == nil {
				t.Fatal(got, err)
			}
			if i == 0 {
				before = liveHeap()
			}
		}
		if n := liveHeap() - before; n > watches*long/8 {
			t.Errorf("%d watches keep %d bytes, %d each", watches, n, n/watches)
		}
	})
}
