package server

import (
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// openPipeline opens a pipeline that has executed a request, and stays open.
func openPipeline(t *testing.T, conn *grpc.ClientConn) error {
	t.Helper()
	stream, err := pb.NewKVServiceClient(conn).Pipeline(testContext(t))
	if err == nil {
		_ = stream.Send(&pb.PipelineRequest{Id: 1, Request: &pb.PipelineRequest_Get{Get: &pb.GetRequest{Key: []byte("k")}}})
		_, err = stream.Recv()
	}
	return err
}

// TestConnectionsOfOneClientLeaveStreamsToOthers: each of them leaves as many as it has, and several would leave none.
func TestConnectionsOfOneClientLeaveStreamsToOthers(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		const shared = 64
		limit := h.receiving.streams.limit
		h.receiving.streams.reserved.Add(limit - shared)
		defer h.receiving.streams.reserved.Add(shared - limit)
		var conns []*grpc.ClientConn
		for range 5 {
			conn := h.dialFrom(t, "127.0.0.2")
			conns = append(conns, conn)
			var err error
			for n := 0; err == nil; n++ {
				if err = openPipeline(t, conn); err != nil && n < config.StreamsOwn {
					t.Fatalf("stream %d of a connection: %v", n, err)
				}
			}
			failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
		}
		other := h.dialFrom(t, "127.0.0.3")
		for i := range config.StreamsOwn + streamStep {
			if err := openPipeline(t, other); err != nil {
				t.Fatalf("stream %d of another client: %v", i, err)
			}
		}
		for _, conn := range append(conns, other) {
			if err := conn.Close(); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, "all is given back", func() bool { return h.receiving.streams.reserved.Load() == limit-shared })
		eventually(t, "their clients are forgotten", func() bool {
			h.receiving.clients.mu.Lock()
			defer h.receiving.clients.mu.Unlock()
			h.receiving.clients.sweepLocked()        // as when a client comes or leaves
			return len(h.receiving.clients.all) <= 1 // that of the harness
		})
	})
}

// TestOneClientMayHaveThreeQuartersOfTheStreams, and the next one as much of the rest, however they are spread over connections.
func TestOneClientMayHaveThreeQuartersOfTheStreams(t *testing.T) {
	r := newReceiving(0)
	const limit = 1600
	r.streams.limit = limit
	left := int64(limit)
	for _, name := range []string{"first", "second", "third"} {
		used, conns := int64(0), [200]*connStreams{}
		for i := range conns {
			conns[i] = r.clients.enter(name)
		}
		for open, again := int64(config.StreamsOwn), true; again; {
			again, open = false, open+1
			for _, conn := range conns {
				if r.countStreams(conn, open) {
					again, used = true, used+1
				}
			}
		}
		if has := conns[0].client.reserved.Load(); has != used || has != left*3/4 {
			t.Errorf("the %s client uses %d and has %d of %d streams", name, used, has, left)
		}
		left -= used
		if free := limit - r.streams.reserved.Load(); free != left {
			t.Errorf("%d are free, not %d", free, left)
		}
	}
}

// TestAClientThatConnectsAgainHasWhatItHad: what requests have may outlast their connection, and counts for the client until it has ended.
func TestAClientThatConnectsAgainHasWhatItHad(t *testing.T) {
	var clients streamClients
	h := heldSessions{}
	h.init(1024)
	connect := func(name string) *connection {
		return &connection{connectionLayers: connectionLayers{streams: clients.enter(name)}}
	}
	var held []*connection
	for range 100 { // connections, one after another
		conn := connect("one")
		for range 60 {
			if h.hold(conn) {
				held = append(held, conn)
			}
		}
		clients.leave("one", conn.streams)
	}
	if most := int(h.reads.max * 3 / 4); len(held) > most || len(held) < most*9/10 {
		t.Errorf("a client has %d sessions of %d", len(held), h.reads.max)
	}
	other := connect("other")
	if !h.hold(other) {
		t.Error("another one has none")
	}
	h.release(other)
	for _, conn := range held {
		h.release(conn)
	}
	clients.leave("other", other.streams)
	if len(clients.all) != 0 || len(clients.left) != 0 {
		t.Errorf("%d clients are known, %d have left", len(clients.all), len(clients.left))
	}
}

