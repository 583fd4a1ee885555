package storm

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

const (
	patience   = 10 * time.Second // the deadline of a healthy request
	stallMax   = 5 * time.Second  // the longest that a healthy request may take
	accounts   = 16
	balance    = 1000
	counters   = 8
	loadKeys   = 20_000
	hostileFor = 4 * time.Second // how long a slow reader holds its stream
)

// storm is the load of a whole test: what was written, and what went wrong.
type storm struct {
	t    *testing.T
	seed uint64

	healthy, expiring, canceled, batches, piped *journal
	loads                                       struct {
		mu    sync.Mutex
		acked map[int][]int // numbers of the bulk loads that were acknowledged, by round
		done  int           // how many were
	}
	increments, incremented [counters]atomic.Int64 // sent, acknowledged

	refusedMu sync.Mutex
	refused   map[string]int

	gaveUp, transfers, scans, bulkLoads, slowReaders atomic.Int64
	longest                                          [2]atomic.Int64 // nanoseconds: healthy put, healthy get
	lives
}

func newStorm(t *testing.T, seed uint64) *storm {
	batches := newJournal("batches")
	batches.twin = true
	s := &storm{
		t: t, seed: seed, refused: map[string]int{},
		healthy: newJournal("healthy"), expiring: newJournal("expiring"), canceled: newJournal("canceled"),
		batches: batches, piped: newJournal("piped"),
	}
	s.loads.acked = map[int][]int{}
	return s
}

func (s *storm) journals() []*journal {
	return []*journal{s.healthy, s.expiring, s.canceled, s.batches, s.piped}
}

// lives is how the server's lives ended.
type lives struct {
	kills, stops    int           // how many ended in which way
	peak            int64         // bytes of resident memory, the largest of all
	loaded, checked time.Duration // how long the load took, and how long the checks
}

// round is the load between two restarts.
type round struct {
	*storm
	number int
	server *process
	kv     pb.KVServiceClient
	slow   pb.KVServiceClient // over a connection of its own: for clients that do not read
	client *client.Client
	ctx    context.Context // ends just before the server is ended
}

func dial(t *testing.T, address string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

// run starts every kind of load and returns a function that waits until all of it has ended.
func (r *round) run() (wait func()) {
	var workers sync.WaitGroup
	begin := func(count int, work func(rng *rand.Rand)) {
		for i := range count {
			rng := rand.New(rand.NewPCG(r.seed, uint64(r.number)<<16|uint64(i)))
			workers.Go(func() {
				for r.ctx.Err() == nil {
					work(rng)
				}
			})
		}
	}
	begin(8, r.putAndGet)
	begin(24, r.putWithShortDeadline)
	begin(8, r.putAndCancel)
	begin(4, r.writeBatch)
	begin(2, r.pipeline)
	begin(4, r.transfer)
	begin(4, r.increment)
	begin(2, r.limitedScan)
	begin(8, r.readSlowly)
	begin(4, r.leaveAnswersUnread)
	begin(1, r.bulkLoad)
	return workers.Wait
}

// failed reports an error of a healthy request, unless the test ended the server or the server
// asked the client to retry later.
func (r *round) failed(what string, err error) {
	if r.server.planned.Load() || r.ctx.Err() != nil {
		return
	}
	if status.Code(err) == codes.ResourceExhausted {
		r.refuse(what, err)
		return
	}
	r.t.Errorf("round %d: %s: %v", r.number, what, err)
}

// refuse records that the server asked a healthy client to retry later, by kind of request, with
// one of the messages.
func (r *round) refuse(what string, err error) {
	r.refusedMu.Lock()
	defer r.refusedMu.Unlock()
	if r.refused[what]++; r.refused[what] == 1 {
		r.t.Logf("round %d: %s was refused: %v", r.number, what, err)
	}
}

func (r *round) took(which int, since time.Time) {
	took := int64(time.Since(since))
	for {
		longest := r.longest[which].Load()
		if took <= longest || r.longest[which].CompareAndSwap(longest, took) {
			return
		}
	}
}

func request(key []byte) *pb.PutRequest {
	return &pb.PutRequest{Key: key, Value: valueOf(key), Durability: pb.Durability_DURABILITY_SYNC}
}

// putAndGet is the client that the others must not disturb: its writes are acknowledged in time,
// and it reads what it wrote.
func (r *round) putAndGet(*rand.Rand) {
	at, key := r.healthy.next(r.number)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	began := time.Now()
	if _, err := r.kv.Put(ctx, request(key)); err != nil {
		r.failed("a healthy put", err)
		return
	}
	r.took(0, began)
	r.healthy.acknowledge(at)
	began = time.Now()
	got, err := r.kv.Get(ctx, &pb.GetRequest{Key: key})
	if err != nil {
		r.failed("a healthy get", err)
		return
	}
	r.took(1, began)
	if !got.Found || string(got.Value) != string(valueOf(key)) {
		r.t.Errorf("round %d: %s was acknowledged and is not readable", r.number, key)
	}
}

func (r *round) putWithShortDeadline(rng *rand.Rand) {
	at, key := r.expiring.next(r.number)
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+rng.IntN(14))*time.Millisecond)
	defer cancel()
	if _, err := r.kv.Put(ctx, request(key)); err == nil {
		r.expiring.acknowledge(at)
	} else {
		r.gaveUp.Add(1)
	}
}

