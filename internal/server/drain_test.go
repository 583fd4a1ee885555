package server

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// TestDrainServesClientsUntilTheyKnow: a request is executed if its client has sent it before the
// client knows of the drain, which is when it has answered the ping after the first GOAWAY. So a
// client without retries sees no error of a server that stops. A later request is refused by the
// transport, which clients repeat by themselves.
func TestDrainServesClientsUntilTheyKnow(t *testing.T) {
	h := mustStart(t)
	h.put(t, "k", "v")
	conn, err := net.Dial("tcp", h.Address())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	x := &exchange{framer: http2.NewFramer(conn, conn)}
	x.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	x.encoder = hpack.NewEncoder(&x.block)
	_, _ = io.WriteString(conn, http2.ClientPreface)
	_ = x.framer.WriteSettings()
	get := grpcMessage(t, &pb.GetRequest{Key: []byte("k")})
	put := grpcMessage(t, &pb.PutRequest{Key: []byte("new"), Value: []byte("v")})
	x.open(1, "/epochkv.v1.KVService/Get", false)
	x.data(1, true, get)
	if got := x.outcomeOf(t, 1); got != "200 0 with messages" {
		t.Fatal(got)
	}

	stopped := make(chan error, 1)
	go func() { stopped <- h.stop() }()
	ping := x.drainPing(t)
	x.open(3, "/epochkv.v1.KVService/Put", false)
	x.data(3, true, put)
	if got := x.outcomeOf(t, 3); got != "200 0 with messages" {
		t.Errorf("a request before the client knows: %s", got)
	}
	if err := errors.Join(x.framer.WritePing(true, ping), <-stopped); err != nil {
		t.Fatal(err)
	}
	if got := mustStartOn(t, h.disk).get(t, "new"); string(got.Value) != "v" {
		t.Errorf("acknowledged and lost: %v", got)
	}
}

// drainPing reads until the ping that follows the first GOAWAY.
func (x *exchange) drainPing(t *testing.T) [8]byte {
	t.Helper()
	for told := false; ; {
		f, err := x.framer.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		switch f := f.(type) {
		case *http2.GoAwayFrame:
			told = true
		case *http2.PingFrame:
			if told && !f.IsAck() {
				return f.Data
			}
		}
	}
}
