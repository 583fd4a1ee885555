package server

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// TestWhatWaitsAfterItsRequestHasEndedIsCounted: the transport has the last page of a scan, and the last part of a value, when their requests have
// ended. They count until they are sent: clients that take nothing get no more of them than fit into their shares, and all is given back when they
// are gone.
func TestWhatWaitsAfterItsRequestHasEndedIsCounted(t *testing.T) {
	for name, test := range map[string]struct {
		method  telemetry.Method
		request any
		share   share
	}{
		"scans of one page": {telemetry.MethodScan, &pb.ScanRequest{Limit: 1}, shareScans},
		"streamed values":   {telemetry.MethodGetStream, &pb.GetStreamRequest{Key: []byte("large/000")}, shareAnswers},
	} {
		t.Run(name, func(t *testing.T) {
			const requests = 150
			h := mustStart(t, func(c *config.Config) { c.Limits.InflightBytes, c.MessageTimeout = 64*config.MiB, time.Hour })
			h.putLarge(t, 1, 200<<10)
			before := liveHeap()
			ctx, cancel := context.WithCancel(testContext(t))
			defer cancel()
			conns := []*grpc.ClientConn{h.dialDeaf(t), h.dialDeaf(t), h.dialDeaf(t)}
			for i := range requests {
				ask(ctx, t, conns[i%len(conns)], test.method.String(), test.request)
			}
			eventually(t, "all requests have ended", func() bool { return h.observer.requests.Totals(test.method).Count == requests })
			word := &h.admission.words[test.share]
			held, grown := word.word.Load()&admissionBytes, liveHeap()-before
			t.Logf("%d KiB are counted, the heap grew by %d KiB", held>>10, grown>>10)
			if held < word.limit.bytes/4 || held > word.limit.bytes {
				t.Errorf("%d bytes that wait are counted; the share has %d", held, word.limit.bytes)
			}
			if h.observer.requests.Totals(test.method).Failed == 0 {
				t.Error("no request was refused")
			}
			for _, conn := range conns {
				if err := conn.Close(); err != nil {
					t.Fatal(err)
				}
			}
			eventually(t, "everything is given back", func() bool { return word.word.Load() == 0 })
		})
	}
}

// TestTheLastPageOfAScanMayWaitLikeTheOthers: a client that takes longer over a page than --message-timeout gets the last page, too.
func TestTheLastPageOfAScanMayWaitLikeTheOthers(t *testing.T) {
	const timeout = 200 * time.Millisecond
	h := mustStart(t, func(c *config.Config) { c.MessageTimeout = timeout })
	h.putLarge(t, 3, 100<<10)
	stream, err := pb.NewKVServiceClient(h.dialDeaf(t)).Scan(testContext(t), &pb.ScanRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for page := range 3 {
		if _, err := stream.Recv(); page < 2 && err != nil || page == 2 && !errors.Is(err, io.EOF) {
			t.Fatalf("page %d: %v", page, err)
		}
		if page == 0 {
			time.Sleep(3 * timeout)
		}
	}
}

// TestPagesOfAScanAreCountedUntilTheLastIsSent, in whichever order the scan, its pages and its connection end.
func TestPagesOfAScanAreCountedUntilTheLastIsSent(t *testing.T) {
	const room, large, small = 100 << 10, 60 << 10, 20 << 10
	var a admission
	a.init(64, 1<<20)
	word := &a.words[shareScans].word
	begin := func() (*connection, *scanPages) {
		conn := new(connection)
		if !a.enter(conn, shareScans, room) {
			t.Fatal("a scan is refused")
		}
		return conn, &scanPages{admission: &a}
	}
	want := func(what string, requests, bytes uint64) {
		t.Helper()
		if got := word.Load(); got>>admissionShift != requests || got&admissionBytes != bytes {
			t.Errorf("%s: %d scans with %d bytes are counted, want %d with %d", what, got>>admissionShift, got&admissionBytes, requests, bytes)
		}
	}
	conn, pages := begin()
	first, second := pages.add(large), pages.add(small)
	first.counted.sent()
	want("a page is sent", 1, room)
	pages.end(conn, room)
	want("the scan has ended", 1, small)
	second.counted.sent()
	second.counted.sent() // also by the cleanup
	want("its last page is sent", 0, 0)

	conn, pages = begin()
	first, second = pages.add(large), pages.add(large)
	pages.end(conn, room)
	want("the pages have more than the scan", 1, room)
	first.counted.sent()
	want("one of them is sent", 1, room)
	conn.end(&a)
	want("the connection has ended", 0, 0)
	second.counted.sent()
	want("its last page is discarded", 0, 0)

	conn, pages = begin()
	first = pages.add(large)
	conn.end(&a)
	pages.end(conn, room)
	want("the scan ends after its connection", 0, 0)
	first.counted.sent()
	want("and its page", 0, 0)
}

// TestPagesThatWereNotSentAreFreed: the transport of the gRPC library keeps them until nothing refers to it, so they must not keep their scan, which does.
func TestPagesThatWereNotSentAreFreed(t *testing.T) {
	const size, conns = 2 << 20, 3
	h := mustStart(t, func(c *config.Config) { c.Limits.InflightBytes, c.Transport = 64*config.MiB, config.TransportGRPC })
	h.putLarge(t, 2, size)
	if _, err := h.admin.Checkpoint(testContext(t), new(pb.CheckpointRequest)); err != nil { // whose file is in memory, too
		t.Fatal(err)
	}
	before, word := liveHeap(), &h.admission.words[shareScans].word
	for range conns {
		conn := h.dialDeaf(t)
		stream, err := pb.NewKVServiceClient(conn).Scan(testContext(t), new(pb.ScanRequest))
		if err == nil {
			_, err = stream.Header() // comes before the page
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the scan has ended", func() bool { return word.Load() == 0 })
	}
	eventually(t, "its pages are freed", func() bool { return liveHeap() < before+size })
}

// keepingStream has every message that it is sent, encoded, like the transport of the gRPC library while its client takes nothing.
type keepingStream struct {
	grpc.ServerStreamingServer[pb.ScanResponse]
	ctx  context.Context
	kept []mem.BufferSlice
}

func (s *keepingStream) Context() context.Context { return s.ctx }

func (s *keepingStream) SendMsg(m any) error {
	encoded, err := pb.NewCodec().Marshal(m)
	s.kept = append(s.kept, encoded)
	return err
}

// TestAPageIsEncodedWhenTheOneBeforeIsSent: the transport of the gRPC library takes more than it sends.
func TestAPageIsEncodedWhenTheOneBeforeIsSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		server := &Server{configuration: configuration{config: config.Config{Transport: config.TransportGRPC}}}
		sc := &scan{
			server: server, access: &access{conn: new(connection)}, snapshot: &openSnapshot{ctx: ctx},
			scanMemory: scanMemory{
				pages: &scanPages{admission: &server.admission}, size: 2 * pageCountedMin,
				page: scanEncoding{buf: make([]byte, 2*pageCountedMin)},
			},
		}
		stream, results := &keepingStream{ctx: ctx}, make(chan error, 1)
		send := func() { results <- sc.sendCounted(stream) }
		if send(); <-results != nil {
			t.Fatal("the first page is not sent")
		}
		go send()
		if synctest.Wait(); len(stream.kept) != 1 {
			t.Error("a page is encoded while the one before waits")
		}
		stream.kept[0].Free()
		if err := <-results; err != nil || len(stream.kept) != 2 {
			t.Errorf("when that is sent: %v, %d pages are encoded", err, len(stream.kept))
		}
		go send()
		synctest.Wait()
		if cancel(errOverloaded); !errors.Is(<-results, errOverloaded) {
			t.Error("a page still waits when the snapshot has ended")
		}
		stream.kept[1].Free() // in the bubble, which the cleanup is not
	})
}

