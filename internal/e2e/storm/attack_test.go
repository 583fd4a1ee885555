package storm

import (
	"bytes"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

var (
	attackFull = flag.Bool("storm.attacks", false, "run the attacks on memory with all their connections and streams")
	attackTime = flag.Duration("storm.attacktime", 0, "how long unread pipelines send and connections are watched; 0: up to 3 s")
	attackFree = flag.Bool("storm.measure", false, "only report what the attacks on memory reach")
)

// attackMemory is the budget of the server that is attacked; everything else is derived from it.
const attackMemory = 64 << 20

// attack is something that hostile or careless clients do to a server's memory. It returns when it
// has done all of it.
type attack struct {
	name string
	run  func(*attacker)
}

// attacker is one attack against one server.
type attacker struct {
	*testing.T
	ctx     context.Context
	server  *process
	refused atomic.Int64
	done    atomic.Int64
	bound   int64 // of resident memory; an attack that has watches sets it

	mu      sync.Mutex     // guards closers
	closers []func() error // of its connections
}

// times is how often to repeat: the first number in the ordinary tests, the second with
// -storm.attacks.
func (a *attacker) times(short, full int) int {
	if *attackFull {
		return full
	}
	return short
}

// look is how long the server is watched after the attack.
func (a *attacker) look() time.Duration {
	if *attackTime > 0 {
		return *attackTime
	}
	return time.Duration(a.times(300, 1000)) * time.Millisecond
}

// TestMemoryUnderAttackStaysInItsBound: whatever clients send, half-send, or do not read, the
// server's resident memory stays within config.MemoryBound, which docs/operations.md states, and a
// well-behaved client is served meanwhile and afterwards.
//
//	go test ./internal/e2e/storm -run MemoryUnderAttack -v -storm.attacks
//	go test ./internal/e2e/storm -run 'MemoryUnderAttack/.*pipelines' -v -storm.attacks -storm.attacktime 90s
func TestMemoryUnderAttackStaysInItsBound(t *testing.T) {
	binary := mustBuild(t)
	for _, kind := range []attack{
		{"batches of large values at once", func(a *attacker) { a.sendAll(a.times(12, 40), encodedBatch(4, 15<<20)) }},
		{"batches of tiny operations at once", func(a *attacker) { a.sendAll(a.times(4, 40), encodedBatch(a.times(100_000, 200_000), 1)) }},
		{"batches of empty operations at once", func(a *attacker) {
			a.sendAll(a.times(4, 40), bytes.Repeat([]byte{1<<3 | 2, 0}, a.times(8, 30)<<20), codes.InvalidArgument)
		}},
		{"half-sent batches", func(a *attacker) { a.halfSend(a.times(8, 32), 1, 60<<20, 30<<20, 16<<10) }},
		{"streams with half-sent small messages", func(a *attacker) { a.halfSend(a.times(2, 8), 1000, 60<<10, 50<<10, 16<<10) }},
		{"half-sent messages in tiny frames", func(a *attacker) { a.halfSend(a.times(2, 8), a.times(4, 100), 60<<10, 50<<10, 1) }},
		{"streams that send nothing", func(a *attacker) { a.halfSend(a.times(2, 8), 1000, 10, 0, 16<<10) }},
		{"idle connections", func(a *attacker) { a.idle(a.times(100, 900)) }},
		{"unread gets", func(a *attacker) { a.unread(a.times(50, 150), 1, "KVService/Get", &pb.GetRequest{Key: largeKey(0)}) }},
		{"unread batch gets", func(a *attacker) { a.unread(60, 1, "KVService/BatchGet", &pb.BatchGetRequest{Keys: largeKeys(15)}) }},
		{"unread transactions", func(a *attacker) { a.unread(a.times(20, 60), 20, "TransactionService/Execute", largeExecute(15)) }},
		{"unread invocations with large values", func(a *attacker) {
			a.begun(a.times(2, 10), 2, "KVService/InvokeAll", largeInvokeAll(setAndGet))
		}},
		{"unread invocations that add to large values", func(a *attacker) {
			a.begun(a.times(2, 10), 1, "KVService/InvokeAll", largeInvokeAll(setAndGet))
			a.begun(a.times(2, 10), 2, "KVService/InvokeAll", largeInvokeAll(addAndGet))
		}},
		{"invocations with large values", func(a *attacker) {
			a.begun(a.times(2, 10), 1, "KVService/InvokeAll", largeInvokeAll(func(i *pb.Invocation) { setAndGet(i); i.ReturnNew = false }))
		}},
		{"invocations with large values and a time to live", func(a *attacker) {
			a.begun(a.times(2, 10), 1, "KVService/InvokeAll", largeInvokeAll(func(i *pb.Invocation) { setAndGet(i); i.ReturnNew, i.TtlMs = false, 3_600_000 }))
		}},
		{"batches with large values and a time to live", func(a *attacker) {
			m := new(pb.BatchWriteRequest)
			for i := range byte(4) {
				m.Mutations = append(m.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: []byte{'z', i}, Value: make([]byte, 15<<20), TtlMs: 3_600_000})
			}
			a.begun(a.times(2, 10), 1, "KVService/BatchWrite", m)
		}},
		{"unread transactions that invoke with large values", func(a *attacker) {
			m := new(pb.ExecuteRequest)
			for _, i := range largeInvokeAll(setAndGet).Invocations {
				m.ThenOperations = append(m.ThenOperations, &pb.Operation{Operation: &pb.Operation_Invoke{Invoke: i}})
			}
			a.begun(a.times(2, 10), 2, "TransactionService/Execute", m)
		}},
		{"touches of many keys", (*attacker).touches},
		{"unread touches of many keys", (*attacker).unreadTouches},
		{"persists of many keys", func(a *attacker) { a.replaceMany(persist) }},
		{"exchanges of many keys", func(a *attacker) { a.replaceMany(exchange) }},
		{"repeated exchanges of many keys", (*attacker).repeatExchanges},
		{"exchanges of many values", func(a *attacker) {
			a.invokeMany(manyValues{operations: manyOperations, old: largestMany(manyOperations), operand: largestMany(manyOperations)})
		}},
		{"exchanges of many values that are returned", func(a *attacker) {
			a.invokeMany(manyValues{operations: manyOperations, old: largestMany(manyOperations), operand: largestMany(manyOperations), returns: true})
		}},
		{"exchanges of half as many values", func(a *attacker) {
			n := manyOperations / 2
			a.invokeMany(manyValues{operations: n, old: largestMany(n), operand: largestMany(n)})
		}},
		{"appends to many values", func(a *attacker) {
			a.invokeMany(manyValues{operations: manyOperations, old: largestMany(manyOperations) - 3, operand: 1, appends: true, returns: true})
		}},
		{"appends to half as many values", func(a *attacker) {
			n := manyOperations / 2
			a.invokeMany(manyValues{operations: n, old: largestMany(n) - 3, operand: 1, appends: true})
		}},
		{"exchanges of many long keys", func(a *attacker) { a.invokeMany(manyValues{operations: 30_000, longer: 960, old: 20, operand: 20}) }},
		{"executions of many values", func(a *attacker) {
			a.invokeMany(manyValues{operations: manyOperations / 2, old: 330, operand: 330, execute: true})
		}},
		{"repetitions of many keys", (*attacker).repeatMany},
		{"executions of many keys", (*attacker).executeMany},
		{"executions of both lists", (*attacker).executeBothLists},
		{"executions of scans of tiny entries", (*attacker).executeScans},
		{"leases with long owners", (*attacker).leases},
		{"histories of large commits", (*attacker).historiesOfLargeCommits},
		{"unread scans", func(a *attacker) { a.unread(64, 1, "KVService/Scan", new(pb.ScanRequest)) }},
		{"unread scans of large pages", func(a *attacker) { a.unread(64, 64, "KVService/Scan", &pb.ScanRequest{PageBytes: 4 << 20}) }},
		{"largest requests beside full shares", func(a *attacker) { a.besideShares() }},
		{"largest batches beside unread scans", (*attacker).besideScans},
		{"batches beside an unread invocation", func(a *attacker) {
			a.begun(1, 1, "KVService/InvokeAll", largeInvokeAll(setAndGet))
			a.sendAll(a.times(4, 12), encodedBatch(4, 15<<20))
		}},
		{"batches beside invocations", func(a *attacker) {
			a.besideInvocations(a.times(2, 6), func() { a.sendAll(1, encodedBatch(4, 15<<20)) })
		}},
		{"bulk loads beside invocations", func(a *attacker) { a.besideInvocations(a.times(1, 6), a.bulkLoad) }},
		{"unread pipelines", func(a *attacker) { a.pipelines(a.times(20, 100), 4) }},
		{"watches that are not read", func(a *attacker) { a.watches(a.times(50, 900), a.times(8, 40), new(pb.CreateWatch)) }},
		{"watches of snapshots that are not read", func(a *attacker) {
			a.watches(a.times(100, 900), 1, &pb.CreateWatch{Start: &pb.CreateWatch_Snapshot{Snapshot: new(pb.WatchSnapshot)}})
			time.Sleep(a.look())
		}},
		{"watches of snapshots that are read", func(a *attacker) { a.readSnapshots(100, 6) }},
		{"pipelines without a window", func(a *attacker) { a.closedWindows(a.times(4, 40), 25) }},
	} {
		t.Run(kind.name, func(t *testing.T) { kind.against(t, binary) })
	}
}

