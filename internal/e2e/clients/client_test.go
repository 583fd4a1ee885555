package clients

import (
	"bytes"
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/client"
)

func fill(t *testing.T, c *client.Client, count int) {
	t.Helper()
	p, err := c.Pipeline(t.Context(), client.PipelineOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range count {
		if err := p.Put(fmt.Appendf(nil, "key-%06d", i), fmt.Appendf(nil, "value-%0100d", i), nil, client.Async()); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestScanSurvivesABrokenNetwork(t *testing.T) {
	t.Parallel()
	const count = 20_000
	s := startServer(t)
	fill(t, s.dial(s.endpoint), count)
	p := startProxy(t, s.endpoint)
	p.budget.Store(300 << 10)
	c := s.dial(p.endpoint)
	for _, reverse := range []bool{false, true} {
		n := 0
		for e, err := range c.Scan(t.Context(), client.Range{}, client.ScanOptions{Reverse: reverse, PageBytes: 32 << 10}) {
			if err != nil {
				t.Fatalf("after %d entries: %v", n, err)
			}
			at := n
			if reverse {
				at = count - 1 - n
			}
			if want := fmt.Sprintf("key-%06d", at); string(e.Key) != want {
				t.Fatalf("entry %d is %q, want %q", n, e.Key, want)
			}
			if n == count/2 { // newer than the scan, which must not see it
				if _, err := s.dial(s.endpoint).Delete(t.Context(), e.Key); err != nil {
					t.Fatal(err)
				}
				if _, err := s.dial(s.endpoint).Put(t.Context(), e.Key, e.Value); err != nil {
					t.Fatal(err)
				}
			}
			n++
		}
		if n != count {
			t.Fatalf("%d entries, want %d", n, count)
		}
	}
	if broken := p.broken.Load(); broken < 5 {
		t.Errorf("the network broke only %d times", broken)
	}
}

// What a pipeline acknowledged is there after kill -9, and every request has an outcome.
func TestPipelineReportsEveryOutcomeWhenTheServerDies(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c := s.dial(s.endpoint)
	p, err := c.Pipeline(t.Context(), client.PipelineOptions{InFlight: 256})
	if err != nil {
		t.Fatal(err)
	}
	var acknowledged [1 << 20]atomic.Bool
	var outcomes atomic.Int64
	killed := make(chan struct{})
	go func() {
		defer close(killed)
		time.Sleep(300 * time.Millisecond)
		s.signal(syscall.SIGKILL)
	}()
	sent := int64(0)
	for i := range acknowledged {
		if err := p.Put(fmt.Appendf(nil, "k%d", i), fmt.Append(nil, i), func(_ client.Epoch, err error) {
			outcomes.Add(1)
			acknowledged[i].Store(err == nil)
			var e *client.Error
			if err != nil && (!errors.As(err, &e) || !e.OutcomeUnknown()) {
				t.Errorf("put %d: outcome %v", i, err)
			}
		}); err != nil {
			break
		}
		sent++
	}
	if err := p.Close(); err == nil {
		t.Error("the pipeline closed without an error, though the server was killed")
	}
	<-killed
	if outcomes.Load() != sent {
		t.Errorf("%d puts were sent, %d have an outcome", sent, outcomes.Load())
	}
	s.start()
	count := 0
	for i := range acknowledged[:sent] {
		if !acknowledged[i].Load() {
			continue
		}
		count++
		v, err := c.Get(t.Context(), fmt.Appendf(nil, "k%d", i))
		if err != nil || string(v.Data) != fmt.Sprint(i) {
			t.Fatalf("put %d was acknowledged and reads %+v, %v", i, v, err)
		}
		if count == 2000 {
			break // one by one is slow; the count below covers the rest
		}
	}
	total, _, err := c.Count(t.Context(), client.Prefix([]byte("k")), client.ScanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var acks uint64
	for i := range acknowledged[:sent] {
		if acknowledged[i].Load() {
			acks++
		}
	}
	if acks == 0 || total < acks || total > uint64(sent) {
		t.Errorf("%d sent, %d acknowledged, %d found", sent, acks, total)
	}
}

func TestSIGTERMLosesNothingAndAnswersEverything(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c := s.dial(s.endpoint)
	p, err := c.Pipeline(t.Context(), client.PipelineOptions{InFlight: 256})
	if err != nil {
		t.Fatal(err)
	}
	code := make(chan int)
	go func() {
		time.Sleep(200 * time.Millisecond)
		code <- s.signal(syscall.SIGTERM)
	}()
	var acknowledged, refused, unknown int
	for i := 0; ; i++ {
		if err := p.Put(fmt.Appendf(nil, "k%d", i), nil, func(_ client.Epoch, err error) {
			var e *client.Error
			switch {
			case err == nil:
				acknowledged++
			case errors.As(err, &e) && !e.OutcomeUnknown():
				refused++
			default:
				unknown++
			}
		}, client.Async()); err != nil {
			break
		}
	}
	_ = p.Close() // it was the server that ended it
	if got := <-code; got != 0 {
		t.Errorf("the server ended with code %d", got)
	}
	s.start()
	found, _, err := c.Count(t.Context(), client.Range{}, client.ScanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if found != uint64(acknowledged) || unknown != 0 || acknowledged == 0 {
		t.Errorf("%d acknowledged, %d refused, %d unknown; %d found after the restart", acknowledged, refused, unknown, found)
	}
}

// TestGetReadsValuesThatAreLongerThanItsMessages: a client that accepts messages of 4 MiB, as those of gRPC do by default, falls back to
// GetStream by itself.
func TestGetReadsValuesThatAreLongerThanItsMessages(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	value := bytes.Repeat([]byte("0123456789abcdef"), 5<<16)
	epoch, err := s.dial(s.endpoint).Put(t.Context(), []byte("k"), value)
	if err != nil {
		t.Fatal(err)
	}
	c := s.dial(s.endpoint, client.WithMaxMessage(4<<20))
	for name, options := range map[string][]client.ReadOption{"newest": nil, "at an epoch": {client.At(epoch)}} {
		if v, err := c.Get(t.Context(), []byte("k"), options...); err != nil || !v.Found || v.Epoch != epoch || !bytes.Equal(v.Data, value) {
			t.Errorf("%s: %d bytes of epoch %d, %v", name, len(v.Data), v.Epoch, err)
		}
	}
}
