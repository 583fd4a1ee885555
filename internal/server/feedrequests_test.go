package server

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// keepingWatch has every response that it is sent, encoded, like the transport of the gRPC library while its client takes nothing.
type keepingWatch struct {
	grpc.BidiStreamingServer[pb.WatchRequest, pb.WatchResponse]
	ctx  context.Context
	kept []mem.BufferSlice
}

func (s *keepingWatch) Context() context.Context { return s.ctx }

func (s *keepingWatch) SendMsg(m any) error {
	encoded, err := pb.NewCodec().Marshal(m)
	s.kept = append(s.kept, encoded)
	return err
}

// TestAResponseIsSentBeforeTheNextIsTaken, however small it is: the transport of the gRPC library takes more than it sends. A client that takes
// nothing stalls meanwhile.
func TestAResponseIsSentBeforeTheNextIsTaken(t *testing.T) {
	for _, size := range []int{0, 1, 1000, 1 << 20} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			server := &Server{configuration: configuration{config: config.Default()}}
			server.config.Transport = config.TransportGRPC
			stream, results := &keepingWatch{ctx: ctx}, make(chan error, 1)
			w := &watchStream{server: server, stream: stream}
			send := func() {
				results <- w.respond(ctx, new(streamWatch), &pb.WatchResponse{ResumeToken: make([]byte, size)})
			}
			for range 2 {
				go send()
				synctest.Wait()
				if len(results) > 0 || w.sending.Load() == 0 {
					t.Fatalf("a response of %d bytes counts as sent while it waits", size)
				}
				stream.kept[len(stream.kept)-1].Free()
				if err := <-results; err != nil || w.sending.Load() != 0 {
					t.Fatalf("when it is sent: %v", err)
				}
			}
			go send()
			synctest.Wait()
			if cancel(errOverloaded); !errors.Is(<-results, errOverloaded) {
				t.Error("a response is awaited when the stream has ended")
			}
		})
	}
}

// TestRequestsThatWaitForTheSenderAreCounted, in the share of watches. What finds no room there waits only for a moment, and for a sender that does not
// wait for its client.
func TestRequestsThatWaitForTheSenderAreCounted(t *testing.T) {
	large := &pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{
		WatchId: 7, Kinds: slices.Repeat([]pb.EventKind{pb.EventKind_EVENT_KIND_SET}, 10<<10),
	}}}
	cancels := &pb.WatchRequest{Request: &pb.WatchRequest_Cancel{Cancel: &pb.CancelWatch{WatchId: 7}}}
	cancels.ProtoReflect().SetUnknown(append([]byte{15<<3 | 2, 0x80, 0x40}, make([]byte, 8<<10)...))
	progress := &pb.WatchRequest{Request: &pb.WatchRequest_Progress{}}
	progress.ProtoReflect().SetUnknown(cancels.ProtoReflect().GetUnknown())
	begin := func(t *testing.T, room uint64, sending int64) (*watchStream, func(*pb.WatchRequest) <-chan bool) {
		ctx, cancel := context.WithCancel(t.Context())
		server := new(Server)
		server.admission.init(100, 16*room)
		w := &watchStream{server: server, conn: new(connection), requests: make(chan watchRequest)}
		w.sending.Store(sending)
		t.Cleanup(func() {
			cancel()
			synctest.Wait()
			if bytes := server.admission.words[shareWatches].word.Load(); bytes != 0 {
				t.Errorf("%d bytes are counted in the end", bytes&admissionBytes)
			}
		})
		return w, func(r *pb.WatchRequest) <-chan bool {
			handed := make(chan bool, 1)
			go func() { handed <- w.hand(ctx, r) }()
			synctest.Wait()
			return handed
		}
	}
	run := func(name string, test func(t *testing.T)) {
		t.Run(name, func(t *testing.T) { synctest.Test(t, test) })
	}
	run("with room", func(t *testing.T) {
		w, hand := begin(t, 1<<20, 1)
		handed, want := hand(large), uint64(10<<10*numberBytes)
		if empty := (&pb.CreateWatch{Ranges: slices.Repeat([]*pb.KeyRange{{}}, 1000)}); watchRequestBytes(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: empty}}) < 150_000 {
			t.Error("ranges count less than they take")
		}
		word := &w.server.admission.words[shareWatches].word
		if got := word.Load() & admissionBytes; got < want || !w.turn.request.Load() {
			t.Errorf("%d bytes are counted, want %d and more", got, want)
		}
		if r := <-w.requests; r.WatchRequest != large || r.refused != nil || !<-handed || word.Load() != 0 || w.turn.request.Load() {
			t.Errorf("taken: %v, %d bytes are counted", r.refused, word.Load()&admissionBytes)
		}
		hand(large) // ends with its stream
	})
	run("without room, for a sender that waits", func(t *testing.T) {
		w, hand := begin(t, 16<<10, 1)
		hand(large)
		r := <-w.requests
		if r.GetCreate().GetWatchId() != 7 || len(r.GetCreate().Kinds) > 0 || !errors.Is(r.refused, errOverloaded) || w.server.admission.refused.Load() != 1 {
			t.Errorf("a watch: %d bytes, %v", r.SizeVT(), r.refused)
		}
		w, hand = begin(t, 4<<10, 1)
		hand(cancels)
		if r := <-w.requests; r.GetCancel().GetWatchId() != 7 || r.SizeVT() > 100 || r.refused != nil {
			t.Errorf("a cancel: %d bytes, %v", r.SizeVT(), r.refused)
		}
		hand(progress)
		if r := <-w.requests; r.SizeVT() > 100 || r.refused != nil {
			t.Errorf("progress: %d bytes, %v", r.SizeVT(), r.refused)
		} else if _, ok := r.Request.(*pb.WatchRequest_Progress); !ok {
			t.Errorf("%v", r.WatchRequest)
		}
	})
	run("without room, for a sender that works", func(t *testing.T) {
		w, hand := begin(t, 16<<10, 0)
		hand(large)
		time.Sleep(watchRequestPatience / 2)
		if r := <-w.requests; r.WatchRequest != large || r.refused != nil {
			t.Errorf("refused: %v", r.refused)
		}
		hand(large)
		time.Sleep(2 * watchRequestPatience) // a sender may walk over very many keys
		if r := <-w.requests; r.refused == nil || len(r.GetCreate().Kinds) > 0 {
			t.Error("a request without room waits for as long as the sender works")
		}
		handed := hand(large)
		w.sending.Store(1)
		time.Sleep(10 * watchRequestLook)
		if r := <-w.requests; r.refused == nil || !<-handed {
			t.Error("a request without room waits for a client")
		}
		hand(large) // ends with its stream
	})
}