// against runs the attack against a server of its own.
func (kind attack) against(t *testing.T, binary string, options ...string) {
	if !*attackFull {
		t.Parallel()
	}
	dir := mustDir(t)
	options = append([]string{"--memory", fmt.Sprint(attackMemory), "--max-connections", "1000", "--max-watches", fmt.Sprint(attackWatches)}, options...)
	p := start(t, binary, dir, options...)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute+4**attackTime)
	defer cancel()
	kv := pb.NewKVServiceClient(dial(t, p.address))
	for i := range 4 {
		mustPut(t, kv, largeKey(i), 4<<20)
	}
	idle := peakOf(t, p)
	healthy := make(chan error, 1)
	go func() { healthy <- behave(ctx, kv) }()
	a := &attacker{T: t, ctx: ctx, server: p, bound: boundOf(attackMemory)}
	began := time.Now()
	kind.run(a)
	cancel()
	if err := <-healthy; err != nil {
		t.Errorf("a client that behaves: %v", err)
	}
	peak := peakOf(t, p)
	t.Logf("RESULT | %-38s | %4d | %4d | %4d | %4d done, %4d refused, %v", kind.name, idle>>20, peak>>20, a.bound>>20,
		a.done.Load(), a.refused.Load(), time.Since(began).Round(time.Millisecond))
	if peak > a.bound && !*attackFree {
		t.Errorf("resident memory reached %d MiB, the bound is %d MiB", peak>>20, a.bound>>20)
	}
	for _, end := range a.closers {
		_ = end() // the test only needs it closed
	}
	if err := p.stop(); err != nil {
		t.Errorf("SIGTERM: %v\n%s", err, p.log())
	}
}

