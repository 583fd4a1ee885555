package server

import (
	"bytes"
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// dialDeaf is a client whose streams take 64 KiB each and no more until they are read.
func (h *harness) dialDeaf(t testing.TB, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+h.Address(), append(options, grpc.WithTransportCredentials(insecure.NewCredentials()), h.token(),
		grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(1<<20))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() }) // some tests close it themselves
	return conn
}

// ask sends a request whose answer is never read.
func ask(ctx context.Context, t testing.TB, conn *grpc.ClientConn, method string, request any) {
	t.Helper()
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, "/epochkv.v1.KVService/"+method)
	if err == nil {
		err = stream.SendMsg(request)
	}
	if err == nil {
		err = stream.CloseSend()
	}
	if err != nil {
		t.Fatal(err)
	}
}

func liveHeap() int64 {
	runtime.GC()
	runtime.GC() // what pools held is gone after the second
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// putLarge writes n values of so many bytes, the last of them durably: the log's buffers and files have grown when it returns.
func (h *harness) putLarge(t testing.TB, n, size int) {
	t.Helper()
	durability := pb.Durability_DURABILITY_ASYNC
	for i := range n {
		if i == n-1 {
			durability = pb.Durability_DURABILITY_SYNC
		}
		_, err := h.kv.Put(testContext(t), &pb.PutRequest{
			Key: fmt.Appendf(nil, "large/%03d", i), Value: bytes.Repeat([]byte("v"), size), Durability: durability,
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestUnreadScansHarmNoOther: 64 scans of one connection that nothing reads take their own share,
// of it no more than half, and leave gets, puts and scans of other connections alone.
func TestUnreadScansHarmNoOther(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Limits.InflightBytes = 64 * config.MiB })
	h.putLarge(t, 40, 100<<10)
	deaf := h.dialDeaf(t)
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	for range 64 {
		ask(ctx, t, deaf, "Scan", new(pb.ScanRequest))
	}
	eventually(t, "the scans wait", func() bool { return h.admission.words[shareScans].word.Load()&admissionBytes >= 6<<20 })
	for _, conn := range []*grpc.ClientConn{h.conn, h.dial(t)} {
		kv := pb.NewKVServiceClient(conn)
		for i := range 50 {
			if _, err := kv.Put(ctx, &pb.PutRequest{Key: fmt.Append(nil, i), Value: make([]byte, 50<<10), Durability: pb.Durability_DURABILITY_ASYNC}); err != nil {
				t.Fatal(err)
			}
			if _, err := kv.Get(ctx, &pb.GetRequest{Key: []byte("large/000")}); err != nil {
				t.Fatal(err)
			}
		}
		stream, err := kv.Scan(ctx, &pb.ScanRequest{Limit: 3})
		if err != nil {
			t.Fatal(err)
		}
		mustRecvAll(t, stream)
	}
	if got, most := h.admission.words[shareScans].word.Load()&admissionBytes, uint64(8<<20); got > most {
		t.Errorf("one connection holds %d bytes of scans, more than half of the share, %d", got, most)
	}
	if h.admission.refused.Load() == 0 {
		t.Error("no scan was refused: the test tests nothing")
	}
}

// TestUnreadScansOfSmallPagesHarmNoOther: a connection leaves as many of the scans that there may be as it has, however little their pages count. A scan
// has a session for as long as its client likes; one that has ended counts until its page is sent.
func TestUnreadScansOfSmallPagesHarmNoOther(t *testing.T) {
	for name, req := range map[string]*pb.ScanRequest{"open": {PageBytes: 1}, "ended": {Range: &pb.KeyRange{Start: []byte("large/")}, Limit: 1, PageBytes: 1}} {
		t.Run(name, func(t *testing.T) {
			const requests = 256
			h := mustStart(t, func(c *config.Config) { c.Limits.InflightRequests = requests })
			fill := &pb.BatchWriteRequest{Durability: pb.Durability_DURABILITY_ASYNC}
			for i := range 400 { // more than a stream takes unread
				fill.Mutations = append(fill.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "%03d", i), Value: make([]byte, 500)})
			}
			if _, err := h.kv.BatchWrite(testContext(t), fill); err != nil {
				t.Fatal(err)
			}
			h.putLarge(t, 1, 100<<10)
			ctx, cancel := context.WithCancel(testContext(t))
			defer cancel()
			scans, deaf := scansMax(requests), h.dialDeaf(t)
			open := func() int { return int(h.admission.words[shareScans].word.Load() >> admissionShift) }
			for i := range scans { // one by one: of two at once, neither may find room
				ask(ctx, t, deaf, "Scan", req)
				eventually(t, "the scan waits, or is refused", func() bool { return open()+int(h.admission.refused.Load()) == i+1 })
			}
			if n := open(); n != scans/2 {
				t.Errorf("one connection has %d of %d scans, not half", n, scans)
			}
			stream, err := pb.NewKVServiceClient(h.dial(t)).Scan(ctx, &pb.ScanRequest{Limit: 3})
			if err != nil {
				t.Fatal(err)
			}
			mustRecvAll(t, stream)
		})
	}
}

// TestAScanIsAdmittedWhateverTheLimitsAre: what each counts at least is within what can be counted.
func TestAScanIsAdmittedWhateverTheLimitsAre(t *testing.T) {
	for _, requests := range []int{1, 8, 1 << 24} {
		for _, inflight := range []config.Size{1, config.MiB, config.TiB, 1024 * config.TiB} {
			var a admission
			a.init(requests, uint64(inflight))
			if !a.enter(new(connection), shareScans, a.scanBytesMin()) {
				t.Errorf("%d requests, %v: a scan is refused that is alone", requests, inflight)
			}
		}
	}
}

// mustReadSmall reads a small value in every way that reads one.
func mustReadSmall(ctx context.Context, t testing.TB, conn *grpc.ClientConn) {
	t.Helper()
	get := &pb.GetRequest{Key: []byte("small")}
	got, err := pb.NewKVServiceClient(conn).Get(ctx, get)
	if err != nil || string(got.Value) != "v" {
		t.Fatalf("get: %v, %v", got, err)
	}
	pipeline, err := pb.NewKVServiceClient(conn).Pipeline(ctx)
	if err == nil {
		err = pipeline.Send(&pb.PipelineRequest{Id: 1, Request: &pb.PipelineRequest_Get{Get: get}})
	}
	if err != nil {
		t.Fatal(err)
	}
	if r, err := pipeline.Recv(); err != nil || string(r.GetGet().GetValue()) != "v" {
		t.Fatalf("pipelined get: %v, %v", r, err)
	}
	transaction, err := pb.NewTransactionServiceClient(conn).Transact(ctx)
	if err == nil {
		err = transaction.Send(&pb.TransactRequest{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{ReadOnly: true}}})
	}
	if err == nil {
		_, err = transaction.Recv()
	}
	if err == nil {
		err = transaction.Send(&pb.TransactRequest{Request: &pb.TransactRequest_Get{Get: &pb.KeyReadRequest{Key: get.Key}}})
	}
	if err != nil {
		t.Fatal(err)
	}
	if r, err := transaction.Recv(); err != nil || string(r.GetGet().GetValue()) != "v" {
		t.Fatalf("get in a transaction: %v, %v", r, err)
	}
}

