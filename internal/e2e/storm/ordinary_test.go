package storm

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

var (
	ordinaryScale  = flag.Int("storm.ordinary", 1, "times the requests of the ordinary loads against the memory of a server")
	ordinaryMemory = flag.Int64("storm.memory", 64<<20, "--memory of that server")
)

// ordinaryMax is the bound of resident memory under small requests, as docs/operations.md states it.
func ordinaryMax(memory int64) int64 { return memory + max(memory*15/100, 64<<20) }

// ordinaryLoad is so many calls of one kind.
type ordinaryLoad struct {
	name           string
	callers, calls int
	call           func(ctx context.Context, kv pb.KVServiceClient, keys *ordinaryKeys) error
}

// ordinaryKeys are the keys from 1 to written, at random places of the tree.
type ordinaryKeys struct{ written atomic.Uint64 }

func (k *ordinaryKeys) next() []byte { return k.at(k.written.Add(1)) }

func (k *ordinaryKeys) any() []byte { return k.at(1 + rand.Uint64N(k.written.Load())) }

func (k *ordinaryKeys) at(i uint64) []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, i*0x9e3779b97f4a7c15), i)
}

var ordinaryValue = make([]byte, 400)

// TestMemoryOfOrdinaryLoadsStaysInItsBound runs one load after the other against one server, with a
// tree larger than the page cache and more garbage than the heap may take.
//
//	go test ./internal/e2e/storm -run OrdinaryLoads -v -storm.ordinary 20 -storm.memory 268435456
func TestMemoryOfOrdinaryLoadsStaysInItsBound(t *testing.T) {
	t.Parallel()
	bound := ordinaryMax(*ordinaryMemory)
	p := start(t, mustBuild(t), mustDir(t), "--memory", fmt.Sprint(*ordinaryMemory))
	conns := []*grpc.ClientConn{dial(t, p.address), dial(t, p.address)}
	keys := new(ordinaryKeys)
	for _, load := range []ordinaryLoad{
		{"batches", 32, 1000, putHundred},
		{"puts", 64, 2000, putOne},
		{"pipelines", 4, 4, pipePuts},
		{"gets", 64, 2000, getOne},
		{"batch gets", 32, 500, getHundred},
		{"scans", 16, 300, scanHundred},
		{"batches again", 32, 300, putHundred},
	} {
		load.run(t, conns, keys)
		peak := peakOf(t, p)
		t.Logf("%-14s %8d keys, at most %d MiB of %d, %d ms of the processor in all", load.name, keys.written.Load(), peak>>20, bound>>20, processorTime(t, p).Milliseconds())
		if peak > bound {
			t.Errorf("resident memory reached %d MiB with %s, the bound is %d MiB", peak>>20, load.name, bound>>20)
		}
	}
	if err := p.stop(); err != nil {
		t.Errorf("SIGTERM: %v\n%s", err, p.log())
	}
}

// processorTime is what the server has taken in user and system mode.
func processorTime(t *testing.T, p *process) time.Duration {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.cmd.Process.Pid), "stat"))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	var ticks int
	for _, field := range fields[11:13] { // utime, stime
		n, err := strconv.Atoi(field)
		if err != nil {
			t.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

func (l *ordinaryLoad) run(t *testing.T, conns []*grpc.ClientConn, keys *ordinaryKeys) {
	t.Helper()
	var callers sync.WaitGroup
	for c := range l.callers {
		kv := pb.NewKVServiceClient(conns[c%len(conns)])
		callers.Go(func() {
			for i := c; i < l.calls**ordinaryScale; i += l.callers {
				if err := l.call(t.Context(), kv, keys); err != nil {
					t.Errorf("%s: %v", l.name, err)
					return
				}
			}
		})
	}
	callers.Wait()
}

func putOne(ctx context.Context, kv pb.KVServiceClient, keys *ordinaryKeys) error {
	_, err := kv.Put(ctx, &pb.PutRequest{Key: keys.next(), Value: ordinaryValue})
	return err
}

func putHundred(ctx context.Context, kv pb.KVServiceClient, keys *ordinaryKeys) error {
	req := &pb.BatchWriteRequest{Durability: pb.Durability_DURABILITY_ASYNC}
	for range 100 {
		req.Mutations = append(req.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: keys.next(), Value: ordinaryValue})
	}
	_, err := kv.BatchWrite(ctx, req)
	return err
}

func getOne(ctx context.Context, kv pb.KVServiceClient, keys *ordinaryKeys) error {
	_, err := kv.Get(ctx, &pb.GetRequest{Key: keys.any()})
	return err
}

func getHundred(ctx context.Context, kv pb.KVServiceClient, keys *ordinaryKeys) error {
	req := new(pb.BatchGetRequest)
	for range 100 {
		req.Keys = append(req.Keys, keys.any())
	}
	_, err := kv.BatchGet(ctx, req)
	return err
}

func scanHundred(ctx context.Context, kv pb.KVServiceClient, keys *ordinaryKeys) error {
	scan, err := kv.Scan(ctx, &pb.ScanRequest{Range: &pb.KeyRange{Start: keys.any()}, Limit: 100})
	for err == nil {
		_, err = scan.Recv()
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// pipePuts does five thousand puts, of which a thousand are on their way.
func pipePuts(ctx context.Context, kv pb.KVServiceClient, keys *ordinaryKeys) error {
	const puts, window = 5000, 1000
	pipe, err := kv.Pipeline(ctx)
	if err != nil {
		return err
	}
	slots, failed := make(chan struct{}, window), make(chan error, 1)
	go func() {
		for i := range uint64(puts) {
			slots <- struct{}{}
			put := &pb.PutRequest{Key: keys.next(), Value: ordinaryValue}
			if err := pipe.Send(&pb.PipelineRequest{Id: i, Request: &pb.PipelineRequest_Put{Put: put}}); err != nil {
				failed <- err
				return
			}
		}
		failed <- pipe.CloseSend()
	}()
	for range puts {
		if _, err := pipe.Recv(); err != nil {
			return err
		}
		<-slots
	}
	return <-failed
}