// boundOf is the bound for a server that is given nothing but its memory.
func boundOf(memory config.Size) int64 {
	c := config.Default()
	c.Memory = memory
	return int64(c.MemoryBound() - c.WatchMemory() - c.TransactionMemory() - c.LeaseMemory())
}

// boundWithWatches is the bound once there is a watch, with so many as --max-watches.
func boundWithWatches(memory config.Size, watches int) int64 {
	c := config.Default()
	c.Memory, c.Feed.Watches = memory, watches
	return int64(c.MemoryBound() - c.TransactionMemory() - c.LeaseMemory())
}

// attackWatches is --max-watches of the servers under attack.
const attackWatches = 10_000

// watches opens streams of watches of everything that are never read, and writes.
func (a *attacker) watches(streams, batches int, create *pb.CreateWatch) {
	a.bound = boundWithWatches(attackMemory, attackWatches)
	var conns []*grpc.ClientConn
	for range 4 {
		conns = append(conns, a.dial(grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(1<<20)))
	}
	for i := range streams {
		stream, err := pb.NewFeedServiceClient(conns[i%len(conns)]).Watch(a.ctx)
		if err != nil {
			a.Fatal(err)
		}
		create.Ranges, create.Values = []*pb.KeyRange{{}}, pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS
		if err := stream.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: create}}); err != nil {
			a.Fatal(err)
		}
		if _, err := stream.Recv(); err != nil {
			a.Fatal(err)
		}
		a.done.Add(1)
	}
	a.sendAll(batches, encodedBatch(4, 15<<20))
}