// TestUnreadAnswersStayInTheirShare: answers count until they are sent, and when the share is used
// up further reads are refused, so that the heap grows by about the share however many of them are
// asked for. Other requests go on, and all is given back when the client is gone.
func TestUnreadAnswersStayInTheirShare(t *testing.T) {
	const inflight, share = 64 << 20, 16 << 20
	h := mustStart(t, func(c *config.Config) { c.Limits.InflightBytes = inflight })
	h.putLarge(t, 2, 4<<20)
	h.put(t, "small", "v")
	before := liveHeap()
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	var many [][]byte
	for range 15 {
		many = append(many, []byte("large/000"), []byte("large/001"))
	}
	var conns []*grpc.ClientConn
	for range 3 {
		conns = append(conns, h.dialDeaf(t, fromAddress(clientAddress())))
	}
	for i := range 150 {
		ask(ctx, t, conns[i%3], "Get", &pb.GetRequest{Key: []byte("large/000")})
		if i%3 == 0 {
			ask(ctx, t, conns[i%3], "BatchGet", &pb.BatchGetRequest{Keys: many})
		}
	}
	eventually(t, "all have been executed", func() bool {
		n, _, answers := h.admission.inflight()
		return n == 0 && answers > share/2 && h.admission.refused.Load() > 100
	})
	for _, conn := range append(conns, h.conn) {
		mustReadSmall(ctx, t, conn)
	}
	_, _, answers := h.admission.inflight()
	grown := liveHeap() - before
	t.Logf("answers of %d MiB are held, the heap grew by %d MiB", answers>>20, grown>>20)
	if answers > share {
		t.Errorf("%d bytes of answers are held, more than their share of %d", answers, share)
	}
	// The clients' windows, and what 200 streams need by themselves, are in this process, too.
	if most := int64(share + 32<<20); grown > most {
		t.Errorf("the heap grew by %d bytes, more than %d", grown, most)
	}
	h.put(t, "k", "v")
	if string(h.get(t, "k").Value) != "v" {
		t.Error("small reads do not go on")
	}
	for _, conn := range conns {
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "everything is given back", func() bool {
		_, _, answers := h.admission.inflight()
		return answers == 0
	})
	if _, err := h.kv.Get(testContext(t), &pb.GetRequest{Key: []byte("large/000")}); err != nil {
		t.Error(err)
	}
}