func (r *round) putAndCancel(rng *rand.Rand) {
	at, key := r.canceled.next(r.number)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	timer := time.AfterFunc(time.Duration(rng.IntN(5000))*time.Microsecond, cancel)
	defer timer.Stop()
	defer cancel()
	if _, err := r.kv.Put(ctx, request(key)); err == nil {
		r.canceled.acknowledge(at)
	} else {
		r.gaveUp.Add(1)
	}
}

func (r *round) writeBatch(*rand.Rand) {
	at, key := r.batches.next(r.number)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := r.kv.BatchWrite(ctx, &pb.BatchWriteRequest{Durability: pb.Durability_DURABILITY_SYNC, Mutations: []*pb.Mutation{
		{Kind: pb.Mutation_KIND_PUT, Key: key, Value: valueOf(key)},
		{Kind: pb.Mutation_KIND_PUT, Key: twinOf(key), Value: valueOf(key)},
	}})
	if err != nil {
		r.failed("a batch", err)
		return
	}
	r.batches.acknowledge(at)
}

// pipeline sends a few hundred writes over one stream and takes their acknowledgements.
func (r *round) pipeline(rng *rand.Rand) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	p, err := r.client.Pipeline(ctx, client.PipelineOptions{InFlight: 64})
	if err != nil {
		r.failed("a pipeline", err)
		return
	}
	for range 200 + rng.IntN(400) {
		at, key := r.piped.next(r.number)
		err := p.Put(key, valueOf(key), func(_ client.Epoch, err error) {
			if err == nil {
				r.piped.acknowledge(at)
			}
		}, client.Sync())
		if err != nil {
			break // Close says why
		}
	}
	if err := p.Close(); err != nil {
		r.failed("a pipeline", err)
	}
}

func account(i int) []byte { return fmt.Appendf(nil, "bank/%03d", i) }

// transfer moves money between two accounts under a deadline that is often too short.
func (r *round) transfer(rng *rand.Rand) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(2+rng.IntN(200))*time.Millisecond)
	defer cancel()
	from, to, amount := rng.IntN(accounts), rng.IntN(accounts), 1+rng.IntN(10)
	err := r.client.Update(ctx, func(tx *client.Txn) error {
		a, err := readInt(tx, account(from))
		if err != nil {
			return err
		}
		if err := tx.Put(account(from), strconv.AppendInt(nil, a-int64(amount), 10)); err != nil {
			return err
		}
		b, err := readInt(tx, account(to))
		if err != nil {
			return err
		}
		return tx.Put(account(to), strconv.AppendInt(nil, b+int64(amount), 10))
	})
	if err == nil {
		r.transfers.Add(1)
	}
}