// behave puts and gets a small value until ctx ends. An attack of one kind must not make it fail.
func behave(ctx context.Context, kv pb.KVServiceClient) error {
	for i := 0; ctx.Err() == nil; i++ {
		key := fmt.Appendf(nil, "healthy/%d", i%10)
		_, err := kv.Put(ctx, &pb.PutRequest{Key: key, Value: key, Durability: pb.Durability_DURABILITY_ASYNC})
		if err == nil {
			_, err = kv.Get(ctx, &pb.GetRequest{Key: key})
		}
		if err != nil && ctx.Err() == nil && !memoryFull(err) {
			return err
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

// memoryFull reports whether writes are refused because memtables fill faster than they are merged,
// which does not depend on the requests.
func memoryFull(err error) bool { return strings.Contains(err.Error(), "memory") }

func largeKey(i int) []byte { return fmt.Appendf(nil, "large/%d", i%4) }

func largeKeys(n int) (keys [][]byte) {
	for i := range n {
		keys = append(keys, largeKey(i))
	}
	return keys
}

// largeExecute is a transaction that answers with n large values.
func largeExecute(n int) *pb.ExecuteRequest {
	req := new(pb.ExecuteRequest)
	for i := range n {
		req.ThenOperations = append(req.ThenOperations, &pb.Operation{Operation: &pb.Operation_Get{Get: &pb.KeyReadRequest{Key: largeKey(i)}}})
	}
	return req
}

// largeInvokeAll is the largest InvokeAll, of values of 15 MiB.
func largeInvokeAll(operation func(*pb.Invocation)) *pb.InvokeAllRequest {
	req := new(pb.InvokeAllRequest)
	for i := range byte(4) {
		invocation := &pb.Invocation{Key: []byte{'z', i}}
		operation(invocation)
		req.Invocations = append(req.Invocations, invocation)
	}
	return req
}

func setAndGet(i *pb.Invocation) {
	i.Operation, i.ReturnNew = &pb.Invocation_GetAndSet{GetAndSet: make([]byte, 15<<20)}, true
}

func addAndGet(i *pb.Invocation) {
	i.Operation, i.ReturnNew = &pb.Invocation_Append{Append: make([]byte, 1)}, true
}

func mustPut(t *testing.T, kv pb.KVServiceClient, key []byte, size int) {
	t.Helper()
	_, err := kv.Put(t.Context(), &pb.PutRequest{Key: key, Value: make([]byte, size), Durability: pb.Durability_DURABILITY_ASYNC})
	if err != nil {
		t.Fatal(err)
	}
}

// encodedBatch is a BatchWrite of so many operations.
func encodedBatch(operations, size int) []byte {
	req, value := new(pb.BatchWriteRequest), make([]byte, size)
	for i := range operations {
		req.Mutations = append(req.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "b%08d", i), Value: value})
	}
	req.Durability = pb.Durability_DURABILITY_ASYNC
	encoded, err := req.MarshalVT()
	if err != nil {
		panic(err)
	}
	return encoded
}

// encoded is a codec for messages that are encoded already and whose answer is ignored. Many
// requests share one encoding.
type encoded struct{}

func (encoded) Name() string { return "proto" }

func (encoded) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*v.(*[]byte))}, nil //nolint:forcetypeassert // nothing else is sent
}

func (encoded) Unmarshal(mem.BufferSlice, any) error { return nil }

func (a *attacker) closeAtEnd(conn io.Closer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closers = append(a.closers, conn.Close)
}

func (a *attacker) dial(options ...grpc.DialOption) *grpc.ClientConn {
	a.Helper()
	conn, err := grpc.NewClient("passthrough:///"+a.server.address, append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		a.Fatal(err)
	}
	a.closeAtEnd(conn)
	return conn
}

// sendAll sends the batch over as many connections at once. Besides RESOURCE_EXHAUSTED it may be refused with the codes given.
func (a *attacker) sendAll(connections int, batch []byte, refusals ...codes.Code) {
	var all sync.WaitGroup
	for range connections {
		conn := a.dial(grpc.WithDefaultCallOptions(grpc.ForceCodecV2(encoded{})))
		all.Go(func() {
			var none []byte
			err := conn.Invoke(a.ctx, "/epochkv.v1.KVService/BatchWrite", &batch, &none)
			switch code := status.Code(err); {
			case code == codes.OK:
				a.done.Add(1)
			case code == codes.ResourceExhausted || slices.Contains(refusals, code):
				a.refused.Add(1)
			default:
				a.Errorf("a batch: %v", err)
			}
		})
	}
	all.Wait()
}

