package server

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	pb "epochkv/api/proto/epochkv/v1"
	"epochkv/client"
)

// TestClientEndsItsStreamsInOrder uses every kind of stream of the Go client, ended in every way in which a program is content, and wants
// no request counted as an error: an alert on the ratio of errors must not fire for a healthy program.
func TestClientEndsItsStreamsInOrder(t *testing.T) {
	h := mustStart(t)
	ctx := testContext(t)
	c, err := client.Dial(h.Address())
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
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "every stream has ended", func() bool { return h.streams.Load() == 0 })
	_, metrics := httpGet(t, h, "/metrics")
	for _, line := range regexp.MustCompile(`(?m)^kvserver_requests_total.* [1-9].*$`).FindAllString(metrics, -1) {
		if !strings.Contains(line, `code="OK"`) {
			t.Errorf("a healthy program is counted as %s", line)
		}
	}
	if !strings.Contains(metrics, `kvserver_requests_total{code="OK",method="Commit"} 102`) {
		t.Errorf("commits of transactions have no count of their own")
	}
	if !strings.Contains(metrics, `kvserver_transactions_aborted_total{reason="disconnect"} 0`) {
		t.Error("a rollback is counted as a lost connection")
	}
}

// TestScanOverALostConnectionIsCountedAsAnError keeps the rule for readers that have enough from hiding lost connections.
func TestScanOverALostConnectionCountsAsCanceled(t *testing.T) {
	h := mustStart(t)
	for i := range 100 {
		h.put(t, fmt.Sprint(i), strings.Repeat("v", 1<<20))
	}
	conn := h.dial(t)
	stream, err := pb.NewKVClient(conn).Scan(context.Background(), &pb.ScanRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the scan ends", func() bool { return h.streams.Load() == 0 })
	if _, metrics := httpGet(t, h, "/metrics"); !strings.Contains(metrics, `kvserver_requests_total{code="OK",method="Scan"} 0`) {
		t.Errorf("the broken scan is not counted: %v", regexp.MustCompile(`(?m)^kvserver_requests_total.*Scan.*$`).FindAllString(metrics, -1))
	}
}
