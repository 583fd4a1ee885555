package server

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/transport"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestIncidentsAreLoggedOnce: of each kind one line a minute, which says how many there were.
func TestIncidentsAreLoggedOnce(t *testing.T) {
	var log logBuffer
	now := time.Duration(0)
	var l operatorLog
	l.init(slog.New(slog.NewTextHandler(&log, nil)), func() time.Duration { return now })
	for n := range 1000 {
		l.incident(slog.LevelWarn, fmt.Sprint("kind ", n%2), "happened", errors.New(strings.Repeat("x", 10_000)))
	}
	if n := strings.Count(log.String(), "happened"); n != 2 || len(log.String()) > 3*incidentErrorMax {
		t.Errorf("%d lines of %d bytes", n, len(log.String()))
	}
	now += incidentEvery
	l.incident(slog.LevelWarn, "kind 0", "happened", io.EOF)
	if !strings.Contains(log.String(), "others_since_last_line=499") {
		t.Errorf("the log does not say how many:\n%s", log.String())
	}
}

// TestUnexpectedErrorsAreLogged: an operator learns of errors for which a client can do nothing, on
// every way on which they reach a client.
func TestUnexpectedErrorsAreLogged(t *testing.T) {
	var log string
	for code := codes.Unavailable; code == codes.Unavailable; { // while the reserve was filled first, so that clients have a reason: READ_ONLY
		h := mustStart(t)
		h.put(t, "k", "secret")
		h.faults.Inject(vfs.Rule{Op: vfs.OpAnySync, Name: "*.ekv", Err: syscall.EIO})
		_, err := h.admin.Checkpoint(testContext(t), &pb.CheckpointRequest{})
		for range 2 {
			if _, again := h.admin.Checkpoint(testContext(t), &pb.CheckpointRequest{}); again == nil || err == nil {
				t.Fatal("the checkpoint succeeded")
			}
		}
		log, code = h.log.String(), status.Code(err)
	}
	if n := strings.Count(log, "a request failed for a reason that is not the client's"); n != 1 || !strings.Contains(log, "method=Checkpoint") {
		t.Errorf("%d lines:\n%s", n, log)
	}
	if strings.Contains(log, "secret") {
		t.Error("the log has a value")
	}
}

// TestViolationsAreLoggedOnceAndCounted: the log names what makes the server end a connection, with the kind and the peer, and a flood of
// such connections does not fill it. The metric counts each.
func TestViolationsAreLoggedOnceAndCounted(t *testing.T) {
	h := mustStart(t, withDirect)
	const rounds = 5
	repeat := func(n int, b []byte) string { return strings.Repeat(string(b), n) }
	attacks := map[transport.Violation]string{
		transport.ViolationPreface:      "GET / HTTP/1.1\r\n\r\n",
		transport.ViolationProtocol:     http2.ClientPreface + string(frame(frameData, 0, 1, []byte("x"))),
		transport.ViolationFrameSize:    hello + string(frame(6, 0, 0, []byte("x"))),
		transport.ViolationCompression:  hello + string(frame(frameHeaders, flagEndHeaders, 1, []byte{0xff, 0xff, 0xff, 0xff, 0xff})),
		transport.ViolationFlowControl:  hello + string(windowOf(0, 1<<31-1)),
		transport.ViolationSettings:     hello + repeat(11_000, frame(4, 1, 0, nil)),
		transport.ViolationPing:         hello + repeat(10, frame(6, 0, 0, make([]byte, 8))),
		transport.ViolationWindow:       hello + repeat(11_000, windowOf(0, 1)),
		transport.ViolationContinuation: hello + string(frame(frameHeaders, 0, 1, []byte{0x83})) + repeat(3, frame(frameContinued, 0, 1, nil)),
	}
	for range rounds {
		for _, sent := range attacks {
			conn, err := net.Dial("tcp", h.Address())
			if err != nil {
				t.Fatal(err)
			}
			go func() { _, _ = io.WriteString(conn, sent) }()
			_, _ = io.Copy(io.Discard, conn)
			_ = conn.Close()
		}
	}
	for kind := range attacks {
		eventually(t, kind.String()+" is counted", func() bool { return h.stats().Refusals.Violations[kind].Count == rounds })
	}
	log := h.log.String()
	if n := strings.Count(log, "a connection is closed because of what its client sent"); n != len(attacks) {
		t.Errorf("%d lines, want one of each of %d kinds:\n%s", n, len(attacks), log)
	}
	for kind := range attacks {
		if n := strings.Count(log, "kind="+kind.String()+" peer=127.0.0.1"); n != 1 {
			t.Errorf("%d lines name %v and the peer:\n%s", n, kind, log)
		}
	}
}

// hello is how a client begins.
var hello = http2.ClientPreface + string(frame(4, 0, 0, nil))

// TestHeaderListsThatAreTooLargeAreLoggedOnce: they end their request, and not the connection.
func TestHeaderListsThatAreTooLargeAreLoggedOnce(t *testing.T) {
	h := mustStart(t, withDirect)
	var block bytes.Buffer
	e := hpack.NewEncoder(&block)
	field := func(name, value string) { _ = e.WriteField(hpack.HeaderField{Name: name, Value: value}) } // into memory
	field(":method", "POST")
	field(":scheme", "http")
	field(":path", pb.KVService_Get_FullMethodName)
	for range headerBytesMax / 100 { // a byte each, after the first
		field("large", strings.Repeat("l", 1000))
	}
	for range 3 {
		c := h.dialRaw(t)
		c.send(frame(frameHeaders, flagEndHeaders|flagEndStream, 1, block.Bytes()))
	}
	const line = "a request is refused because its metadata is too large"
	eventually(t, "all are refused, and the first has its line", func() bool { // which comes after the count
		return h.stats().Refusals.Violations[transport.ViolationHeaderList].Count == 3 && strings.Contains(h.log.String(), line)
	})
	log := h.log.String()
	if n := strings.Count(log, line); n != 1 || !strings.Contains(log, "kind=header_list peer=127.0.0.1") {
		t.Errorf("%d lines:\n%s", n, log)
	}
}