// unread sends requests over some connections whose answers are never read.
func (a *attacker) unread(requests, connections int, method string, request any) {
	a.sendUnread(requests, connections, method, request)
	time.Sleep(a.look())
}

// begun is unread that waits until an answer to each request begins.
func (a *attacker) begun(requests, connections int, method string, request any) {
	for _, stream := range a.sendUnread(requests, connections, method, request) {
		if _, err := stream.Header(); err != nil {
			a.Errorf("%s: %v", method, err)
		}
	}
	time.Sleep(a.look())
}

func (a *attacker) sendUnread(requests, connections int, method string, request any) (streams []grpc.ClientStream) {
	var conns []*grpc.ClientConn
	for range connections {
		conns = append(conns, a.dial(grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(1<<20)))
	}
	for i := range requests {
		stream, err := conns[i%connections].NewStream(a.ctx, &grpc.StreamDesc{ServerStreams: true}, "/epochkv.v1."+method)
		if err == nil {
			err = stream.SendMsg(request)
		}
		if err == nil {
			err = stream.CloseSend()
		}
		if err != nil {
			a.Fatal(err)
		}
		streams = append(streams, stream)
		a.done.Add(1)
	}
	return streams
}

// besideShares fills the shares of answers and scans, and the slots beside them, and sends the largest batches meanwhile.
func (a *attacker) besideShares() {
	a.unread(30, 3, "KVService/Get", &pb.GetRequest{Key: largeKey(0)})
	a.unread(64, 16, "KVService/Scan", new(pb.ScanRequest))
	a.unread(16, 8, "KVService/Scan", &pb.ScanRequest{PageBytes: 4 << 20})
	a.unread(a.times(4, 40), 20, "TransactionService/Execute", largeExecute(15))
	a.unread(a.times(3, 10), 3, "KVService/InvokeAll", largeInvokeAll(setAndGet))
	a.sendAll(a.times(4, 40), encodedBatch(a.times(100_000, 200_000), 1))
	a.sendAll(a.times(4, 12), encodedBatch(4, 15<<20))
}

// bulkLoad loads the largest values, a message for each. Others that load at the moment refuse it.
func (a *attacker) bulkLoad() {
	stream, err := pb.NewKVServiceClient(a.dial()).BulkLoad(a.ctx)
	if err != nil {
		a.Error(err)
		return
	}
	for i := range byte(8) {
		if stream.Send(&pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: []byte{'y', i}, Value: make([]byte, 16<<20)}}, Commit: i == 7}) != nil {
			break // the answer says why
		}
	}
	_, err = stream.CloseAndRecv()
	a.count("a bulk load", err)
}

// count counts a request that is done or refused. Another error fails the test.
func (a *attacker) count(what string, err error) {
	switch status.Code(err) {
	case codes.OK:
		a.done.Add(1)
	case codes.ResourceExhausted:
		a.refused.Add(1)
	default:
		a.Errorf("%s: %v", what, err)
	}
}

// besideInvocations does something large, and sends small requests that add to the largest values.
func (a *attacker) besideInvocations(rounds int, large func()) {
	a.begun(1, 1, "KVService/InvokeAll", largeInvokeAll(func(i *pb.Invocation) { setAndGet(i); i.ReturnNew = false }))
	var all sync.WaitGroup
	for range 3 {
		all.Go(func() {
			for range rounds {
				large()
			}
		})
		kv := pb.NewKVServiceClient(a.dial())
		all.Go(func() {
			for range 4 * rounds {
				_, err := kv.InvokeAll(a.ctx, largeInvokeAll(func(i *pb.Invocation) { addAndGet(i); i.ReturnNew = false }))
				a.count("an InvokeAll", err)
				time.Sleep(50 * time.Millisecond)
			}
		})
	}
	all.Wait()
}

// pipelines sends small requests for large answers, and large writes, over pipelines whose answers
// are never read.
func (a *attacker) pipelines(connections, streams int) {
	var all sync.WaitGroup
	value := bytes.Repeat([]byte("v"), 64<<10)
	ctx, cancel := context.WithTimeout(a.ctx, 3*a.look())
	defer cancel()
	for range connections {
		kv := pb.NewKVServiceClient(a.dial(grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(1<<20)))
		for range streams {
			all.Go(func() {
				stream, err := kv.Pipeline(ctx)
				if err != nil {
					return
				}
				for i := uint64(1); err == nil; i++ {
					m := &pb.PipelineRequest{Id: i, Request: &pb.PipelineRequest_Get{Get: &pb.GetRequest{Key: largeKey(0)}}}
					if i > 100 {
						m.Request = &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte("p"), Value: value, Durability: pb.Durability_DURABILITY_ASYNC}}
					}
					err = stream.Send(m)
					a.done.Add(1)
				}
			})
		}
	}
	all.Wait()
}

