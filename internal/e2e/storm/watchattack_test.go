package storm

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// TestWatchesWithoutAWindowStayInTheBound: streams of watches whose clients open no window, or one for the first responses, hold one response each,
// and what their clients ask for afterwards has a bound, too. They come over few connections, which leaves more memory for streams.
//
//	go test ./internal/e2e/storm -run WatchesWithoutAWindow -v -storm.attacks -storm.transport grpc-go
func TestWatchesWithoutAWindowStayInTheBound(t *testing.T) {
	binary := mustBuild(t)
	kinds := &pb.CreateWatch{WatchId: 1, Ranges: []*pb.KeyRange{{}}, Kinds: slices.Repeat([]pb.EventKind{pb.EventKind_EVENT_KIND_SET}, 62<<10)}
	ranges := &pb.CreateWatch{WatchId: 1, Ranges: slices.Repeat([]*pb.KeyRange{{}}, 15_000)}
	for _, kind := range []attack{
		{"watches without a window", func(a *attacker) { a.closedWatches(0, kinds) }},
		{"watches with a small window", func(a *attacker) { a.closedWatches(300, kinds) }},
		{"watches of many ranges", func(a *attacker) { a.closedWatches(0, ranges) }},
	} {
		t.Run(kind.name, func(t *testing.T) {
			kind.against(t, binary, "--max-connections", "100", "--max-watches", strconv.Itoa(closedWatchesMax))
		})
	}
}

// closedWatchesMax is --max-watches: it has room for all streams, which count as 16 each, and for a watch of each.
const closedWatchesMax = 120_000

// closedWatches opens streams of watches that take so many bytes, writes, and asks for another watch on each of them.
func (a *attacker) closedWatches(window uint32, later *pb.CreateWatch) {
	const commits, value = 12, 14 << 10
	a.bound = boundWithWatches(attackMemory, closedWatchesMax)
	streams, all := a.times(20, 80), a.rawClients(window)
	a.sendEach(all, streams, true, &pb.CreateWatch{Ranges: []*pb.KeyRange{{}}})
	kv := pb.NewKVServiceClient(a.dial())
	for i := range commits {
		if _, err := kv.Put(a.ctx, &pb.PutRequest{Key: fmt.Appendf(nil, "watched/%d", i), Value: make([]byte, value)}); err != nil {
			a.Fatal(err)
		}
	}
	a.Logf("%d MiB after the puts", a.steadyMemory()>>20)
	a.sendEach(all, streams, false, later)
	a.steadyMemory()
	for _, r := range all {
		a.refused.Add(int64(r.ended()))
	}
}

// rawClients are of several hosts, on connections whose streams may be sent so many bytes.
func (a *attacker) rawClients(window uint32) (all []*rawClient) {
	const hosts = 7
	for i := range a.times(hosts, 70) {
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(2+i%hosts))}}
		conn, err := dialer.DialContext(a.ctx, "tcp", a.server.address)
		if err != nil {
			a.Fatal(err)
		}
		a.closeAtEnd(conn)
		all = append(all, newRawClient(a, conn, http2.Setting{ID: http2.SettingInitialWindowSize, Val: window}))
	}
	return all
}

// steadyMemory waits, for some time at most, until the largest resident memory grows no more.
func (a *attacker) steadyMemory() (most int64) {
	for range 12 {
		time.Sleep(2 * a.look())
		now := peakOf(a.T, a.server)
		if now < most+1<<20 {
			return now
		}
		most = now
	}
	return most
}

// sendEach creates a watch on each stream of the connections, as far as their windows allow it within some time.
func (a *attacker) sendEach(connections []*rawClient, streams int, begin bool, create *pb.CreateWatch) {
	message := a.framed(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: create}})
	ctx, cancel := context.WithTimeout(a.ctx, 10*time.Second)
	defer cancel()
	var sending sync.WaitGroup
	for _, r := range connections {
		sending.Go(func() {
			defer context.AfterFunc(ctx, r.end)()
			for i := range streams {
				if r.watch(uint32(2*i+1), begin, message) != nil {
					return
				}
				a.done.Add(1)
			}
			if begin {
				r.awaitHeaders(streams)
			}
		})
	}
	sending.Wait()
}

func (r *rawClient) watch(stream uint32, begin bool, message []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if begin {
		if err := r.begin(stream, "/epochkv.v1.FeedService/Watch"); err != nil {
			return err
		}
	}
	return r.send(stream, message, 16<<10)
}

// awaitHeaders waits until the server has answered on so many streams.
func (r *rawClient) awaitHeaders(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.headers < n && !r.over {
		r.changed.Wait()
	}
}

// readSnapshots opens streams of several watches each, which begin with a snapshot of everything, and takes what comes for a while. Each watch has a large
// value in turn, and is to keep it no longer than that.
func (a *attacker) readSnapshots(streams, each int) {
	a.bound = boundWithWatches(attackMemory, attackWatches)
	ctx, cancel := context.WithTimeout(a.ctx, 10*a.look())
	defer cancel()
	for i := range 4 {
		mustPut(a.T, pb.NewKVServiceClient(a.dial()), largeKey(i), 15<<20)
	}
	create := &pb.CreateWatch{Ranges: []*pb.KeyRange{{}}, Start: &pb.CreateWatch_Snapshot{Snapshot: new(pb.WatchSnapshot)}}
	var all sync.WaitGroup
	defer all.Wait()
	for range streams {
		stream, err := pb.NewFeedServiceClient(a.dial(grpc.WithStaticStreamWindowSize(16<<20), grpc.WithStaticConnWindowSize(16<<20))).Watch(ctx, grpc.MaxCallRecvMsgSize(64<<20))
		if err != nil {
			a.Fatal(err)
		}
		for i := range each {
			c := proto.CloneOf(create)
			c.WatchId = uint64(1 + i)
			if err := stream.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: c}}); err != nil {
				a.Fatal(err)
			}
		}
		all.Go(func() {
			for {
				if _, err := stream.Recv(); err != nil {
					return
				}
				a.done.Add(1)
			}
		})
	}
}
