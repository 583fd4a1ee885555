package transport

import (
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestOldConnectionsEnd: a client whose connection has become old goes on over another one without a failed request, and a stream
// that does not end is cut off a tenth of the age later. On a busy machine that tenth may be too short for a request, or for a
// client to learn that it is to go.
func TestOldConnectionsEnd(t *testing.T) {
	age := 400 * time.Millisecond
	err := oldConnectionsEnd(t, age)
	for range 3 {
		if err == nil {
			return
		}
		t.Logf("with an age of %v: %v", age, err)
		age *= 4
		err = oldConnectionsEnd(t, age)
	}
	if err != nil {
		t.Fatalf("with an age of %v: %v", age, err)
	}
}

// oldConnectionsEnd returns an error if a request failed, or the idle connection did.
func oldConnectionsEnd(t *testing.T, age time.Duration) error {
	s, _, address := start(t, func(o *Options) { o.MaxAge, o.HandshakeTimeout = age, age/5 })
	conn := dialCalls(t, address)
	idle := dial(t, address)
	stream, _ := chat(t, conn, pathChat)
	var m raw
	if err := errors.Join(stream.SendMsg(raw("a")), stream.RecvMsg(&m)); err != nil {
		return err
	}
	began, cut := time.Now(), make(chan error, 1)
	go func() {
		var m raw
		cut <- stream.RecvMsg(&m)
	}()
	var most int64
	for time.Since(began) < 5*age/2 {
		asked := time.Now()
		other, cancel := chat(t, conn, pathChat)
		err := errors.Join(other.SendMsg(raw("b")), other.RecvMsg(&m), other.CloseSend())
		if end := other.RecvMsg(&m); err != nil || !errors.Is(end, io.EOF) {
			return fmt.Errorf("after %v, a request of %v: %w", asked.Sub(began), time.Since(asked), errors.Join(err, end))
		}
		cancel()
		most = max(most, s.clients.Load())
	}
	if err := <-cut; status.Code(err) != codes.Unavailable {
		t.Errorf("the stream ended with %v", err)
	}
	if _, err := idle.Read(make([]byte, 1)); err == nil {
		_, err = io.Copy(io.Discard, idle)
		if err != nil {
			return fmt.Errorf("an idle connection that was told to go ended with %w", err)
		}
	}
	if most < 2 {
		t.Error("there was never a second connection: the test tests nothing")
	}
	return nil
}

// TestAgesDiffer: clients that have connected together do not have to connect again together.
func TestAgesDiffer(t *testing.T) {
	var first, last time.Time
	now := time.Now()
	for range 1000 {
		var l liveness
		l.init(now, time.Hour)
		if first.IsZero() || l.aged.Before(first) {
			first = l.aged
		}
		if l.aged.After(last) {
			last = l.aged
		}
	}
	if spread := last.Sub(first); spread < 5*time.Minute || last.After(now.Add(time.Hour)) || first.Before(now.Add(54*time.Minute)) {
		t.Errorf("ages from %v to %v", first.Sub(now), last.Sub(now))
	}
}
