package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/client/clienttest"
)

// importLines imports records in batches of one, and returns what the import printed.
func importLines(t *testing.T, server *clienttest.Server, pairs ...string) (exit int, errs string) {
	t.Helper()
	var in strings.Builder
	for _, pair := range pairs {
		key, value, _ := strings.Cut(pair, "=")
		fmt.Fprintf(&in, "{\"key\":%q,\"value\":%q}\n", key, value)
	}
	var out, report bytes.Buffer
	a := &app{in: strings.NewReader(in.String()), out: &out, err: &report, getenv: func(string) string { return "" }}
	exit = a.run(t.Context(), []string{"import", "--batch=1", "-", "--endpoint", server.Endpoint})
	return exit, report.String()
}

// valueOfKey is the newest value.
func valueOfKey(t *testing.T, server *clienttest.Server, key string) string {
	t.Helper()
	c, err := client.Dial(server.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	v, err := c.Get(t.Context(), []byte(key))
	if err != nil {
		t.Fatal(err)
	}
	return string(v.Data)
}

// TestABatchOfADeadConnectionIsNotExecutedAfterItsRepetition: the server executes what waits in a connection that has died when the import has
// ended, and other programs write.
func TestABatchOfADeadConnectionIsNotExecutedAfterItsRepetition(t *testing.T) {
	for after := range 2 { // the server keeps every third answer of a pipeline until the next request
		server := clienttest.Start(t)
		server.CutPipeline(after)
		exit, errs := importLines(t, server, "k=1", "k=2")
		if exit != exitOK || !strings.Contains(errs, "imported 2 records") {
			t.Fatalf("exit %d: %s", exit, errs)
		}
		server.ExecuteKept(t.Context())
		if got := valueOfKey(t, server, "k"); got != "2" {
			t.Errorf("cut after %d requests: the value is %q, that of an old attempt", after, got)
		}
	}
}

// TestABatchWhoseAnswerWasLostIsExecutedOnce: it was executed before the import asked.
func TestABatchWhoseAnswerWasLostIsExecutedOnce(t *testing.T) {
	server := clienttest.Start(t)
	server.CutPipeline(1)
	executed := make(chan struct{})
	go func() { // while the import waits before it goes back
		defer close(executed)
		for deadline := time.Now().Add(10 * time.Second); server.Calls("BatchWrite") < 2 && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			server.ExecuteKept(t.Context())
		}
	}()
	exit, errs := importLines(t, server, "a=1", "b=2", "c=3")
	<-executed
	if exit != exitOK || !strings.Contains(errs, "imported 3 records") {
		t.Fatalf("exit %d: %s", exit, errs)
	}
	if n := server.Calls("BatchWrite"); n != 3 {
		t.Errorf("%d batches were executed, want 3", n)
	}
}

// TestARefusedBatchDoesNotReplaceLaterOnes: batches after a refused one were executed. They are not executed again, and what they have put stays.
func TestARefusedBatchDoesNotReplaceLaterOnes(t *testing.T) {
	server := clienttest.Start(t)
	busy := clienttest.NewRetryError(codes.ResourceExhausted, kvpb.ErrorReason_ERROR_REASON_OVERLOADED, "overloaded", time.Millisecond)
	server.FailNext(nil, nil, busy) // the status, the pipeline, the first batch
	exit, errs := importLines(t, server, "k=1", "k=2")
	if exit != exitOK || !strings.Contains(errs, "imported 2 records") {
		t.Fatalf("exit %d: %s", exit, errs)
	}
	if got := valueOfKey(t, server, "k"); got != "2" {
		t.Errorf("the value is %q, want that of the later record", got)
	}
	if n := server.Calls("BatchWrite"); n != 2 {
		t.Errorf("%d batches, want the refused one, whose record was replaced, and the later one", n)
	}
}

// TestAnImportLearnsTheClockOfTheServer: its ids are refused until they have the server's time.
func TestAnImportLearnsTheClockOfTheServer(t *testing.T) {
	for _, reason := range []kvpb.ErrorReason{
		kvpb.ErrorReason_ERROR_REASON_REQUEST_ID_IN_FUTURE, kvpb.ErrorReason_ERROR_REASON_REQUEST_ID_EXPIRED,
	} {
		server := clienttest.Start(t)
		there := time.Now().Add(-time.Hour).UnixMilli()
		refused := clienttest.NewError(codes.FailedPrecondition, reason, "time", "server_time", strconv.FormatInt(there, 10))
		server.FailNext(nil, nil, refused, refused)
		if exit, errs := importLines(t, server, "a=1", "b=2"); exit != exitOK {
			t.Fatalf("%v: exit %d: %s", reason, exit, errs)
		}
		for _, id := range server.ExecutedIDs() {
			at := int64(0)
			for _, b := range []byte(id[:6]) {
				at = at<<8 | int64(b)
			}
			if off := at - there; off < 0 || off > time.Minute.Milliseconds() {
				t.Errorf("%v: an id is %d ms off the server's time", reason, off)
			}
		}
	}
}

// takingServer takes batches, and answers none, as a server with a hung device may.
type takingServer struct {
	kvpb.UnimplementedKVServiceServer
	kvpb.UnimplementedAdminServiceServer
}

// Status implements kvpb.AdminServiceServer.
func (takingServer) Status(context.Context, *kvpb.StatusRequest) (*kvpb.StatusResponse, error) {
	return &kvpb.StatusResponse{}, nil
}

// Pipeline implements kvpb.KVServiceServer.
func (takingServer) Pipeline(stream grpc.BidiStreamingServer[kvpb.PipelineRequest, kvpb.PipelineResponse]) error {
	for {
		if _, err := stream.Recv(); err != nil {
			<-stream.Context().Done()
			return err
		}
	}
}

// TestAnImportToAServerThatAnswersNothingEnds, and says that the lines may have been imported.
func TestAnImportToAServerThatAnswersNothingEnds(t *testing.T) {
	defer func(most time.Duration) { stalledMax = most }(stalledMax)
	stalledMax = 20 * time.Millisecond
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer()
	kvpb.RegisterKVServiceServer(g, takingServer{})
	kvpb.RegisterAdminServiceServer(g, takingServer{})
	go func() { _ = g.Serve(listener) }() // ends with Stop
	defer g.Stop()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		exit, errs := importLines(t, &clienttest.Server{Endpoint: listener.Addr().String()}, "k=1", "k=2")
		if exit != exitUnavailable || !strings.Contains(errs, "acknowledged nothing") || !strings.Contains(errs, "may or may not have been imported") {
			t.Errorf("exit %d: %s", exit, errs)
		}
	}()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Fatal("the import does not end")
	}
}
