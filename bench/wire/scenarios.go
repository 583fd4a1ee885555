package wire

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/bench/harness"
)

// The arms: the server, the protocol's ceiling, and the ceiling of durable writes over the protocol.
const (
	ours       = "epochkv"
	overGRPC   = "epochkv, grpc-go"
	echoArm    = "echo"
	syncedEcho = "echo + sync"

	// The same ceilings over the transport that the server has by default.
	directEchoArm    = "direct echo"
	syncedDirectEcho = "direct echo + sync"
)

// bar is the ratio to another arm that the server has to reach.
type bar struct {
	against string
	atLeast float64
	points  []int // nil: everywhere
}

// Scenarios are the figures over the wire that the project has promised.
func Scenarios() []harness.Scenario {
	callers := harness.Axis{Name: "callers", Points: []int{16, 64, 256}}
	streams := harness.Axis{Name: "streams", Points: []int{1, 4, 16}}
	lone := harness.Axis{Name: "callers", Points: []int{64}}
	return append(serverStreams(),
		scenario("wire-unary-get", "Unary gets of 100,000 keys.", "gets", callers, 100_000, unaryGet,
			bar{echoArm, 0.85, []int{16}}, bar{echoArm, 0.9, []int{64, 256}}),
		scenario("wire-pipelined-get", "Gets, 1024 in flight on each stream.", "gets", streams, 1_000_000, pipelinedGet, bar{echoArm, 0.75, nil}),
		scenario("wire-batch-get", "Unary batches of 100 gets, counted per key.", "gets", lone, 1_500_000, batchGet, bar{echoArm, 0.6, nil}),
		scenario("wire-unary-put", "Unary durable puts.", "puts", callers, 100_000, unaryPut, bar{syncedEcho, 0.95, nil}, bar{syncedDirectEcho, 0.85, nil}),
		scenario("wire-pipelined-put", "Durable puts, 1024 in flight on each stream.", "puts", streams, 1_000_000, pipelinedPut,
			bar{echoArm, 0.6, []int{4, 16}}),
		scenario("wire-batch-write", "Unary durable batches of 100 puts, counted per key.", "puts", callers, 1_500_000, batchWrite,
			bar{syncedEcho, 0.7, []int{64}}),
		requestIDs(callers),
		timesToLive(callers),
		overTLS(callers),
		scenario("wire-execute", "Unary durable compare-and-sets by Execute: the value is as expected, and one put.", "swaps", callers, 100_000, compareAndSet),
	)
}

func scenario(name, about, unit string, axis harness.Axis, size int, work workload, bars ...bar) harness.Scenario {
	s := harness.Scenario{
		Name: name, About: about + " Against a gRPC echo server with the same messages, settings and codec.", Unit: unit, Axis: axis, Size: size,
		Weight: float64(1 + len(axis.Points)),
		Arms: []harness.Arm{
			{Name: ours, Run: arm{start: startKV, work: work}.run},
			{Name: echoArm, Run: arm{start: startEcho, work: work, echo: true}.run},
		},
	}
	if work.unarySync {
		s.About += " echo + sync answers after one shared pwrite and fdatasync of the bytes of the log."
		s.Arms = append(s.Arms, harness.Arm{Name: syncedEcho, Run: arm{start: startSyncedEcho, work: work, echo: true}.run})
	}
	if work.directEcho {
		s.About += " The direct echoes use the server's own transport; with sync, one goroutine writes, syncs and answers what came meanwhile."
		s.Arms = append(s.Arms,
			harness.Arm{Name: directEchoArm, Run: arm{start: startDirectEcho, work: work, echo: true}.run},
			harness.Arm{Name: syncedDirectEcho, Run: arm{start: startSyncedDirectEcho, work: work, echo: true}.run})
	}
	if work.bothTransports {
		s.About += " The other epochkv serves with --transport grpc-go."
		s.Arms = append(s.Arms, harness.Arm{Name: overGRPC, Run: arm{start: startKVOverGRPC, work: work, overGRPC: true}.run})
	}
	for _, b := range bars {
		s.Figures = append(s.Figures, harness.Figure{
			Arm: ours, Against: b.against, Points: b.points, AtLeast: b.atLeast, Source: fmt.Sprintf("at least %v of %s", b.atLeast, b.against),
		})
	}
	if !work.writes {
		s.Load, s.Stage = loaded, "wire reads"
	}
	return s
}

