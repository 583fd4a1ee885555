//go:build invariants

package server

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestEveryRequestOfAPipelineSeesTheOnesBeforeIt: also while a commit of another session, older
// than the pipeline's own, is held up before it is installed, so that the pipeline's writes are in
// the memtable and not visible.
func TestEveryRequestOfAPipelineSeesTheOnesBeforeIt(t *testing.T) {
	h := mustStart(t)
	present := func(key string) []*pb.Precondition {
		return []*pb.Precondition{{Key: []byte(key), Condition: &pb.Precondition_Exists{Exists: true}}}
	}
	repeated := &pb.PipelineRequest{Id: 3, Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte("repeated"), RequestId: newRequestID(t)}}}
	if _, err := h.kv.Put(testContext(t), repeated.GetPut()); err != nil {
		t.Fatal(err)
	}
	for name, row := range map[string]struct {
		request func(key string) *pb.PipelineRequest
		saw     func(*pb.PipelineResponse) bool
		between []*pb.PipelineRequest
	}{
		"get after a request that was executed before": {
			func(key string) *pb.PipelineRequest { return getRequest(2, key) },
			func(r *pb.PipelineResponse) bool { return string(r.GetGet().GetValue()) == "1" },
			[]*pb.PipelineRequest{repeated},
		},
		"get": {
			func(key string) *pb.PipelineRequest { return getRequest(2, key) },
			func(r *pb.PipelineResponse) bool { return string(r.GetGet().GetValue()) == "1" },
			nil,
		},
		"batch get": {
			func(key string) *pb.PipelineRequest {
				return &pb.PipelineRequest{Id: 2, Request: &pb.PipelineRequest_BatchGet{BatchGet: &pb.BatchGetRequest{Keys: [][]byte{[]byte(key)}}}}
			},
			func(r *pb.PipelineResponse) bool {
				return len(r.GetBatchGet().GetResults()) == 1 && r.GetBatchGet().Results[0].Found
			},
			nil,
		},
		"delete range": {
			func(key string) *pb.PipelineRequest {
				return &pb.PipelineRequest{Id: 2, Request: &pb.PipelineRequest_DeleteRange{DeleteRange: &pb.DeleteRangeRequest{
					Range: &pb.KeyRange{Start: []byte(key), End: []byte(key + "\x00")},
				}}}
			},
			func(r *pb.PipelineResponse) bool { return r.GetDeleteRange().GetDeleted() == 1 },
			nil,
		},
		"delete range with a condition": {
			func(key string) *pb.PipelineRequest {
				return &pb.PipelineRequest{Id: 2, Request: &pb.PipelineRequest_DeleteRange{DeleteRange: &pb.DeleteRangeRequest{
					Range: &pb.KeyRange{Prefix: []byte("nothing")}, Preconditions: present(key),
				}}}
			},
			func(r *pb.PipelineResponse) bool { return r.GetDeleteRange() != nil },
			nil,
		},
		"put with a condition": {
			func(key string) *pb.PipelineRequest {
				return &pb.PipelineRequest{Id: 2, Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte(key), Preconditions: present(key)}}}
			},
			func(r *pb.PipelineResponse) bool { return r.GetPut() != nil },
			nil,
		},
		"delete with a condition": {
			func(key string) *pb.PipelineRequest {
				return &pb.PipelineRequest{Id: 2, Request: &pb.PipelineRequest_Delete{Delete: &pb.DeleteRequest{Key: []byte(key), Preconditions: present(key)}}}
			},
			func(r *pb.PipelineResponse) bool { return r.GetDelete() != nil },
			nil,
		},
		"batch write with a condition": {
			func(key string) *pb.PipelineRequest {
				return &pb.PipelineRequest{Id: 2, Request: &pb.PipelineRequest_BatchWrite{BatchWrite: &pb.BatchWriteRequest{
					Mutations: []*pb.Mutation{{Kind: pb.Mutation_KIND_PUT, Key: []byte(key)}}, Preconditions: present(key),
				}}}
			},
			func(r *pb.PipelineResponse) bool { return r.GetBatchWrite() != nil },
			nil,
		},
		"refused condition": {
			func(key string) *pb.PipelineRequest {
				return &pb.PipelineRequest{Id: 2, Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte(key), Preconditions: []*pb.Precondition{
					{Key: []byte(key), Condition: &pb.Precondition_Exists{Exists: false}},
				}}}}
			},
			func(r *pb.PipelineResponse) bool { return r.GetError().GetCode() == int32(codes.FailedPrecondition) },
			nil,
		},
		"invoke": {
			func(key string) *pb.PipelineRequest {
				return &pb.PipelineRequest{Id: 2, Request: &pb.PipelineRequest_Invoke{Invoke: &pb.InvokeRequest{Invocation: increment(key, 1)}}}
			},
			func(r *pb.PipelineResponse) bool { return r.GetInvoke().GetResult().GetOldFound() },
			nil,
		},
		"invoke all": {
			func(key string) *pb.PipelineRequest {
				return &pb.PipelineRequest{Id: 2, Request: &pb.PipelineRequest_InvokeAll{InvokeAll: &pb.InvokeAllRequest{
					Invocations: []*pb.Invocation{increment(key, 1), increment(key+"/other", 1)},
				}}}
			},
			func(r *pb.PipelineResponse) bool {
				return len(r.GetInvokeAll().GetResults()) == 2 && r.GetInvokeAll().Results[0].OldFound
			},
			nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			other, err := h.store.Session()
			if err != nil {
				t.Fatal(err)
			}
			defer other.Close()
			stream := h.pipeline(t, testContext(t))
			mustSend(t, stream, getRequest(0, "warm"))
			mustRecv(t, stream)

			held, release, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			other.PauseReserved(func() {
				close(held)
				<-release
			})
			go func() {
				w := mvcc.Write{Durability: mvcc.DurabilityAsync}
				w.Set(fmt.Append(nil, "of another/", name), nil)
				_, err := other.Commit(context.Background(), &w)
				done <- err
			}()
			<-held
			mustSend(t, stream, putRequest(1, name, "1", pb.Durability_DURABILITY_SYNC))
			mustSend(t, stream, append(row.between, row.request(name))...)
			time.Sleep(20 * time.Millisecond) // the server would have executed both by now
			close(release)
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			for range 2 + len(row.between) {
				if got := mustRecv(t, stream); got.Id == 2 && !row.saw(got) || got.Id == 1 && got.GetPut() == nil || got.Id == 3 && !got.GetPut().GetDeduplicated() {
					t.Errorf("got %v", got)
				}
			}
			if err := stream.CloseSend(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestAsyncAnswersOfAPipelineDoNotWaitForTheDisk: an ASYNC write after a SYNC write is answered when it is visible, also
// while the device does not answer, and although a neighbour was being installed when it was executed.
func TestAsyncAnswersOfAPipelineDoNotWaitForTheDisk(t *testing.T) {
	h := mustStart(t)
	other, err := h.store.Session()
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	stream := h.pipeline(t, testContext(t))
	mustSend(t, stream, getRequest(0, "warm"))
	mustRecv(t, stream)
	held, release, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	other.PauseReserved(func() {
		close(held)
		<-release
	})
	go func() {
		w := mvcc.Write{Durability: mvcc.DurabilityAsync}
		w.Set([]byte("of another"), nil)
		_, err := other.Commit(context.Background(), &w)
		done <- err
	}()
	<-held
	stuck := make(chan struct{})
	free := sync.OnceFunc(func() { close(stuck) })
	defer free()
	h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Sticky: true, Fault: vfs.Slow, Until: stuck})
	const async = 5
	mustSend(t, stream, putRequest(1, "sync", "1", pb.Durability_DURABILITY_SYNC))
	for i := range async {
		mustSend(t, stream, putRequest(uint64(2+i), fmt.Sprint("async-", i), "1", pb.Durability_DURABILITY_ASYNC))
	}
	time.Sleep(20 * time.Millisecond) // the server would have executed all of them by now
	close(release)
	if err := <-done; err != nil {
		t.Error(err)
	}
	answered := make(chan uint64, async+1)
	go func() {
		for range async + 1 {
			got, err := stream.Recv()
			if err != nil || got.GetPut() == nil {
				t.Errorf("got %v, %v", got, err)
			}
			answered <- got.GetId()
		}
	}()
	for range async {
		select {
		case id := <-answered:
			if id == 1 {
				t.Error("the SYNC write was answered while the device did not answer")
			}
		case <-time.After(10 * time.Second):
			t.Error("an ASYNC write waits for the device")
			return
		}
	}
	free()
	if id := <-answered; id != 1 {
		t.Errorf("the last answer is of request %d", id)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
}