func readInt(tx *client.Txn, key []byte) (int64, error) {
	v, err := tx.Get(key)
	if err != nil || !v.Found {
		return balance, err
	}
	return strconv.ParseInt(string(v.Data), 10, 64)
}

func counter(i int) []byte { return fmt.Appendf(nil, "counter/%03d", i) }

func (r *round) increment(rng *rand.Rand) {
	which := rng.IntN(counters)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	r.increments[which].Add(1)
	if _, err := r.client.Increment(ctx, counter(which), 1, client.Sync()); err != nil {
		r.failed("an increment", err)
		return
	}
	r.incremented[which].Add(1)
}

// limitedScan is the query of a page: some entries, and no further page.
func (r *round) limitedScan(*rand.Rand) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, err := range r.client.Scan(ctx, client.Prefix([]byte("healthy/")), client.ScanOptions{Limit: 5}) {
		if err != nil {
			r.failed("a limited scan", err)
			return
		}
	}
	r.scans.Add(1)
}

// readSlowly opens a scan of everything, reads one page, and then nothing more.
func (r *round) readSlowly(rng *rand.Rand) {
	ctx, cancel := context.WithCancel(r.ctx)
	defer cancel()
	stream, err := r.slow.Scan(ctx, &pb.ScanRequest{Range: &pb.KeyRange{}, Reverse: rng.IntN(2) == 0})
	if err == nil {
		_, err = stream.Recv()
	}
	if err != nil {
		r.pause(100 * time.Millisecond) // refused, or nothing to read yet
		return
	}
	r.slowReaders.Add(1)
	r.pause(time.Duration(rng.Int64N(int64(hostileFor))))
}

// leaveAnswersUnread requests large values over a pipeline and reads none of them.
func (r *round) leaveAnswersUnread(rng *rand.Rand) {
	ctx, cancel := context.WithCancel(r.ctx)
	defer cancel()
	large := fmt.Appendf(nil, "large/%d", rng.IntN(4))
	if _, err := r.slow.Put(ctx, &pb.PutRequest{Key: large, Value: make([]byte, 1<<20), Durability: pb.Durability_DURABILITY_ASYNC}); err != nil {
		r.pause(100 * time.Millisecond)
		return
	}
	stream, err := r.slow.Pipeline(ctx)
	if err != nil {
		r.pause(100 * time.Millisecond)
		return
	}
	stop := time.AfterFunc(time.Duration(rng.Int64N(int64(hostileFor))), cancel)
	defer stop.Stop()
	for id := uint64(1); id <= 200; id++ {
		get := &pb.PipelineRequest{Id: id, Request: &pb.PipelineRequest_Get{Get: &pb.GetRequest{Key: large}}}
		if stream.Send(get) != nil {
			break
		}
	}
	r.slowReaders.Add(1)
	<-ctx.Done()
}

func (r *round) pause(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-r.ctx.Done():
	}
}

func loadsPrefix(round int) []byte { return fmt.Appendf(nil, "load/%06d/", round) }

func loadPrefix(round, number int) []byte { return fmt.Appendf(loadsPrefix(round), "%06d/", number) }

// bulkLoad loads a new range, and cancels every fourth load half-way.
func (r *round) bulkLoad(rng *rand.Rand) {
	defer r.pause(time.Duration(rng.IntN(2000)) * time.Millisecond)
	number := int(r.bulkLoads.Add(1))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	load, err := r.client.BulkLoad(ctx)
	if err != nil {
		r.failed("a bulk load", err)
		return
	}
	defer load.Close()
	giveUp := rng.IntN(4) == 0
	for i := range loadKeys {
		key := fmt.Appendf(loadPrefix(r.number, number), "%08d", i)
		if err := load.Put(key, key); err != nil {
			r.failed("a bulk load", err)
			return
		}
		if giveUp && i == loadKeys/2 {
			return
		}
	}
	if _, err := load.Commit(); err != nil {
		r.failed("a bulk load", err)
		return
	}
	r.loads.mu.Lock()
	defer r.loads.mu.Unlock()
	r.loads.acked[r.number] = append(r.loads.acked[r.number], number)
	r.loads.done++
}
