package client_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/client/clienttest"
)

func mustPipeline(t *testing.T, c *client.Client, inFlight int) *client.Pipeline {
	t.Helper()
	p, err := c.Pipeline(t.Context(), client.PipelineOptions{InFlight: inFlight})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPipelineAnswersEachRequestOnce(t *testing.T) {
	_, c := start(t)
	p := mustPipeline(t, c, 16)
	const writers, each = 4, 100
	var answers [writers * each]atomic.Int32
	var group sync.WaitGroup
	for w := range writers {
		group.Go(func() {
			for i := range each {
				n := w*each + i
				if err := p.Put(fmt.Appendf(nil, "k%d", n), fmt.Append(nil, n), func(e client.Epoch, err error) {
					if err != nil || e == 0 {
						t.Errorf("put %d: epoch %d, %v", n, e, err)
					}
					answers[n].Add(1)
				}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	for n := range answers {
		if got := answers[n].Load(); got != 1 {
			t.Errorf("put %d was answered %d times", n, got)
		}
	}
	if count, _, err := c.Count(t.Context(), client.Range{}, client.ScanOptions{}); err != nil || count != writers*each {
		t.Errorf("%d keys, %v", count, err)
	}
}

func TestPipelineCarriesEveryKindOfRequest(t *testing.T) {
	_, c := start(t)
	p := mustPipeline(t, c, 8)
	var b client.Batch
	b.Put([]byte("a"), []byte("1"))
	b.Put([]byte("b"), []byte("2"))
	var batchEpoch client.Epoch
	if err := p.Write(&b, func(e client.Epoch, err error) { batchEpoch = e }); err != nil {
		t.Fatal(err)
	}
	if err := p.Delete([]byte("b"), nil); err != nil {
		t.Fatal(err)
	}
	var value client.Value
	var values []client.Value
	if err := p.Get([]byte("a"), func(v client.Value, _ error) { value = v }); err != nil {
		t.Fatal(err)
	}
	if err := p.BatchGet([][]byte{[]byte("b"), []byte("a")}, func(v []client.Value, _ error) { values = v }); err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if batchEpoch != 1 || string(value.Data) != "1" || len(values) != 2 || values[0].Found || !values[1].Found {
		t.Errorf("batch at %d, get %+v, batch get %+v", batchEpoch, value, values)
	}
}

func TestPipelineErrorsBelongToTheirRequest(t *testing.T) {
	_, c := start(t)
	p := mustPipeline(t, c, 8)
	var failed, fine error
	if err := p.Put(nil, nil, func(_ client.Epoch, err error) { failed = err }); err != nil {
		t.Fatal(err)
	}
	if err := p.Put([]byte("k"), nil, func(_ client.Epoch, err error) { fine = err }); err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Errorf("Close returned an error that a done function got: %v", err)
	}
	var e *client.Error
	if !errors.As(failed, &e) || e.Reason != kvpb.ErrorReason_ERROR_REASON_KEY_EMPTY || fine != nil {
		t.Errorf("failed: %v, fine: %v", failed, fine)
	}
}

func TestPipelineReturnsErrorsThatNoRequestGot(t *testing.T) {
	_, c := start(t)
	p := mustPipeline(t, c, 3)
	key := []byte("k")
	for range 2 { // the second of them fails
		if err := p.Put(key, nil, nil, client.If(client.Absent(key))); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Delete(key, nil); err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); !errors.Is(err, client.ErrPreconditionFailed) {
		t.Errorf("Close: %v", err)
	}
	if err := p.Put(key, nil, nil); !errors.Is(err, client.ErrPipelineClosed) {
		t.Errorf("Put after Close: %v", err)
	}
}

func TestFlushWaitsForAllDoneFunctions(t *testing.T) {
	_, c := start(t)
	p := mustPipeline(t, c, 4)
	var answered int // unguarded on purpose: Flush orders the accesses, and the race detector knows
	for round := range 20 {
		// The fake holds every third answer back until something else comes: so a multiple of three
		// and one.
		for i := range 4 {
			if err := p.Put(fmt.Appendf(nil, "%d-%d", round, i), nil, func(client.Epoch, error) {
				time.Sleep(100 * time.Microsecond) // a Flush that does not wait for this function is early
				answered++
			}); err != nil {
				t.Fatal(err)
			}
		}
		if round%3 == 0 { // sent 4, 16, 28, ...: the last answer is not held back
			if err := p.Flush(t.Context()); err != nil {
				t.Fatal(err)
			}
			if want := 4 * (round + 1); answered != want {
				t.Fatalf("round %d: %d answers, want %d", round, answered, want)
			}
		}
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestABrokenPipelineFailsEveryRequest(t *testing.T) {
	s, c := start(t)
	s.FailNext(status.Error(codes.Unavailable, "connection reset"))
	p := mustPipeline(t, c, 64)
	var told, sent int
	for range 1000 {
		if err := p.Put([]byte("k"), nil, func(_ client.Epoch, err error) {
			var e *client.Error
			if !errors.As(err, &e) || !e.OutcomeUnknown() {
				t.Errorf("told %v", err)
			}
			told++
		}); err != nil {
			break
		}
		sent++
	}
	if sent == 1000 {
		t.Error("a broken pipeline went on taking requests")
	}
	if err := p.Close(); err == nil {
		t.Error("Close did not return why the pipeline broke")
	}
	if told != sent {
		t.Errorf("%d requests were sent, %d were told", sent, told)
	}
}

func TestPipelineNeverExceedsItsBound(t *testing.T) {
	s := clienttest.Start(t)
	c, err := client.Dial(s.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	p := mustPipeline(t, c, 5)
	var inFlight atomic.Int32
	for i := range 200 {
		// Besides the five that wait for an answer: the one that is about to be sent, and the one
		// whose answer is being handed over.
		if n := inFlight.Add(1); n > 5+2 {
			t.Fatalf("%d in flight", n)
		}
		if err := p.Put(fmt.Append(nil, i), nil, func(client.Epoch, error) { inFlight.Add(-1) }); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestPipelineInvokeWithoutDoneFunction keeps its error, as that of other requests; the small server knows no such request.
func TestPipelineInvokeWithoutDoneFunction(t *testing.T) {
	_, c := start(t)
	p := mustPipeline(t, c, 4)
	if err := p.Invoke(client.Increment([]byte("k"), 1), nil); err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err == nil {
		t.Error("the error is lost")
	}
}

// TestPipelineReadWithoutDoneFunction sends a read that fails without a done function: as for a
// write, only its error is kept.
func TestPipelineReadWithoutDoneFunction(t *testing.T) {
	_, c := start(t)
	p := mustPipeline(t, c, 4)
	if err := errors.Join(p.Get([]byte("k"), nil), p.BatchGet([][]byte{[]byte("k")}, nil), p.Flush(t.Context())); err != nil {
		t.Fatal(err)
	}
	if err := p.Get(nil, nil); err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err == nil {
		t.Error("the error of a read without a key is lost")
	}
}