// closedWindows sends requests of all sizes over pipelines whose answers the client gives no window
// for.
func (a *attacker) closedWindows(connections, streams int) {
	var messages [][]byte
	for i, request := range []*pb.PipelineRequest{
		{Request: &pb.PipelineRequest_Get{Get: &pb.GetRequest{Key: []byte("none")}}},
		{Request: &pb.PipelineRequest_Get{Get: &pb.GetRequest{Key: largeKey(0)}}},
		{Request: &pb.PipelineRequest_BatchGet{BatchGet: &pb.BatchGetRequest{Keys: largeKeys(4)}}},
		{Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte("p"), Value: make([]byte, 30<<10), Durability: pb.Durability_DURABILITY_ASYNC}}},
		{Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte("q"), Value: make([]byte, 100<<10), Durability: pb.Durability_DURABILITY_SYNC}}},
	} {
		request.Id = uint64(i)
		messages = append(messages, a.framed(request))
	}
	ctx, cancel := context.WithTimeout(a.ctx, 3*a.look())
	defer cancel()
	var all sync.WaitGroup
	for range connections {
		all.Go(func() {
			for ctx.Err() == nil { // the server closes connections that leave answers unread
				r := newRawClient(a, a.connect(), http2.Setting{ID: http2.SettingInitialWindowSize})
				stop := context.AfterFunc(ctx, r.end)
				r.pipelines(a, streams, messages)
				stop()
				a.refused.Add(int64(r.ended()))
				_ = r.conn.Close() // a second time at the end
			}
		})
	}
	all.Wait()
}

// framed is a message as it is sent.
func (a *attacker) framed(message interface{ MarshalVT() ([]byte, error) }) []byte {
	a.Helper()
	m, err := message.MarshalVT()
	if err != nil {
		a.Fatal(err)
	}
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(m))), m...)
}

// pipelines sends the messages over so many streams, again and again, until the connection ends.
func (r *rawClient) pipelines(a *attacker, streams int, messages [][]byte) {
	var all sync.WaitGroup
	for i := range streams {
		id := uint32(2*i + 1)
		r.mu.Lock()
		err := r.begin(id, "/epochkv.v1.KVService/Pipeline")
		r.mu.Unlock()
		if err != nil {
			return
		}
		all.Go(func() {
			for n := i; ; n++ {
				r.mu.Lock()
				err := r.send(id, messages[n%len(messages)], 16<<10)
				over := r.over || r.closed[id]
				r.mu.Unlock()
				if err != nil || over {
					return
				}
				a.done.Add(1)
			}
		})
	}
	all.Wait()
}

func (a *attacker) idle(connections int) {
	for range connections {
		a.connect()
	}
	time.Sleep(a.look())
}

func (a *attacker) connect() net.Conn {
	a.Helper()
	conn, err := net.Dial("tcp", a.server.address)
	if err != nil {
		a.Fatal(err)
	}
	a.closeAtEnd(conn)
	return conn
}

// halfSend sends, over raw HTTP/2 and whatever the windows allow, a part of a message in each of
// many streams.
func (a *attacker) halfSend(connections, streams, declared, sent, frame int) {
	var all sync.WaitGroup
	for range connections {
		r := newRawClient(a, a.connect())
		all.Go(func() {
			defer func() { a.refused.Add(int64(r.ended())) }()
			for i := range streams {
				if r.open(uint32(2*i+1), declared, sent, frame) != nil {
					return
				}
				a.done.Add(1)
			}
			time.Sleep(a.look())
		})
	}
	all.Wait()
}

// rawClient is an HTTP/2 client that respects the flow-control windows and nothing else.
type rawClient struct {
	conn   net.Conn
	framer *http2.Framer

	mu      sync.Mutex // of all below, and of writing
	changed *sync.Cond
	window  map[uint32]int64 // of each stream, and of the connection: 0
	initial int64
	closed  map[uint32]bool
	headers int // header blocks that have come
	over    bool
}

