package server

import (
	"context"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"time"
)

// TestSystemdIsNotifiedOfReadinessAndStop is the contract of Type=notify: READY after the store is
// open, STOPPING before the drain.
func TestSystemdIsNotifiedOfReadinessAndStop(t *testing.T) {
	dir := t.TempDir()
	address := &net.UnixAddr{Name: filepath.Join(dir, "s"), Net: "unixgram"}
	socket, err := net.ListenUnixgram("unixgram", address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = socket.Close() }()
	t.Setenv("NOTIFY_SOCKET", address.Name)

	c := testConfig()
	c.DataDir = filepath.Join(dir, "data")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, Signals{}, c, slog.New(slog.NewTextHandler(io.Discard, nil))) }()
	if got := receiveState(t, socket); got != "READY=1" {
		t.Errorf("the first message is %q", got)
	}
	cancel()
	if got := receiveState(t, socket); got != "STOPPING=1" {
		t.Errorf("the second message is %q", got)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func receiveState(t *testing.T, socket *net.UnixConn) string {
	t.Helper()
	if err := socket.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 64)
	n, err := socket.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	return string(buf[:n])
}