// requestIDs measures what a request id costs a unary durable put.
func requestIDs(axis harness.Axis) harness.Scenario {
	const withID, without = "with an id", "without"
	return harness.Scenario{
		Name: "wire-request-ids", About: "Unary durable puts with a request id, and without.", Unit: "puts", Axis: axis, Size: 100_000,
		Weight: float64(1 + len(axis.Points)),
		Arms: []harness.Arm{
			{Name: withID, Run: arm{start: startKV, work: identifiedPut}.run},
			{Name: without, Run: arm{start: startKV, work: unaryPut}.run},
		},
		Figures: []harness.Figure{{Arm: withID, Against: without, AtLeast: 0.95, Source: "at least 0.95 of a put without an id"}},
	}
}

// timesToLive measures what a time to live costs a unary durable put. The keys do not expire meanwhile.
func timesToLive(axis harness.Axis) harness.Scenario {
	const withTTL, without = "with a TTL", "without"
	return harness.Scenario{
		Name: "wire-ttl-put", About: "Unary durable puts with a time to live, and without.", Unit: "puts", Axis: axis, Size: 100_000,
		Weight: float64(1 + len(axis.Points)),
		Arms: []harness.Arm{
			{Name: withTTL, Run: arm{start: startKV, work: expiringPut}.run},
			{Name: without, Run: arm{start: startKV, work: unaryPut}.run},
		},
		Figures: []harness.Figure{{Arm: withTTL, Against: without, AtLeast: 0.6, Source: "at least 0.6 of a put without a TTL"}},
	}
}

// arm is one target under one workload.
type arm struct {
	start startTarget
	work  workload
	echo  bool

	overGRPC bool // the server's transport is that of the gRPC library
}

// workload is a load of requests.
type workload struct {
	writes         bool // it writes key i for each i below its size; else it reads keys that are loaded
	over           bool // its writes are of keys that are loaded
	bothTransports bool // the server is measured with the transport of the gRPC library, too
	directEcho     bool // there is an echo server for it with the direct transport
	expires        bool // what it writes has a deadline
	unarySync      bool // each request waits for the disk, so that echo + sync is its ceiling
	run            func(ctx context.Context, conns []*grpc.ClientConn, n, size int, keys keyspace, echo bool) error
}

func (a arm) run(r *harness.Run) (err error) {
	ctx, cancel := within(r)
	defer cancel()
	var s *served
	if a.work.writes {
		if s, err = a.serve(ctx, r.Dir, newKeyspace(r.Seed, a.work.keyCount(r.Size))); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.Close()) }()
	} else {
		s, err = harness.Shared(r, fmt.Sprintf("server with %d keys, echo %t, grpc-go %t", r.Load, a.echo, a.overGRPC), func(dir string) (*served, error) {
			return a.serve(ctx, dir, newKeyspace(r.LoadSeed, r.Load))
		})
		if err != nil {
			return err
		}
	}
	// Connections, stacks and the log's preallocated segment are made once in a server's life: they are not what is measured here.
	if err := a.work.run(ctx, s.conns, r.Point, max(r.Size/warmUpDivisor, 1), s.keys, a.echo); err != nil {
		return err
	}
	time.Sleep(settleFor)
	err = r.Time(r.Size, func() error { return a.work.run(ctx, s.conns, r.Point, r.Size, s.keys, a.echo) })
	if err != nil {
		return err
	}
	if a.echo {
		return r.Verified(0, 0) // it answers from constants, and each answer was looked at
	}
	written, err := pb.NewKVServiceClient(s.conns[0]).Get(ctx, &pb.GetRequest{Key: s.keys.key(nil, 0)})
	if err == nil && a.work.expires != (written.GetExpiresAtMs() != 0) {
		err = fmt.Errorf("%w: the deadline of a key is %d", errWrong, written.GetExpiresAtMs())
	}
	if err != nil {
		return err
	}
	right, want, err := s.keys.verify(ctx, pb.NewKVServiceClient(s.conns[0]), max(s.keys.count/2000, 1))
	if err != nil {
		return err
	}
	return r.Verified(right, want)
}

