package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// TestClientEndsItsStreamsInOrder uses every kind of stream of the Go client, ended in every way in
// which a program is content, and wants no request counted as an error: an alert on the ratio of
// errors must not fire for a healthy program.
func TestClientEndsItsStreamsInOrder(t *testing.T) {
	h := mustStart(t)
	ctx := testContext(t)
	c, err := client.Dial(h.Address(), h.clientOptions()...)
	if err != nil {
		t.Fatal(err)
	}
	giveUp := errors.New("given up")
	for i := range 100 {
		key := fmt.Appendf(nil, "k%02d", i)
		if err := c.Update(ctx, func(tx *client.Txn) error { return tx.Put(key, make([]byte, 1000)) }); err != nil {
			t.Fatal(err)
		}
	}
	err = c.View(ctx, func(tx *client.Txn) error { _, err := tx.Get([]byte("k01")); return err })
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Update(ctx, func(tx *client.Txn) error { return errors.Join(tx.Put([]byte("x"), nil), giveUp) }); !errors.Is(err, giveUp) {
		t.Fatal(err)
	}
	for _, end := range []func(tx *client.Txn) error{
		func(tx *client.Txn) error { _, err := tx.Commit(); return err },
		func(tx *client.Txn) error { tx.Rollback(); return nil },
		func(tx *client.Txn) error { tx.Rollback(); tx.Rollback(); return nil },
	} {
		tx, err := c.Begin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(tx.Put([]byte("y"), nil), end(tx)); err != nil {
			t.Fatal(err)
		}
	}
	for _, limit := range []uint64{0, 1, 50, 1000} {
		for _, stopAt := range []int{1, 30, 1 << 20} {
			n := 0
			for _, err := range c.Scan(ctx, client.Range{}, client.ScanOptions{Limit: limit, PageBytes: 4096}) {
				if err != nil {
					t.Fatal(err)
				}
				if n++; n == stopAt {
					break
				}
			}
		}
	}
	p, err := c.Pipeline(ctx, client.PipelineOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		if err := p.Put(fmt.Appendf(nil, "p%d", i), nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	load, err := c.BulkLoad(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := load.Put([]byte("b"), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := load.Commit(); err != nil {
		t.Fatal(err)
	}
	load.Close()
	// What the client sends last may be lost when the connection closes before the server has read
	// it.
	eventually(t, "every stream has ended", func() bool { return h.counters.streams.Load() == 0 })
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	_, metrics := httpGet(t, h, "/metrics")
	for _, line := range regexp.MustCompile(`(?m)^kvserver_requests_total.* [1-9].*$`).FindAllString(metrics, -1) {
		if !strings.Contains(line, `code="OK"`) {
			t.Errorf("a healthy program is counted as %s", line)
		}
	}
	if !strings.Contains(metrics, `kvserver_requests_total{code="OK",method="Commit"} 102`) {
		t.Errorf("commits of transactions have no count of their own")
	}
	if !strings.Contains(metrics, `kvserver_transactions_aborted_total{reason="rollback"}`) || strings.Contains(metrics, `kvserver_transactions_aborted_total{reason="disconnect"}`) {
		t.Error("a rollback is counted as a lost connection")
	}
}

// TestScanOverALostConnectionIsCountedAsAnError keeps the rule for readers that have enough from
// hiding lost connections.
func TestScanOverABrokenConnectionCountsAsCanceled(t *testing.T) {
	h := mustStart(t)
	for i := range 20 { // far more than the client's windows
		h.put(t, fmt.Sprint(i), strings.Repeat("v", 256<<10))
	}
	conn := h.dial(t)
	stream, err := pb.NewKVServiceClient(conn).Scan(context.Background(), &pb.ScanRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the scan ends", func() bool { return h.counters.streams.Load() == 0 })
	if _, metrics := httpGet(t, h, "/metrics"); strings.Contains(metrics, `kvserver_requests_total{code="OK",method="Scan"}`) {
		t.Errorf("the broken scan is not counted: %v", regexp.MustCompile(`(?m)^kvserver_requests_total.*Scan.*$`).FindAllString(metrics, -1))
	}
}

// TestScanBrokenOffBeforeItsConnectionClosesIsInOrder: the server may run the scan's handler only
// when the connection has closed as well. What counts is the order of the two on the connection,
// which is gRPC's: a reset cancels the stream, a lost connection is closed first.
func TestScanBrokenOffBeforeItsConnectionClosesIsInOrder(t *testing.T) {
	closing := status.Error(codes.Unavailable, "transport is closing")
	for _, c := range []struct {
		name   string
		events string // (r)eset, (c)lose
		err    error
		want   codes.Code
	}{
		{"reset", "r", context.Canceled, codes.OK},
		{"reset, then closed", "rc", closing, codes.OK},
		{"closed, then canceled by that", "cr", closing, codes.Unavailable},
		{"closed, and seen as canceled", "cr", context.Canceled, codes.Canceled},
		{"open, and unavailable", "", closing, codes.Unavailable},
		{"reset, and failed", "rc", errOverloaded, codes.ResourceExhausted},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := mustStart(t)
			info := h.connections.admit(nil)
			client, raw := net.Pipe()
			defer func() { _ = client.Close() }()
			conn := &countedConn{Conn: raw, connections: &h.connections, info: info, inbound: newInbound(h.connections.receiving, info.streams)}
			defer func() { _ = conn.Close() }()
			ctx, reset := context.WithCancel(peer.NewContext(t.Context(), &peer.Peer{AuthInfo: info}))
			defer reset()
			_ = h.serveStream(ctx, telemetry.MethodScan, func(*connection) error {
				for _, event := range c.events {
					if event == 'r' {
						reset()
					} else if err := conn.Close(); err != nil {
						t.Error(err)
					}
				}
				return c.err
			})
			_, metrics := httpGet(t, h, "/metrics")
			if want := fmt.Sprintf(`kvserver_requests_total{code="%v",method="Scan"} 1`, c.want); !strings.Contains(metrics, want) {
				t.Errorf("want %s, got %v", want, regexp.MustCompile(`(?m)^kvserver_requests_total.*Scan.* [1-9].*$`).FindAllString(metrics, -1))
			}
		})
	}
}