func newRawClient(a *attacker, conn net.Conn, settings ...http2.Setting) *rawClient {
	a.Helper()
	r := &rawClient{conn: conn, framer: http2.NewFramer(conn, conn), window: map[uint32]int64{0: 65535}, initial: 65535, closed: map[uint32]bool{}}
	r.changed = sync.NewCond(&r.mu)
	_, err := conn.Write([]byte(http2.ClientPreface))
	if err == nil {
		err = r.framer.WriteSettings(settings...)
	}
	if err != nil {
		a.Error(err)
	}
	settled := make(chan struct{})
	go r.read(settled)
	<-settled
	context.AfterFunc(a.ctx, r.end)
	return r
}

func (r *rawClient) end() {
	_ = r.conn.SetWriteDeadline(time.Unix(1, 0)) // a write may hold mu
	r.mu.Lock()
	r.over = true
	r.changed.Broadcast()
	r.mu.Unlock()
}

func (r *rawClient) ended() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.closed)
}

// read follows the server's window updates until the connection ends.
func (r *rawClient) read(settled chan<- struct{}) {
	defer r.end()
	once := sync.OnceFunc(func() { close(settled) })
	defer once()
	for {
		f, err := r.framer.ReadFrame()
		if err != nil {
			return
		}
		r.mu.Lock()
		switch f := f.(type) {
		case *http2.SettingsFrame:
			if !f.IsAck() {
				if v, ok := f.Value(http2.SettingInitialWindowSize); ok {
					r.initial = int64(v)
				}
				_ = r.framer.WriteSettingsAck() // an error shows when it is read
				once()
			}
		case *http2.WindowUpdateFrame:
			if f.StreamID != 0 && r.window[f.StreamID] == 0 {
				r.window[f.StreamID] = r.initial
			}
			r.window[f.StreamID] += int64(f.Increment)
		case *http2.PingFrame:
			if !f.IsAck() {
				_ = r.framer.WritePing(true, f.Data) // an error shows when it is read
			}
		case *http2.RSTStreamFrame:
			r.closed[f.StreamID] = true
		case *http2.HeadersFrame:
			r.headers++
			if f.StreamEnded() {
				r.closed[f.StreamID] = true
			}
		}
		r.changed.Broadcast()
		r.mu.Unlock()
	}
}

// open begins a stream and sends the first bytes of a message whose announced length is larger.
func (r *rawClient) open(id uint32, declared, sent, frame int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.begin(id, "/epochkv.v1.KVService/BatchWrite"); err != nil {
		return err
	}
	message := make([]byte, 5+sent)
	binary.BigEndian.PutUint32(message[1:], uint32(declared))
	return r.send(id, message, frame)
}

// begin begins a stream. The caller holds mu.
func (r *rawClient) begin(id uint32, method string) error {
	var header bytes.Buffer
	encoder := hpack.NewEncoder(&header)
	encoder.SetMaxDynamicTableSize(0)
	for _, f := range [][2]string{
		{":method", "POST"},
		{":scheme", "http"},
		{":path", method},
		{":authority", "x"},
		{"content-type", "application/grpc"},
		{"te", "trailers"},
	} {
		if err := encoder.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}); err != nil {
			return err
		}
	}
	if r.window[id] == 0 {
		r.window[id] = r.initial
	}
	return r.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: header.Bytes(), EndHeaders: true})
}

// send sends a message as the windows allow, in frames of at most so many bytes. The caller holds mu.
func (r *rawClient) send(id uint32, message []byte, frame int) error {
	for first := true; len(message) > 0; first = false {
		n := min(frame, len(message))
		if first {
			n = max(n, 5)
		}
		for !r.over && !r.closed[id] && (r.window[0] < int64(n) || r.window[id] < int64(n)) {
			r.changed.Wait()
		}
		switch {
		case r.over:
			return net.ErrClosed
		case r.closed[id]:
			return nil
		}
		r.window[0] -= int64(n)
		r.window[id] -= int64(n)
		if err := r.framer.WriteData(id, false, message[:n]); err != nil {
			return err
		}
		message = message[n:]
	}
	return nil
}

// peakOf is the largest resident memory that the process has had.
func peakOf(t *testing.T, p *process) int64 {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.cmd.Process.Pid), "status"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return kib << 10
		}
	}
	t.Fatal("no VmHWM")
	return 0
}
