package client_test

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/client/clienttest"
)

// TestLifetimesOfNothingHaveEnded: a lifetime that was computed to be zero, and the time of a program that has none, are not never.
func TestLifetimesOfNothingHaveEnded(t *testing.T) {
	var sent *kvpb.PutRequest
	note := func(ctx context.Context, method string, request, answer any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
		sent, _ = request.(*kvpb.PutRequest)
		return invoke(ctx, method, request, answer, conn, options...)
	}
	c, err := client.Dial(clienttest.Start(t).Endpoint, client.WithInterceptors(note, nil))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	for name, test := range map[string]struct {
		lifetime client.Lifetime
		ttl, at  uint64
	}{
		"none":                  {client.Lifetime{}, 0, 0},
		"for nothing":           {client.For(0), 1, 0}, // which the server refuses
		"for less than nothing": {client.For(-time.Hour), 1, 0},
		"until the zero time":   {client.Until(time.Time{}), 0, 1},
		"until 1970":            {client.Until(time.UnixMilli(0)), 0, 1},
	} {
		if _, err := c.Put(t.Context(), []byte("k"), nil, client.Expires(test.lifetime)); err != nil {
			t.Fatal(err)
		}
		if sent.GetTtlMs() != test.ttl || sent.GetExpiresAtMs() != test.at {
			t.Errorf("%s: sent as a time to live of %d ms and a deadline of %d", name, sent.GetTtlMs(), sent.GetExpiresAtMs())
		}
	}
}
