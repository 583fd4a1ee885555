package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/storage/inspect"
)

// process is a kvserver binary at work.
type process struct {
	cmd     *exec.Cmd
	address string
	exited  chan error
}

// binaries is where the test builds what it runs; TestMain makes and removes it.
var binaries string

func TestMain(m *testing.M) {
	var err error
	if binaries, err = os.MkdirTemp("", "epochkv-e2e-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(binaries) // a leftover in the temporary directory is no failure
	os.Exit(code)
}

// build makes the real binary, once for all tests.
var build = sync.OnceValues(func() (string, error) {
	name := filepath.Join(binaries, "kvserver")
	if out, err := exec.Command("go", "build", "-o", name, "github.com/epochkv/epochkv/cmd/kvserver").CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return name, nil
})

func mustBuild(t *testing.T) string {
	t.Helper()
	name, err := build()
	if err != nil {
		t.Fatal(err)
	}
	return name
}

// mustRun starts the binary and returns when it logs its address.
func mustRun(t *testing.T, binary, dir string, args ...string) *process {
	t.Helper()
	args = append([]string{"--data-dir", dir, "--listen", "127.0.0.1:0", "--http", "", "--log-format", "json"}, args...)
	p := &process{cmd: exec.Command(binary, args...), exited: make(chan error, 1)}
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.cmd.Process.Kill() }) // mostly it is gone already
	lines := bufio.NewScanner(stderr)
	var said []string
	for p.address == "" && lines.Scan() {
		said = append(said, lines.Text())
		var line struct{ Msg, Listen string }
		if json.Unmarshal(lines.Bytes(), &line) == nil && line.Msg == "serving" {
			p.address = line.Listen
		}
	}
	if p.address == "" {
		t.Fatalf("the server ended with %v after\n%s", p.cmd.Wait(), strings.Join(said, "\n"))
	}
	go func() {
		for lines.Scan() { // the pipe must not fill up
		}
		p.exited <- p.cmd.Wait()
	}()
	return p
}

// kill is kill -9: no handler runs, nothing is flushed.
func (p *process) kill(t *testing.T) {
	t.Helper()
	if err := p.cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	if err := <-p.exited; err == nil {
		t.Error("a killed server claims that it ended well")
	}
}