// stuckBrowser is a browser that takes nothing until it is released.
type stuckBrowser struct {
	http.ResponseWriter
	released <-chan struct{}
}

func (b stuckBrowser) Write(p []byte) (int, error) {
	<-b.released
	return len(p), nil
}

// TestAnswersThatWaitForBrowsersAreCounted: an answer of the console is in memory until its browser has taken it. Those of a client leave room to the
// browsers of others.
func TestAnswersThatWaitForBrowsersAreCounted(t *testing.T) {
	const browsers = 20
	h := mustStart(t, func(c *config.Config) {
		c.Limits.InflightBytes, c.Limits.BatchSize, c.Limits.ValueSize = 16*config.MiB, 8*config.MiB, 8*config.MiB
	})
	h.putLarge(t, 20, 50<<10) // 1.3 MiB in JSON
	word, released, open := &h.admission.words[shareAnswers], make(chan struct{}), h.connections.open.Load()
	var waiting sync.WaitGroup
	scan := func(w http.ResponseWriter, from, limit string) {
		r := h.authorize(httptest.NewRequest(http.MethodPost, "http://127.0.0.1/console/api/call/epochkv.v1.KVService/Scan", strings.NewReader(`{"limit":`+limit+`}`)))
		r.Header.Set("X-Epochkv-Console", "1")
		r.RemoteAddr = from + ":1"
		h.endpoints.http.Handler.ServeHTTP(w, r)
	}
	for range browsers {
		waiting.Go(func() { scan(stuckBrowser{httptest.NewRecorder(), released}, "192.0.2.1", "3") })
	}
	scans := func() telemetry.Totals { return h.observer.requests.Totals(telemetry.MethodScan) }
	eventually(t, "all requests have ended", func() bool { return scans().Count == browsers })
	runtime.GC() // which would end the count of what nothing refers to
	time.Sleep(10 * time.Millisecond)
	if _, _, held := h.admission.inflight(); held < 1<<20 || word.word.Load()&admissionBytes > word.limit.bytes || scans().Failed == 0 {
		t.Errorf("%d bytes of answers are counted, %d of %d requests were refused", held, scans().Failed, browsers)
	}
	other := httptest.NewRecorder()
	if scan(other, "192.0.2.2", "2"); other.Code != http.StatusOK {
		t.Errorf("that of another client: %d, %s", other.Code, other.Body)
	}
	close(released)
	waiting.Wait()
	if word.word.Load() != 0 || h.connections.open.Load() != open {
		t.Error("answers that were taken are counted")
	}
}
