package server

import (
	"context"
	"fmt"
	"testing"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// encodingWatch is a stream whose client takes each response when it was encoded and looked at.
type encodingWatch struct {
	grpc.BidiStreamingServer[pb.WatchRequest, pb.WatchResponse]
	ctx  context.Context
	look func(encoded []byte)
}

func (s *encodingWatch) Context() context.Context { return s.ctx }

func (s *encodingWatch) SendMsg(m any) error {
	encoded, err := pb.NewCodec().Marshal(m)
	s.look(encoded.Materialize())
	encoded.Free()
	return err
}

// TestAPartOfAWalkIsReleasedWhenItIsEncoded: its client may take nothing for minutes.
func TestAPartOfAWalkIsReleasedWhenItIsEncoded(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with)
		var b pb.BatchWriteRequest
		for i := range 2 * watchEventsMax {
			b.Mutations = append(b.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "k%06d", i), Value: []byte("v")})
		}
		if _, err := h.kv.BatchWrite(testContext(t), &b); err != nil {
			t.Fatal(err)
		}
		for _, kind := range []walkKind{walkState, walkDifference, walkLoad} {
			sw := &streamWatch{id: 5}
			_, err := (&watchStream{server: h.Server}).toWatchOptions(&pb.CreateWatch{Ranges: []*pb.KeyRange{prefixRange("k")}}, &sw.options)
			must(t, err)
			sent := 0
			w := &watchStream{server: h.Server, conn: new(connection), watches: map[uint64]*streamWatch{5: sw}, stream: &encodingWatch{ctx: t.Context(), look: func(encoded []byte) {
				m := &pb.WatchResponse{}
				must(t, m.UnmarshalVT(encoded))
				sent += len(m.GetSnapshot().GetEntries()) + len(m.GetDifference().GetEvents())
				for _, c := range m.GetChanges().GetCommits() {
					sent += len(c.Events)
				}
				if p := sw.walk.part; p.entries != nil || p.events != nil || m.WatchId != 5 || len(m.ResumeToken) == 0 {
					t.Errorf("kind %d: %d entries and %d events are in memory while the client takes watch %d", kind, len(p.entries), len(p.events), m.WatchId)
				}
			}}}
			if a := h.authorized(t, pb.FeedService_Watch_FullMethodName); a != nil {
				w.rights.access = access{gate: a.gate, header: a.header}
			}
			must(t, w.openWalk(t.Context(), sw, &watchWalk{kind: kind}))
			more, err := w.sendWalk(t.Context(), sw)
			if err != nil || !more || sent != watchEventsMax {
				t.Errorf("kind %d: %d were sent, %v", kind, sent, err)
			}
			w.dropWalk(sw)
		}
	})
}
