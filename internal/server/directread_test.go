package server

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/vfs"
)

// coldKeys are in leaves of their own, all below the inner nodes that a read of coldKey(0) caches.
const coldKeys = 64

func coldKey(i int) []byte { return fmt.Appendf(nil, "cold/%04d", 10*i) }

// startCold starts a server with the direct transport whose page cache is cold but for the path to
// coldKey(0), and without the watchdog, so that a request that waits delays its connection forever.
// Reads of the data file are held until release is called.
func startCold(t *testing.T, adjust ...func(*config.Config)) (h *harness, reads *vfs.Injected, release func()) {
	t.Helper()
	tick := handOverAfter
	handOverAfter = time.Hour
	t.Cleanup(func() { handOverAfter = tick })
	disk := vfs.NewMem()
	first := mustStartOn(t, disk)
	var batch pb.BatchWriteRequest
	for i := range 10 * coldKeys {
		batch.Mutations = append(batch.Mutations, &pb.Mutation{
			Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "cold/%04d", i), Value: bytes.Repeat([]byte{byte(i)}, 1500),
		})
	}
	if _, err := first.kv.BatchWrite(testContext(t), &batch); err != nil {
		t.Fatal(err)
	}
	first.put(t, "blob", string(make([]byte, 20_000)))
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	h = mustStartOn(t, disk, append([]func(*config.Config){withDirect}, adjust...)...)
	h.put(t, "memory", "value")
	h.get(t, string(coldKey(0)))
	h.get(t, "blob") // its leaf and its head; the rest is never cached
	until := make(chan struct{})
	release = sync.OnceFunc(func() { close(until) })
	t.Cleanup(release)
	return h, h.faults.Inject(vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Fault: vfs.Slow, Until: until}), release
}

// mustGetCached gets keys that are in memory.
func (h *harness) mustGetCached(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for _, key := range [][]byte{[]byte("memory"), coldKey(0)} {
		if out, err := h.kv.Get(ctx, &pb.GetRequest{Key: key}); err != nil || !out.Found {
			t.Errorf("get %q: %v, %v", key, out.GetFound(), err)
		}
	}
}

// TestReadsThatWouldWaitDelayNoOther: gets and batches of one connection wait for the device at the
// same time, while others of that connection find what is in memory.
func TestReadsThatWouldWaitDelayNoOther(t *testing.T) {
	h, reads, release := startCold(t)
	var all sync.WaitGroup
	for i := 1; i < coldKeys; i++ {
		all.Go(func() {
			if i%2 == 0 {
				out, err := h.kv.BatchGet(t.Context(), &pb.BatchGetRequest{Keys: [][]byte{coldKey(i), coldKey(0)}})
				if err != nil || !out.Results[0].Found || !out.Results[1].Found {
					t.Errorf("batch %d: %v, %v", i, out, err)
				}
				return
			}
			out, err := h.kv.Get(t.Context(), &pb.GetRequest{Key: coldKey(i)})
			if err != nil || !bytes.Equal(out.Value, bytes.Repeat([]byte{byte(10 * i)}, 1500)) {
				t.Errorf("get %d: %d bytes, %v", i, len(out.GetValue()), err)
			}
		})
	}
	all.Go(func() {
		if out, err := h.kv.Get(t.Context(), &pb.GetRequest{Key: []byte("blob")}); err != nil || len(out.Value) != 20_000 {
			t.Errorf("get of a blob: %d bytes, %v", len(out.GetValue()), err)
		}
	})
	eventually(t, "all wait for the device", func() bool { return reads.Fired() >= coldKeys })
	h.mustGetCached(t)
	release()
	all.Wait()
}