func mustDial(t *testing.T, address string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

// ledger is what one worker knows of its keys: per key the newest counter that was acknowledged,
// and the newest that was sent. The workers' keys are disjoint, so no lock is needed.
type ledger struct {
	name         string
	next         int
	acknowledged map[string]int
	sent         map[string]int
}

func newLedger(name string) *ledger {
	return &ledger{name: name, acknowledged: map[string]int{}, sent: map[string]int{}}
}

const keysPerWorker = 200

func (l *ledger) begin(rng *rand.Rand) (key string, counter int) {
	l.next++
	key = fmt.Sprintf("%s/%03d", l.name, rng.IntN(keysPerWorker))
	l.sent[key] = l.next
	return key, l.next
}

// twin is the key that a batch writes together with key: both have the same value, or the batch was
// torn.
func twin(key string) string { return key + "/twin" }

func put(key string, counter int) *pb.PutRequest {
	return &pb.PutRequest{Key: []byte(key), Value: []byte(strconv.Itoa(counter)), Durability: pb.Durability_DURABILITY_SYNC}
}

// putOneByOne writes until the connection breaks.
func (l *ledger) putOneByOne(ctx context.Context, kv pb.KVServiceClient, rng *rand.Rand) {
	for {
		key, counter := l.begin(rng)
		if _, err := kv.Put(ctx, put(key, counter)); err != nil {
			return
		}
		l.acknowledged[key] = counter
	}
}

func (l *ledger) writeBatches(ctx context.Context, kv pb.KVServiceClient, rng *rand.Rand) {
	for {
		key, counter := l.begin(rng)
		value := []byte(strconv.Itoa(counter))
		_, err := kv.BatchWrite(ctx, &pb.BatchWriteRequest{Durability: pb.Durability_DURABILITY_SYNC, Mutations: []*pb.Mutation{
			{Kind: pb.Mutation_KIND_PUT, Key: []byte(key), Value: value},
			{Kind: pb.Mutation_KIND_PUT, Key: []byte(twin(key)), Value: value},
		}})
		if err != nil {
			return
		}
		l.acknowledged[key] = counter
	}
}

// pipelineWindow is how many requests the pipelining worker has in flight.
const pipelineWindow = 64

func (l *ledger) pipeline(ctx context.Context, kv pb.KVServiceClient, rng *rand.Rand) {
	stream, err := kv.Pipeline(ctx)
	if err != nil {
		return
	}
	inflight := map[uint64]string{}
	for {
		for len(inflight) < pipelineWindow {
			key, counter := l.begin(rng)
			r := &pb.PipelineRequest{Id: uint64(counter), Request: &pb.PipelineRequest_Put{Put: put(key, counter)}}
			if stream.Send(r) != nil {
				return
			}
			inflight[r.Id] = key
		}
		got, err := stream.Recv()
		if err != nil || got.GetPut() == nil {
			return
		}
		key := inflight[got.Id]
		delete(inflight, got.Id)
		l.acknowledged[key] = max(l.acknowledged[key], int(got.Id))
	}
}

// check reads every key back: nothing acknowledged is missing, nothing is there that was never
// sent, no batch is torn.
func (l *ledger) check(ctx context.Context, kv pb.KVServiceClient, batches bool) error {
	for key, sent := range l.sent {
		out, err := kv.BatchGet(ctx, &pb.BatchGetRequest{Keys: [][]byte{[]byte(key), []byte(twin(key))}})
		if err != nil {
			return err
		}
		one, other := out.Results[0], out.Results[1]
		counter := 0
		if one.Found {
			if counter, err = strconv.Atoi(string(one.Value)); err != nil {
				return err
			}
		}
		switch {
		case counter < l.acknowledged[key]:
			return fmt.Errorf("%s: %d was acknowledged, %d is there", key, l.acknowledged[key], counter)
		case counter > sent:
			return fmt.Errorf("%s: %d was sent, %d is there", key, sent, counter)
		case batches && (string(one.Value) != string(other.Value) || one.Epoch != other.Epoch):
			return fmt.Errorf("%s: torn batch: %q at %d and %q at %d", key, one.Value, one.Epoch, other.Value, other.Epoch)
		}
		l.sent[key] = counter // what was not there after the restart must not appear later
		l.acknowledged[key] = counter
	}
	return nil
}

// TestKillMinusNineLosesNothingAcknowledged kills the real server again and again under load.
func TestKillMinusNineLosesNothingAcknowledged(t *testing.T) {
	rounds := 30
	if testing.Short() {
		rounds = 3
	}
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("EPOCHKV_SEED"); s != "" {
		seed, _ = strconv.ParseUint(s, 10, 64)
	}
	t.Logf("replay the schedule (not the races) with EPOCHKV_SEED=%d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	binary, dir := mustBuild(t), t.TempDir()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	single, other, batches, piped := newLedger("single"), newLedger("other"), newLedger("batch"), newLedger("pipe")
	ledgers := []*ledger{single, other, batches, piped}
	acknowledged := 0
	for round := range rounds + 1 {
		p := mustRun(t, binary, dir, "--memory", "256MiB", "--memtable-size", "2MiB", "--segment-size", "1MiB")
		conn := mustDial(t, p.address)
		kv := pb.NewKVServiceClient(conn)
		for _, l := range ledgers {
			if err := l.check(ctx, kv, l == batches); err != nil {
				t.Fatalf("after %d kills: %v", round, err)
			}
		}
		if round < rounds {
			var workers sync.WaitGroup
			for i, work := range []func(context.Context, pb.KVServiceClient, *rand.Rand){single.putOneByOne, other.putOneByOne, batches.writeBatches, piped.pipeline} {
				mine := rand.New(rand.NewPCG(seed, uint64(100*round+i+1)))
				workers.Go(func() { work(ctx, kv, mine) })
			}
			time.Sleep(time.Duration(20+rng.IntN(200)) * time.Millisecond)
			p.kill(t)
			workers.Wait()
			acknowledged = 0
			for _, l := range ledgers {
				acknowledged += l.next
			}
		} else if err := p.stop(); err != nil {
			t.Fatal(err)
		}
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
		// What is on the disk is intact before any recovery, and every page is accounted for.
		report, err := inspect.VerifyDir(ctx, nil, dir, inspect.VerifyOptions{})
		if err != nil || !report.OK() || !report.Accounted {
			t.Fatalf("after %d kills: %+v, %v", round+1, report, err)
		}
	}
	t.Logf("%d kills, %d writes sent", rounds, acknowledged)
	if acknowledged < rounds*10 {
		t.Errorf("only %d writes in %d rounds: the test proves little", acknowledged, rounds)
	}
}

// stop sends SIGTERM and returns how the process ended.
func (p *process) stop() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case err := <-p.exited:
		return err
	case <-time.After(20 * time.Second):
		return errors.Join(errors.New("no end 20 seconds after SIGTERM"), p.cmd.Process.Kill())
	}
}

func TestSecondServerOnOneDirectoryIsKeptOut(t *testing.T) {
	binary, dir := mustBuild(t), t.TempDir()
	p := mustRun(t, binary, dir, "--memory", "64MiB")
	out, err := exec.Command(binary, "--data-dir", dir, "--listen", "127.0.0.1:0", "--http", "", "--memory", "64MiB").CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(string(out), "locked") {
		t.Errorf("the second ended with %v:\n%s", err, out)
	}
	if err := p.stop(); err != nil {
		t.Error(err)
	}
}

func TestBadOptionEndsWithUsage(t *testing.T) {
	out, err := exec.Command(mustBuild(t), "--memroy", "1GiB").CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 2 || !strings.Contains(string(out), "--help") {
		t.Errorf("ended with %v:\n%s", err, out)
	}
}
