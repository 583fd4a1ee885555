package wire

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	bench "github.com/epochkv/epochkv/bench/workload"
)

// keyspace numbers keys so that they look random and can be told from their number.
type keyspace struct {
	seed     uint64
	count    int
	permuted []uint64 // the numbers of table keys
}

func newKeyspace(seed uint64, count int) keyspace {
	k := keyspace{seed: seed, count: count}
	if bench.TableKeys() {
		k.permuted = make([]uint64, count)
		for i := range k.permuted {
			k.permuted[i] = bench.Permute(seed, uint64(i), uint64(count))
		}
	}
	return k
}

func (k keyspace) key(dst []byte, i int) []byte {
	if bench.TableKeys() {
		return bench.TableKey(dst[:0], k.permuted[i])
	}
	x := k.seed + uint64(i)*0x9e3779b97f4a7c15
	x ^= x >> 29
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 32
	dst = binary.BigEndian.AppendUint64(dst[:0], x)
	return binary.BigEndian.AppendUint64(dst, uint64(i))
}

// pick is the number of the i-th key of a read load, spread over all keys.
func (k keyspace) pick(i int) int { return int(uint64(i) * 0x9e3779b1 % uint64(k.count)) }

func fillValue(dst []byte, i int) []byte {
	binary.BigEndian.PutUint64(dst, uint64(i))
	return dst
}

func isValue(v []byte, i int) bool {
	return len(v) == valueBytes && binary.BigEndian.Uint64(v) == uint64(i)
}

// load writes all keys in batches, asynchronously.
func (k keyspace) load(ctx context.Context, kv pb.KVServiceClient) error {
	for from := 0; from < k.count; from += 1000 {
		r := &pb.BatchWriteRequest{Durability: pb.Durability_DURABILITY_ASYNC}
		for i := from; i < min(from+1000, k.count); i++ {
			r.Mutations = append(r.Mutations, &pb.Mutation{
				Kind: pb.Mutation_KIND_PUT, Key: k.key(nil, i), Value: fillValue(make([]byte, valueBytes), i),
			})
		}
		if _, err := kv.BatchWrite(ctx, r); err != nil {
			return err
		}
	}
	return nil
}

// verify reads keys back and counts the right ones.
func (k keyspace) verify(ctx context.Context, kv pb.KVServiceClient, step int) (right, want int, err error) {
	for i := 0; i < k.count; i += step {
		got, err := kv.Get(ctx, &pb.GetRequest{Key: k.key(nil, i)})
		if err != nil {
			return right, want, err
		}
		want++
		if got.Found && isValue(got.Value, i) {
			right++
		}
	}
	return right, want, nil
}

// callers runs n unary callers, each doing its share of size calls.
func callers(ctx context.Context, conns []*grpc.ClientConn, n, size int, call func(ctx context.Context, kv pb.KVServiceClient, i int) error) error {
	return shares(ctx, conns, n, size, pb.NewKVServiceClient, call)
}

// transactionCallers is callers for the service of transactions.
func transactionCallers(ctx context.Context, conns []*grpc.ClientConn, n, size int, call func(ctx context.Context, t pb.TransactionServiceClient, i int) error) error {
	return shares(ctx, conns, n, size, pb.NewTransactionServiceClient, call)
}

func shares[C any](ctx context.Context, conns []*grpc.ClientConn, n, size int, dial func(grpc.ClientConnInterface) C, call func(context.Context, C, int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	for c := range n {
		on := dial(conns[c%len(conns)])
		g.Go(func() error {
			for i := c; i < size; i += n {
				if err := call(ctx, on, i); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return g.Wait()
}

// window is how many requests a stream keeps in flight: enough that neither a sync nor a round trip leaves it idle.
const window = 1024

// stream keeps a window of requests in flight over one pipeline.
type stream struct {
	grpc.BidiStreamingClient[pb.PipelineRequest, pb.PipelineResponse]
	answered atomic.Int64
	asleep   atomic.Bool
	wake     chan struct{}
}

// streams runs n pipelines, each doing its share of size requests. fill makes request i in a reused message; check looks at
// the answer of request i.
func streams(ctx context.Context, conns []*grpc.ClientConn, n, size int, fill func() func(*pb.PipelineRequest, int), check func(*pb.PipelineResponse, int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	for c := range n {
		s, err := pb.NewKVServiceClient(conns[c%len(conns)]).Pipeline(ctx)
		if err != nil {
			return err
		}
		st := &stream{BidiStreamingClient: s, wake: make(chan struct{}, 1)}
		share := (size - c + n - 1) / n
		g.Go(func() error { return st.send(ctx, share, fill(), c, n) })
		g.Go(func() error { return st.receive(share, check) })
	}
	return g.Wait()
}

func (s *stream) send(ctx context.Context, share int, fill func(*pb.PipelineRequest, int), first, step int) error {
	var m pb.PipelineRequest
	for sent := range share {
		for int64(sent)-s.answered.Load() >= window {
			s.asleep.Store(true)
			if int64(sent)-s.answered.Load() < window {
				break
			}
			select {
			case <-s.wake:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		i := first + sent*step
		m.Id = uint64(i)
		fill(&m, i)
		if err := s.SendMsg(&m); err != nil {
			return err
		}
	}
	return s.CloseSend()
}

func (s *stream) receive(share int, check func(*pb.PipelineResponse, int) error) error {
	var m pb.PipelineResponse
	for n := range share {
		if g, ok := m.Response.(*pb.PipelineResponse_Get); ok {
			g.Get.ResetVT()
		}
		if err := s.RecvMsg(&m); err != nil {
			return err
		}
		if err := check(&m, int(m.Id)); err != nil {
			return err
		}
		// The sender is woken when half its window is free, so that it sends many for one wake-up.
		s.answered.Store(int64(n + 1))
		if (n+1)%(window/2) == 0 || n+1 == share {
			s.wakeSender()
		}
	}
	return nil
}

func (s *stream) wakeSender() {
	if s.asleep.Swap(false) {
		select {
		case s.wake <- struct{}{}:
		default:
		}
	}
}

var errWrong = errors.New("wire: a wrong answer")

func checkFound(found bool, value []byte, i int, echo bool) error {
	if !found || len(value) != valueBytes || !echo && !isValue(value, i) {
		return fmt.Errorf("%w: key %d, found %v, %d bytes", errWrong, i, found, len(value))
	}
	return nil
}