// TestReadsOfAPipelineThatWouldWaitKeepTheirPlace: a get that waits for the device delays no request
// after it, and sees what was written before it and nothing that was written after it. A batch that
// waits delays those after it.
func TestReadsOfAPipelineThatWouldWaitKeepTheirPlace(t *testing.T) {
	h, reads, release := startCold(t)
	stream, err := h.kv.Pipeline(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	key := coldKey(1)
	put := func(id uint64, key []byte, value string) *pb.PipelineRequest {
		return &pb.PipelineRequest{Id: id, Request: &pb.PipelineRequest_Put{
			Put: &pb.PutRequest{Key: key, Value: []byte(value), Durability: pb.Durability_DURABILITY_ASYNC},
		}}
	}
	get := func(id uint64, key []byte) *pb.PipelineRequest {
		return &pb.PipelineRequest{Id: id, Request: &pb.PipelineRequest_Get{Get: &pb.GetRequest{Key: key}}}
	}
	for _, r := range []*pb.PipelineRequest{
		put(1, []byte("memory"), "before"),
		get(2, key), put(3, key, "after"), get(4, key),
		{Id: 5, Request: &pb.PipelineRequest_BatchGet{BatchGet: &pb.BatchGetRequest{Keys: [][]byte{coldKey(2), []byte("memory")}}}},
		put(6, []byte("memory"), "after"), put(7, coldKey(2), "after"),
	} {
		if err := stream.Send(r); err != nil {
			t.Fatal(err)
		}
	}
	answers := map[uint64]*pb.PipelineResponse{}
	for len(answers) < 3 {
		r, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		answers[r.Id] = r
	}
	if answers[2] != nil || answers[5] != nil || string(answers[4].GetGet().GetValue()) != "after" {
		t.Fatalf("before the device answers: %v", answers)
	}
	eventually(t, "both wait for the device", func() bool { return reads.Fired() == 2 })
	if err := stream.CloseSend(); err != nil { // the end waits for the answers
		t.Fatal(err)
	}
	release()
	for len(answers) < 7 {
		r, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		answers[r.Id] = r
	}
	if got := answers[2].GetGet().GetValue(); !bytes.Equal(got, bytes.Repeat([]byte{10}, 1500)) {
		t.Errorf("the get sees a later write: %.20q", got)
	}
	results := answers[5].GetBatchGet().GetResults()
	if len(results) != 2 || results[0].Value[0] != 20 || string(results[1].Value) != "before" {
		t.Errorf("the batch sees other writes than those before it: %.100v", results)
	}
}

// TestReadsThatWouldWaitEndWithTheirClients: reads that wait for the device, and whose clients have
// gone, hold nothing once the device answers, and those that wait for a worker read nothing.
func TestReadsThatWouldWaitEndWithTheirClients(t *testing.T) {
	h, reads, release := startCold(t)
	ctx, cancel := context.WithCancel(t.Context())
	const first, more = 10, 20 // keys that the workers read, and requests that wait for one
	for range readersMax / pipelineReadsMax {
		stream := h.pipeline(t, ctx)
		for i := range uint64(pipelineReadsMax) {
			mustSend(t, stream, getRequest(i, string(coldKey(1+int(i)%first))))
		}
	}
	waiting := func(requests int) func() bool {
		return func() bool {
			n, _, _ := h.admission.inflight()
			return n == requests && reads.Fired() == first
		}
	}
	eventually(t, "all workers wait", waiting(readersMax))
	var all sync.WaitGroup
	stream := h.pipeline(t, ctx)
	for i := range more {
		all.Go(func() { _, _ = h.kv.Get(ctx, &pb.GetRequest{Key: coldKey(1 + first + i)}) })
		mustSend(t, stream, getRequest(uint64(i), string(coldKey(1+first+i))))
	}
	eventually(t, "more wait", waiting(readersMax+2*more))
	cancel()
	all.Wait()
	eventually(t, "the pipelines are cancelled", func() bool { return h.counters.streams.Load() == 0 })
	h.mustGetCached(t) // after all cancellations on the wire
	release()
	eventually(t, "nothing is held", func() bool {
		requests, bytes, answers := h.admission.inflight()
		return requests == 0 && bytes == 0 && answers == 0 && h.store.Stats().SessionsOpen == 0
	})
	if n := reads.Fired(); n != first {
		t.Errorf("%d reads, of which %d were under way when the clients went", n, first)
	}
	h.mustGetCached(t)
}

// TestReadsOfEverySize: a value is the same from memory, from a page, and from pages of its own.
func TestReadsOfEverySize(t *testing.T) {
	disk := vfs.NewMem()
	h := mustStartOn(t, disk)
	sizes := []int{0, 100, 4000, 8000, 20_000, largeAnswer - 1, largeAnswer, 1 << 20}
	value := func(size int) []byte { return bytes.Repeat([]byte("abcdefg"), size/7+1)[:size] }
	var list [][]byte
	for _, size := range sizes {
		key := fmt.Appendf(nil, "size/%d", size)
		h.put(t, string(key), string(value(size)))
		list = append(list, key)
	}
	look := func(t *testing.T) {
		t.Helper()
		out, err := h.kv.BatchGet(testContext(t), &pb.BatchGetRequest{Keys: list}, grpc.MaxCallRecvMsgSize(8<<20))
		if err != nil {
			t.Fatal(err)
		}
		for i, size := range sizes {
			if got := h.get(t, string(list[i])).Value; !bytes.Equal(got, value(size)) {
				t.Errorf("get of %d bytes: %d", size, len(got))
			}
			if got := out.Results[i].Value; !bytes.Equal(got, value(size)) {
				t.Errorf("batch get of %d bytes: %d", size, len(got))
			}
		}
	}
	look(t)
	if err := h.stop(); err != nil {
		t.Fatal(err)
	}
	h = mustStartOn(t, disk)
	look(t)
	look(t)
}

// largeAnswer is the size from which a value is copied by a worker.
const largeAnswer = 64 << 10

// TestWorkersAreBoundedAndRunAll: no more workers than the bound run, and nothing is lost.
func TestWorkersAreBoundedAndRunAll(t *testing.T) {
	var group sync.WaitGroup
	w := workers{goroutines: &group}
	hold := make(chan struct{})
	var running, most, ran atomic.Int64
	for range 3 * readersMax {
		w.run(nil, task{after: func() {}, run: func() {
			n := running.Add(1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			<-hold
			running.Add(-1)
			ran.Add(1)
		}})
	}
	eventually(t, "the workers run", func() bool { return running.Load() == readersMax })
	close(hold)
	group.Wait()
	if most.Load() != readersMax || ran.Load() != 3*readersMax || w.running != 0 || w.queue.Len() != 0 {
		t.Errorf("%d at once, %d in all, %d left", most.Load(), ran.Load(), w.running)
	}
}

// TestWorkersDoNotWaitForClients: as many as there are send answers that are not taken. The next ones run, in order, and so does what comes then.
func TestWorkersDoNotWaitForClients(t *testing.T) {
	var group sync.WaitGroup
	w := workers{goroutines: &group}
	begin, hold := make(chan struct{}), make(chan struct{})
	for range readersMax {
		w.run(nil, task{func() { <-begin }, func() { <-hold }})
	}
	ran := make(chan int, 3)
	for i := range 2 {
		w.run(nil, task{func() { ran <- i }, func() {}})
	}
	close(begin)
	for range 2 {
		<-ran
	}
	w.run(nil, task{func() { ran <- 2 }, func() { close(hold) }})
	<-ran
	group.Wait()
	if w.running != 0 || w.queue.Len() != 0 {
		t.Errorf("%d run, %d wait", w.running, w.queue.Len())
	}
}

// TestWorkersRunClientsInTurn: however much of one client waits, what another one adds waits for one task of it.
func TestWorkersRunClientsInTurn(t *testing.T) {
	var group sync.WaitGroup
	var clients streamClients
	of := func(name string) *connection {
		return &connection{connectionLayers: connectionLayers{streams: clients.enter(name)}}
	}
	w, one := workers{goroutines: &group}, make(chan struct{})
	for range readersMax {
		w.run(nil, task{func() { <-one }, func() {}})
	}
	ran := make(chan string)
	for _, name := range []string{"one", "one", "one", "other"} {
		w.run(of(name), task{func() { ran <- name }, func() {}})
	}
	one <- struct{}{} // one leaves its place, in which all run that wait
	for _, want := range []string{"one", "other", "one", "one"} {
		if got := <-ran; got != want {
			t.Errorf("%s has its turn, and not %s", got, want)
		}
	}
	close(one)
	group.Wait()
}

// TestLargeReadsOfAPipelineWaitForTheirClient: a pipeline whose client takes no answers reads a few
// large values and no more, whether they are in memory or not, and all once it takes them.
func TestLargeReadsOfAPipelineWaitForTheirClient(t *testing.T) {
	disk := vfs.NewMem()
	first := mustStartOn(t, disk)
	const size, requests = 256 << 10, 60 // 15 MiB
	for i := range coldKeys {
		first.put(t, string(coldKey(i)), string(bytes.Repeat([]byte{byte(i)}, size)))
	}
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	for name, memory := range map[string]bool{"in memory": true, "on the device": false} {
		t.Run(name, func(t *testing.T) {
			h := mustStartOn(t, disk, withDirect)
			if memory {
				h.put(t, string(coldKey(0)), string(make([]byte, size)))
			}
			stream, err := h.kv.Pipeline(testContext(t))
			if err != nil {
				t.Fatal(err)
			}
			for i := range uint64(requests) {
				key := coldKey(0)
				if !memory {
					key = coldKey(int(i) % coldKeys)
				}
				mustSend(t, stream, getRequest(i, string(key)))
			}
			eventually(t, "answers wait", func() bool { _, _, answers := h.admission.inflight(); return answers > 0 })
			for range 50 {
				time.Sleep(time.Millisecond)
				if _, _, answers := h.admission.inflight(); answers > 2<<20 {
					t.Fatalf("%d bytes of answers wait for the client", answers)
				}
			}
			for range requests {
				if got := mustRecv(t, stream); len(got.GetGet().GetValue()) != size {
					t.Fatalf("answer %d: %v", got.Id, got.GetError())
				}
			}
		})
	}
}
