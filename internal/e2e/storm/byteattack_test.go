package storm

import (
	"slices"
	"sync"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// TestStreamsTakenByteByByteStayInTheBound: streams whose clients send as much as they may, and take one byte of the answers after each message. Neither
// what waits for the handlers nor what they have answered exceeds the bound.
//
//	go test ./internal/e2e/storm -run TakenByteByByte -v -storm.attacks -storm.transport grpc-go
func TestStreamsTakenByteByByteStayInTheBound(t *testing.T) {
	binary := mustBuild(t)
	watch := func(c *pb.CreateWatch) *pb.WatchRequest {
		return &pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: c}}
	}
	get := func(key string) *pb.PipelineRequest {
		return &pb.PipelineRequest{Id: 1, Request: &pb.PipelineRequest_Get{Get: &pb.GetRequest{Key: []byte(key)}}}
	}
	for _, kind := range []attack{
		{"watches taken byte by byte", func(a *attacker) {
			a.bound = boundWithWatches(attackMemory, attackWatches)
			kinds := slices.Repeat([]pb.EventKind{pb.EventKind_EVENT_KIND_SET}, 62<<10)
			a.byteByByte(16<<10, "FeedService/Watch", a.framed(watch(&pb.CreateWatch{Ranges: []*pb.KeyRange{{}}})), a.framed(watch(&pb.CreateWatch{WatchId: 1, Ranges: []*pb.KeyRange{{}}, Kinds: kinds})))
		}},
		{"pipelines with 4 KB answers taken byte by byte", func(a *attacker) {
			mustPut(a.T, pb.NewKVServiceClient(a.dial()), []byte("four"), 4000)
			one := a.framed(get("four"))
			a.byteByByte(16<<10, "KVService/Pipeline", one, slices.Repeat(one, 20))
		}},
		{"pipelines with tiny answers taken byte by byte", func(a *attacker) {
			one := a.framed(get("n"))
			a.byteByByte(16<<10, "KVService/Pipeline", one, slices.Repeat(one, (62<<10)/len(one)))
		}},
		{"pipelines of large messages taken byte by byte", func(a *attacker) {
			mustPut(a.T, pb.NewKVServiceClient(a.dial()), []byte("four"), 4000)
			large := a.framed(&pb.PipelineRequest{Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte("p"), Value: make([]byte, 120<<10), Durability: pb.Durability_DURABILITY_ASYNC}}})
			a.byteByByte(16<<10, "KVService/Pipeline", slices.Repeat(a.framed(get("four")), 20), large)
		}},
		{"pipelines of large messages in small frames taken byte by byte", func(a *attacker) {
			mustPut(a.T, pb.NewKVServiceClient(a.dial()), []byte("four"), 4000)
			large := a.framed(&pb.PipelineRequest{Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte("p"), Value: make([]byte, 60<<10), Durability: pb.Durability_DURABILITY_ASYNC}}})
			a.byteByByte(4<<10+1, "KVService/Pipeline", slices.Repeat(a.framed(get("four")), 20), large)
		}},
		{"pipelines whose 4 KB answers wait for syncs, taken byte by byte", func(a *attacker) { a.answersOfSyncs(4000) }},
		{"pipelines whose tiny answers wait for syncs, taken byte by byte", func(a *attacker) { a.answersOfSyncs(1) }},
	} {
		t.Run(kind.name, func(t *testing.T) { kind.against(t, binary, "--max-connections", "100") })
	}
}

// answersOfSyncs sends writes that wait for the disk, each with gets of what it writes, which wait with it. The transport has the answers when the sync ends.
func (a *attacker) answersOfSyncs(size int) {
	messages := a.framed(&pb.PipelineRequest{Id: 1, Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte("p"), Value: make([]byte, size), Durability: pb.Durability_DURABILITY_SYNC}}})
	get := a.framed(&pb.PipelineRequest{Id: 1, Request: &pb.PipelineRequest_Get{Get: &pb.GetRequest{Key: []byte("p")}}})
	messages = append(messages, slices.Repeat(get, 255+(4000-size)*3/4)...)
	a.byteByByte(16<<10, "KVService/Pipeline", messages, messages)
}

// byteByByte opens streams without a window and sends a message, or several, first. Then it sends others, as often as the windows allow it, and lets the
// server send one byte after each of them.
func (a *attacker) byteByByte(frame int, method string, first, later []byte) {
	const rounds = 6
	streams, all := a.times(20, 80), a.rawClients(0)
	each := func(do func(r *rawClient, id uint32) error) {
		var sending sync.WaitGroup
		for _, r := range all {
			sending.Go(func() {
				for i := range streams {
					r.mu.Lock()
					err := do(r, uint32(2*i+1))
					r.mu.Unlock()
					if err != nil {
						return
					}
				}
			})
		}
		sending.Wait()
		time.Sleep(a.look() / 3)
	}
	each(func(r *rawClient, id uint32) error {
		if err := r.begin(id, "/epochkv.v1."+method); err != nil {
			return err
		}
		return r.send(id, first, frame)
	})
	for _, r := range all {
		r.awaitHeaders(streams)
	}
	for range rounds {
		each(func(r *rawClient, id uint32) error {
			if n := int64(len(later)); r.closed[id] || r.window[0] < n || r.window[id] < n {
				return nil
			}
			a.done.Add(1)
			if err := r.send(id, later, frame); err != nil {
				return err
			}
			return r.framer.WriteWindowUpdate(id, 1)
		})
		each(func(r *rawClient, id uint32) error { return r.framer.WriteWindowUpdate(id, 1) })
	}
	a.steadyMemory()
	for _, r := range all {
		a.refused.Add(int64(r.ended()))
	}
}
