package server

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/sim"
	"github.com/epochkv/epochkv/internal/vfs"
)

var (
	linearFor  = flag.Duration("linear.for", 0, "how long histories over the wire are made, for each transport; 0: two histories")
	linearSeed = flag.Uint64("linear.seed", 0, "seed of the first history over the wire; 0: a new one")
)

// TestAnswersOverTheWireAreLinearizable: clients with requests of their own and with pipelines, some with deadlines that
// pass and with cancellations, on a disk that is slow at times and while checkpoints move what they read to the disk. The
// server is drained or crashes, and starts again. One order for each key explains all answers.
func TestAnswersOverTheWireAreLinearizable(t *testing.T) {
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		t.Run(string(transport), func(t *testing.T) {
			seed := *linearSeed
			if seed == 0 {
				seed = rand.Uint64()
			}
			started := time.Now()
			for n := 0; !t.Failed() && (n < 2 || time.Since(started) < *linearFor); n++ {
				t.Run("history", func(t *testing.T) { newLinear(seed, transport).run(t) })
				seed++
			}
			if t.Failed() {
				t.Logf("go test ./internal/server -run '^%s$' -linear.seed=%d", t.Name(), seed-1)
			}
		})
	}
}

const (
	linearKeys    = 6
	linearLives   = 3  // of the server
	linearUnary   = 5  // clients
	linearStreams = 4  // clients
	linearRounds  = 30 // requests of a client in a life, about
)

// linear makes one history.
type linear struct {
	transport config.Transport
	started   time.Time
	rng       *rand.Rand // of the test's goroutine
	numbers   atomic.Int64
	streams   atomic.Int64
	requests  atomic.Int64 // ended in this life
	lossy     bool         // this life ends with a crash, so no write may be asynchronous
	values    [linearKeys]atomic.Pointer[string]

	mu  sync.Mutex
	ops []*sim.RegisterOp
}

func newLinear(seed uint64, transport config.Transport) *linear {
	return &linear{transport: transport, started: time.Now(), rng: rand.New(rand.NewPCG(seed, 0))}
}

func (l *linear) now() time.Duration { return time.Since(l.started) }

func (l *linear) run(t *testing.T) {
	disk := vfs.NewMem()
	for life := range linearLives {
		disk = l.live(t, disk, life)
	}
	statuses := map[sim.Status]int{}
	for _, o := range l.ops {
		statuses[o.Status]++
	}
	t.Logf("%d committed, %d aborted, %d unknown", statuses[sim.Committed], statuses[sim.Aborted], statuses[sim.Unknown])
	if statuses[sim.Committed] < linearRounds {
		t.Error("hardly anything was committed; the history shows nothing")
	}
	if err := sim.CheckRegisters(l.ops, time.Minute); err != nil {
		t.Error(err)
	}
}

// live runs a server and its clients until the server has ended, and returns what is on its disk then.
func (l *linear) live(t *testing.T, disk *vfs.Mem, life int) *vfs.Mem {
	l.lossy = l.rng.IntN(2) == 0
	l.requests.Store(0)
	h := mustStartOn(t, disk, func(c *config.Config) { c.Transport = l.transport })
	if life == 0 {
		h.fillBetweenRegisters(t)
	}
	l.slowDown(h)
	if l.lossy {
		disk.CrashAt(disk.Mutations() + 10 + l.rng.Int64N(150))
	}
	var clients sync.WaitGroup
	for n := range linearUnary + linearStreams {
		conn, rng := h.conn, rand.New(rand.NewPCG(l.rng.Uint64(), 0))
		if n%2 == 0 {
			conn = h.dial(t)
		}
		c := &linearClient{linear: l, id: n, rng: rng, kv: pb.NewKVServiceClient(conn), transactions: pb.NewTransactionServiceClient(conn)}
		if n < linearUnary {
			clients.Go(c.unary)
		} else {
			clients.Go(c.pipelines)
		}
	}
	l.endDuringLoad(t, h, &clients)
	for _, o := range l.ops {
		if o.Return == 0 {
			o.Return = l.now()
		}
	}
	if l.lossy {
		return disk.Crash(l.rng.Uint64(), vfs.Survival(l.rng.IntN(3)))
	}
	return disk
}

// endDuringLoad checkpoints and then stops the server while its clients are at work, and waits for them.
func (l *linear) endDuringLoad(t *testing.T, h *harness, clients *sync.WaitGroup) {
	const all = (linearUnary + linearStreams) * linearRounds
	ended := make(chan struct{})
	go func() {
		clients.Wait()
		close(ended)
	}()
	await := func(requests int) {
		for l.requests.Load() < int64(requests) {
			select {
			case <-ended:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}
	await(l.rng.IntN(all / 2))
	_, err := h.admin.Checkpoint(testContext(t), &pb.CheckpointRequest{})
	if err != nil && !l.lossy {
		t.Errorf("checkpoint: %v", err)
	}
	await(all/2 + l.rng.IntN(all))
	_ = h.stop() // the cleanup looks at it
	<-ended
}

// fillBetweenRegisters puts the registers in leaves of their own, so that reads after a start wait for the disk.
func (h *harness) fillBetweenRegisters(t *testing.T) {
	var batch pb.BatchWriteRequest
	for n := range 4 * linearKeys {
		batch.Mutations = append(batch.Mutations, &pb.Mutation{
			Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "register/%d/%d", n/4, n), Value: make([]byte, 1800),
		})
	}
	if _, err := h.kv.BatchWrite(testContext(t), &batch); err != nil {
		t.Fatal(err)
	}
}

func (l *linear) slowDown(h *harness) {
	delay := func() time.Duration { return time.Duration(l.rng.IntN(3)*l.rng.IntN(1000)) * time.Microsecond }
	h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Delay: delay()})
	h.faults.Inject(vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Fault: vfs.Slow, Delay: delay()})
}

func (l *linear) add(o *sim.RegisterOp) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ops = append(l.ops, o)
}

// complete records how an operation ended. An unknown one may take effect until its server has ended, which live notes.
func (l *linear) complete(o *sim.RegisterOp, err error) {
	l.requests.Add(1)
	o.Status, o.Return = sim.Committed, l.now()
	if err != nil {
		o.Status = statusAfter(o, err)
	}
	if o.Status == sim.Unknown {
		o.Return = 0
	}
	if value := o.Old; o.Seen && o.Found {
		l.values[registerOf(o.Key)].Store(&value)
	}
	l.add(o)
}