// TestStreamsThatConnectionsHaveInSpareAreThereForOthers: connections reserve more than they use, and keep more than they use, but not from each other.
func TestStreamsThatConnectionsHaveInSpareAreThereForOthers(t *testing.T) {
	r := newReceiving(0)
	const limit, each = 1600, 2
	r.streams.limit = limit
	var conns []*connStreams
	enter := func(client string, most int) (n int) {
		for ; n < most; n++ {
			conn := r.clients.enter(client)
			conns = append(conns, conn)
			if !r.countStreams(conn, config.StreamsOwn+each) {
				break
			}
		}
		return n
	}
	check := func() {
		t.Helper()
		var sum int64
		for _, conn := range conns {
			sum += conn.used + conn.spare.Load()
		}
		if all := r.streams.reserved.Load(); all != sum {
			t.Fatalf("%d streams are reserved, and connections have %d", all, sum)
		}
	}
	for range 3 {
		if n := enter("first", 2*limit); n != limit*3/4/each {
			t.Errorf("%d connections of the first client have their streams", n)
		}
		check()
		if n := enter("second", limit); n != limit*3/16/each {
			t.Errorf("%d connections of the second client have their streams", n)
		}
		check()
		for _, conn := range conns { // nothing is kept while streams are scarce
			if r.countStreams(conn, config.StreamsOwn+1); conn.spare.Load() != 0 {
				t.Fatalf("a connection has %d in spare", conn.spare.Load())
			}
		}
		check()
		for _, conn := range conns {
			r.countStreams(conn, 0)
		}
		check()
		if all := r.streams.reserved.Load(); all != 0 || r.clients.scarce.Load() {
			t.Fatalf("%d streams are reserved in the end, scarce: %t", all, r.clients.scarce.Load())
		}
		conns = nil
	}
	if conn := r.clients.enter("first"); !r.countStreams(conn, config.StreamsOwn+1) || conn.spare.Load() != streamStep-1 {
		t.Errorf("a connection has %d in spare while there is plenty", conn.spare.Load())
	}
}

// TestConnectionsReserveStreamsAtOnce, while those of others in spare are returned: nothing is counted twice, or lost, and none is refused that has room.
func TestConnectionsReserveStreamsAtOnce(t *testing.T) {
	r := newReceiving(0)
	const goroutines, connections, most = 16, 4, streamStep + 1
	r.streams.limit = goroutines * (connections*most + streamStep) * 4 / 3 // for what they use and what each tries to reserve, but not in steps
	clients, each := [goroutines][connections]*connStreams{}, sync.WaitGroup{}
	for i := range clients {
		for k := range clients[i] {
			clients[i][k] = r.clients.enter("client")
		}
	}
	for range 100 {
		for _, conns := range clients {
			each.Go(func() {
				for open := range int64(most) {
					for _, conn := range conns {
						if !r.countStreams(conn, config.StreamsOwn+open+1) {
							t.Error("a stream that has room is refused")
						}
					}
				}
			})
		}
		each.Wait()
		if !r.clients.scarce.Load() {
			t.Fatal("there is room for all that connections reserve in spare")
		}
		for _, conns := range clients {
			each.Go(func() {
				for open := int64(most); open > 0; open-- {
					for _, conn := range conns {
						r.countStreams(conn, config.StreamsOwn+open-1)
					}
				}
			})
		}
		each.Wait()
		if all, own := r.streams.reserved.Load(), clients[0][0].client.reserved.Load(); all != 0 || own != 0 {
			t.Fatalf("%d streams are reserved in the end, %d of the client", all, own)
		}
	}
}

// TestManyConnectionsOfOneClientHaveAFewStreamsEach: what a connection reserves beyond what it uses is not kept from others of its client.
func TestManyConnectionsOfOneClientHaveAFewStreamsEach(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		const connections, each = 24, config.StreamsOwn + 2
		shared, limit := int64(connections*2*4/3), h.receiving.streams.limit
		h.receiving.streams.reserved.Add(limit - shared)
		defer h.receiving.streams.reserved.Add(shared - limit)
		for i := range connections {
			conn := h.dialFrom(t, "127.0.0.2")
			for n := range each {
				if err := openPipeline(t, conn); err != nil {
					t.Fatalf("stream %d of connection %d: %v", n, i, err)
				}
			}
		}
	})
}

// TestAStreamThatHasRoomIsNotRefusedBecauseOfALaterOne, although that one began before the handler of the first did.
func TestAStreamThatHasRoomIsNotRefusedBecauseOfALaterOne(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		limit := h.receiving.streams.limit
		h.receiving.streams.reserved.Add(limit)
		defer h.receiving.streams.reserved.Add(-limit)
		const refused = 20
		var begun []byte
		for i := range uint32(config.StreamsOwn + refused) {
			begun = append(begun, frame(frameHeaders, flagEndHeaders, 2*i+1, requestHeaders(pb.KVService_Pipeline_FullMethodName, "20S"))...)
		}
		c := h.dialRaw(t)
		c.send(begun)
		_ = c.SetReadDeadline(time.Now().Add(patience))
		c.framer = http2.NewFramer(nil, c.Conn)
		c.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
		for ends := 0; ends < config.StreamsOwn+refused; {
			f, err := c.framer.ReadFrame()
			if err != nil {
				t.Fatal(err)
			}
			end, ok := f.(*http2.MetaHeadersFrame)
			if !ok || !end.StreamEnded() {
				continue
			}
			if ends++; (ends > refused) != (end.StreamID <= 2*config.StreamsOwn) {
				t.Errorf("stream %d ends as number %d", end.StreamID, ends)
			}
			if ends == refused {
				for i := range uint32(config.StreamsOwn) {
					c.send(frame(frameData, flagEndStream, 2*i+1, nil))
				}
			}
		}
		for i := range uint32(config.StreamsOwn) { // the refused ones do not count any more
			c.begin(1001+2*i, pb.KVService_Pipeline_FullMethodName, "20S")
			c.send(frame(frameData, flagEndStream, 1001+2*i, nil))
			if got := c.reasonOf(t, 1001+2*i); got != "" {
				t.Errorf("a stream that has room ends with %q", got)
			}
		}
	})
}
