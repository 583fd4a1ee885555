package server

import (
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

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
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
	h := mustStart(t)
	h.put(t, "k", "secret")
	if _, err := h.admin.Checkpoint(testContext(t), &pb.CheckpointRequest{}); err != nil {
		t.Fatal(err)
	}
	h.faults.Inject(vfs.Rule{Op: vfs.OpAnySync, Name: "*.ekv", Err: syscall.EIO})
	h.put(t, "k2", "secret")
	for range 3 {
		if _, err := h.admin.Checkpoint(testContext(t), &pb.CheckpointRequest{}); err == nil {
			t.Fatal("the checkpoint succeeded")
		}
	}
	log := h.log.String()
	if n := strings.Count(log, "a request failed for a reason that is not the client's"); n != 1 || !strings.Contains(log, "method=Checkpoint") {
		t.Errorf("%d lines:\n%s", n, log)
	}
	if strings.Contains(log, "secret") {
		t.Error("the log has a value")
	}
}

// TestViolationsAreLoggedOnce: the log names what makes the server end a connection, and a flood of
// such connections does not fill it.
func TestViolationsAreLoggedOnce(t *testing.T) {
	h := mustStart(t, withDirect)
	for range 20 {
		for _, bytes := range []string{"GET / HTTP/1.1\r\n\r\n", http2.ClientPreface + string(frame(frameData, 0, 1, []byte("x")))} {
			conn, err := net.Dial("tcp", h.Address())
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.WriteString(conn, bytes)
			_, _ = io.Copy(io.Discard, conn)
			_ = conn.Close()
		}
	}
	log := h.log.String()
	if n := strings.Count(log, "a connection is closed because of what its client sent"); n != 2 {
		t.Errorf("%d lines, want one of each kind:\n%s", n, log)
	}
	for _, want := range []string{"preface", "PROTOCOL_ERROR", "peer=127.0.0.1"} {
		if !strings.Contains(log, want) {
			t.Errorf("the log does not have %q:\n%s", want, log)
		}
	}
}