// keyCount is how many keys a load of writes has.
func (w workload) keyCount(size int) int {
	if w.over {
		return min(size, loaded)
	}
	return size
}

// served is a server with connections to it. For reads it holds the keys.
type served struct {
	*target
	conns []*grpc.ClientConn
	keys  keyspace
}

func (a arm) serve(ctx context.Context, dir string, keys keyspace) (*served, error) {
	t, err := a.start(dir)
	if err != nil {
		return nil, err
	}
	s := &served{target: t, keys: keys}
	if s.conns, err = t.dial(); err != nil {
		return nil, errors.Join(err, t.stop())
	}
	if a.work.writes && !a.work.over || a.echo {
		return s, nil
	}
	if err := keys.load(ctx, pb.NewKVServiceClient(s.conns[0])); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Close hangs up and ends the server.
func (s *served) Close() error { return errors.Join(hangUp(s.conns), s.stop()) }

const (
	loaded        = 100_000
	warmUpDivisor = 20
	settleFor     = 200 * time.Millisecond
)

var unaryGet = workload{bothTransports: true, run: func(ctx context.Context, conns []*grpc.ClientConn, n, size int, keys keyspace, echo bool) error {
	return callers(ctx, conns, n, size, func(ctx context.Context, kv pb.KVServiceClient, i int) error {
		k := keys.pick(i)
		out, err := kv.Get(ctx, &pb.GetRequest{Key: keys.key(make([]byte, 0, keyBytes), k)})
		if err != nil {
			return err
		}
		return checkFound(out.Found, out.Value, k, echo)
	})
}}

var (
	unaryPut      = unaryPuts(func() []byte { return nil }, 0)
	identifiedPut = unaryPuts(newRequestID, 0)
	expiringPut   = unaryPuts(func() []byte { return nil }, time.Hour)
)

func unaryPuts(id func() []byte, ttl time.Duration) workload {
	return workload{expires: ttl > 0, writes: true, unarySync: true, bothTransports: true, directEcho: true, run: func(ctx context.Context, conns []*grpc.ClientConn, n, size int, keys keyspace, _ bool) error {
		return callers(ctx, conns, n, size, func(ctx context.Context, kv pb.KVServiceClient, i int) error {
			_, err := kv.Put(ctx, &pb.PutRequest{
				Key: keys.key(make([]byte, 0, keyBytes), i), Value: fillValue(make([]byte, valueBytes), i), Durability: pb.Durability_DURABILITY_SYNC,
				RequestId: id(), TtlMs: uint64(ttl.Milliseconds()),
			})
			return err
		})
	}}
}

// newRequestID makes a UUID of version 7.
func newRequestID() []byte {
	id := make([]byte, 16)
	binary.BigEndian.PutUint64(id, uint64(time.Now().UnixMilli())<<16|7<<12|rand.Uint64()&0xfff)
	binary.BigEndian.PutUint64(id[8:], 0b10<<62|rand.Uint64()>>2)
	return id
}

var pipelinedGet = workload{run: func(ctx context.Context, conns []*grpc.ClientConn, n, size int, keys keyspace, echo bool) error {
	fill := func() func(*pb.PipelineRequest, int) {
		get := &pb.PipelineRequest_Get{Get: &pb.GetRequest{Key: make([]byte, 0, keyBytes)}}
		return func(m *pb.PipelineRequest, i int) {
			get.Get.Key = keys.key(get.Get.Key, keys.pick(i))
			m.Request = get
		}
	}
	return streams(ctx, conns, n, size, fill, func(m *pb.PipelineResponse, i int) error {
		return checkFound(m.GetGet().GetFound(), m.GetGet().GetValue(), keys.pick(i), echo)
	})
}}

var pipelinedPut = workload{writes: true, directEcho: true, run: func(ctx context.Context, conns []*grpc.ClientConn, n, size int, keys keyspace, _ bool) error {
	fill := func() func(*pb.PipelineRequest, int) {
		put := &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: make([]byte, 0, keyBytes), Value: make([]byte, valueBytes), Durability: pb.Durability_DURABILITY_SYNC}}
		return func(m *pb.PipelineRequest, i int) {
			put.Put.Key, put.Put.Value = keys.key(put.Put.Key, i), fillValue(put.Put.Value, i)
			m.Request = put
		}
	}
	return streams(ctx, conns, n, size, fill, func(m *pb.PipelineResponse, i int) error {
		if m.GetPut().GetEpoch() == 0 {
			return fmt.Errorf("%w: put %d was answered with %v", errWrong, i, m)
		}
		return nil
	})
}}