// TestRoomOfRequestsIsGivenToResponsesThatWait as soon as they are taken.
func TestRoomOfRequestsIsGivenToResponsesThatWait(t *testing.T) {
	l, requests := newTestLine(1<<20), new(connection)
	if !l.hold(requests, "requests", 400<<10) || l.hold(requests, "requests", 400<<10) || !l.hold(requests, "requests", countedBytesMin-1) {
		t.Fatal("a connection has another part of the share than it leaves free")
	}
	beside := l.join(new(connection), 2<<20, nil)
	waits := l.join(new(connection), 500<<10, nil)
	if waits.hasRoom() {
		t.Error("a response has room that a request has")
	}
	if l.unhold(requests, "requests", 400<<10); !waits.hasRoom() {
		t.Error("a response waits for room that is free")
	}
	l.unhold(requests, "requests", countedBytesMin-1)
	beside.leave()
	waits.leave()
	l.mustBeEmpty(t)
}

// TestAWatchWithoutRoomEndsAlone: a client that takes nothing creates watches, and there is no room for them. They end with OVERLOADED, and the
// others of the stream go on.
func TestAWatchWithoutRoomEndsAlone(t *testing.T) {
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		t.Run(string(transport), func(t *testing.T) {
			h := mustStart(t, func(c *config.Config) { c.Transport = transport })
			held := h.fillWatches()
			defer held.leave()
			e := h.put(t, "before", "")
			h.putLarge(t, 4, 100<<10)
			stream, err := pb.NewFeedServiceClient(h.dialDeaf(t)).Watch(testContext(t))
			if err != nil {
				t.Fatal(err)
			}
			w := &watcher{t: t, stream: stream}
			create := &pb.CreateWatch{Ranges: []*pb.KeyRange{{}}, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e}}
			w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: create}})
			eventually(t, "the changes are taken from the feed", func() bool { return h.feed.feed.Stats().Events >= 2 })
			refused := h.admission.refused.Load()
			long := &pb.CreateWatch{Ranges: []*pb.KeyRange{{Prefix: bytes.Repeat([]byte("k"), 1000)}}, Kinds: slices.Repeat([]pb.EventKind{pb.EventKind_EVENT_KIND_SET}, 10<<10)}
			eventually(t, "a watch is refused", func() bool {
				if long.WatchId < 20 { // each is taken, or waits
					long.WatchId++
					w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: long}})
				}
				return h.admission.refused.Load() > refused
			})
			for {
				if ended := w.recv().GetEnded(); ended != nil {
					failureOf(t, status.ErrorProto(ended.Error)).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_OVERLOADED)
					break
				}
			}
			h.put(t, "after", "")
			for {
				if c := w.of(0).GetChanges().GetCommits(); len(c) > 0 && string(c[len(c)-1].Events[0].Key) == "after" {
					break
				}
			}
		})
	}
}