// TestCancelledAnswersAreGivenBack: also those whose streams end while their connection goes on.
func TestCancelledAnswersAreGivenBack(t *testing.T) {
	h := mustStart(t)
	h.putLarge(t, 1, 1<<20)
	deaf := h.dialDeaf(t)
	for range 5 {
		ctx, cancel := context.WithCancel(testContext(t))
		for range 10 {
			ask(ctx, t, deaf, "Get", &pb.GetRequest{Key: []byte("large/000")})
		}
		time.Sleep(5 * time.Millisecond)
		cancel()
	}
	eventually(t, "the answers are given back", func() bool {
		runtime.GC()
		requests, _, answers := h.admission.inflight()
		return requests == 0 && answers == 0
	})
}

// TestAckQueueIsBoundedInBytes: a pipeline whose answers wait for the disk holds a megabyte of them
// and stops receiving, instead of thousands of answers of any size.
func TestAckQueueIsBoundedInBytes(t *testing.T) {
	h := mustStart(t)
	release := h.heldSyncs(t)
	const size, requests = 256 << 10, 300
	before := liveHeap()
	stream := h.pipeline(t, testContext(t))
	value := string(bytes.Repeat([]byte("v"), size))
	mustSend(t, stream, putRequest(1, "k", value, pb.Durability_DURABILITY_SYNC))
	for i := range uint64(requests) {
		mustSend(t, stream, getRequest(2+i, "k"))
	}
	time.Sleep(50 * time.Millisecond)
	grown := liveHeap() - before
	if h.store.Durable() != 0 {
		t.Log("the disk was not held up for long enough")
	}
	t.Logf("the heap grew by %d KiB", grown>>10)
	if grown > 12<<20 {
		t.Errorf("the heap grew by %d bytes; the ack queue is bounded by %d", grown, ackQueueBytesMax)
	}
	release()
	for range requests + 1 {
		if got := mustRecv(t, stream); got.Id > 1 && len(got.GetGet().GetValue()) != size {
			t.Fatalf("answer %d: %v", got.Id, got.GetError())
		}
	}
}

// TestBatchGetAnswersWhatFits: keys beyond the bound are unread, and asked for again at the same
// epoch they are read.
func TestBatchGetAnswersWhatFits(t *testing.T) {
	h := mustStart(t)
	h.putLarge(t, 10, 1<<20)
	request := &pb.BatchGetRequest{Keys: [][]byte{[]byte("missing")}}
	for i := range 10 {
		request.Keys = append(request.Keys, fmt.Appendf(nil, "large/%03d", i))
	}
	read := 0
	for round := 0; len(request.Keys) > 0; round++ {
		out, err := h.kv.BatchGet(testContext(t), request)
		if err != nil {
			t.Fatal(err)
		}
		if size := out.SizeVT(); size > batchGetBytesMax+64<<10 {
			t.Errorf("an answer of %d bytes", size)
		}
		rest := [][]byte{}
		for i, r := range out.Results {
			switch {
			case r.Unread:
				rest = append(rest, request.Keys[i])
			case r.Found:
				read++
			}
		}
		if len(rest) == len(request.Keys) {
			t.Fatal("nothing was read")
		}
		request.Keys, request.SnapshotEpoch = rest, out.ReadEpoch
		h.put(t, "large/009", fmt.Sprint("later", round))
		time.Sleep(150 * time.Millisecond) // the collector has run
	}
	if read != 10 {
		t.Errorf("%d values were read", read)
	}
}

// TestBatchGetCountsOnlyWhatItAnswers: a value that the answer has no room for is not counted. Two
// connections hold two thirds of the share of answers, and the rest is enough for the one value that
// fits into an answer, but not for the two that are asked for.
func TestBatchGetCountsOnlyWhatItAnswers(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Limits.InflightBytes = 64 << 20 })
	h.putLarge(t, 2, 4<<20-1<<10)
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	for i := range 2 {
		ask(ctx, t, h.dialDeaf(t, fromAddress(clientAddress())), "Get", &pb.GetRequest{Key: []byte("large/000")})
		eventually(t, "the answer is held", func() bool {
			_, _, answers := h.admission.inflight()
			return answers >= int64(i+1)*(4<<20-1<<10)
		})
	}
	out, err := h.kv.BatchGet(ctx, &pb.BatchGetRequest{Keys: [][]byte{[]byte("large/000"), []byte("large/001")}})
	if err != nil {
		t.Fatal(err)
	}
	if !out.Results[0].Found || !out.Results[1].Unread {
		t.Errorf("found %v and %v, unread %v and %v", out.Results[0].Found, out.Results[1].Found, out.Results[0].Unread, out.Results[1].Unread)
	}
}