const batchSize = 100

var batchGet = workload{run: func(ctx context.Context, conns []*grpc.ClientConn, n, size int, keys keyspace, echo bool) error {
	return callers(ctx, conns, n, size/batchSize, func(ctx context.Context, kv pb.KVServiceClient, b int) error {
		r := &pb.BatchGetRequest{Keys: make([][]byte, batchSize)}
		buf := make([]byte, 0, batchSize*keyBytes)
		for j := range r.Keys {
			r.Keys[j] = keys.key(buf[j*keyBytes:j*keyBytes:(j+1)*keyBytes], keys.pick(b*batchSize+j))
		}
		out, err := kv.BatchGet(ctx, r)
		if err != nil {
			return err
		}
		for j, v := range out.Results {
			if err := checkFound(v.Found, v.Value, keys.pick(b*batchSize+j), echo); err != nil {
				return err
			}
		}
		return nil
	})
}}

var batchWrite = workload{writes: true, unarySync: true, directEcho: true, run: func(ctx context.Context, conns []*grpc.ClientConn, n, size int, keys keyspace, _ bool) error {
	return callers(ctx, conns, n, (size+batchSize-1)/batchSize, func(ctx context.Context, kv pb.KVServiceClient, b int) error {
		r := &pb.BatchWriteRequest{Durability: pb.Durability_DURABILITY_SYNC}
		for i := b * batchSize; i < min((b+1)*batchSize, size); i++ {
			r.Mutations = append(r.Mutations, &pb.Mutation{
				Kind: pb.Mutation_KIND_PUT, Key: keys.key(make([]byte, 0, keyBytes), i), Value: fillValue(make([]byte, valueBytes), i),
			})
		}
		_, err := kv.BatchWrite(ctx, r)
		return err
	})
}}

// compareAndSet replaces the value of a key by itself, so that every swap finds what it expects.
var compareAndSet = workload{writes: true, over: true, unarySync: true, run: func(ctx context.Context, conns []*grpc.ClientConn, n, size int, keys keyspace, _ bool) error {
	return transactionCallers(ctx, conns, n, size, func(ctx context.Context, t pb.TransactionServiceClient, i int) error {
		i %= keys.count
		key, value := keys.key(make([]byte, 0, keyBytes), i), fillValue(make([]byte, valueBytes), i)
		out, err := t.Execute(ctx, &pb.ExecuteRequest{
			Conditions: []*pb.TxnCondition{{Condition: &pb.TxnCondition_Key{
				Key: &pb.Precondition{Key: key, Condition: &pb.Precondition_ValueEquals{ValueEquals: value}},
			}}},
			ThenOperations: []*pb.Operation{{Operation: &pb.Operation_Write{Write: &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: key, Value: value}}}},
			Durability:     pb.Durability_DURABILITY_SYNC,
		})
		if err == nil && !out.Succeeded {
			err = fmt.Errorf("%w: the value of key %d is not as it was set", errWrong, i)
		}
		return err
	})
}}
