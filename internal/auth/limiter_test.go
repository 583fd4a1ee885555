package auth

import (
	"errors"
	"testing"
	"time"
)

// TestRatesAreKeptAfterABurst: a second's worth at once, and then the rate.
func TestRatesAreKeptAfterABurst(t *testing.T) {
	now := time.Hour
	x := NewLimiter(Limits{Requests: 10}, func() time.Duration { return now })
	for i := range 10 {
		if err := x.Request(0); err != nil {
			t.Fatalf("request %d of a burst: %v", i, err)
		}
	}
	refused, ok := errors.AsType[*LimitError](x.Request(0))
	if !ok || refused.Retry != 100*time.Millisecond || refused.Limit != 10 {
		t.Fatalf("the request after a burst: %+v", refused)
	}
	now += refused.Retry
	if err := x.Request(0); err != nil {
		t.Errorf("after the advised time: %v", err)
	}
	if x.Request(0) == nil {
		t.Error("a second request was permitted")
	}
	now += time.Hour
	for i := range 11 {
		if err := x.Request(0); (err == nil) != (i < 10) {
			t.Fatalf("request %d after an idle hour: %v", i, err)
		}
	}
}

// TestBytesArePaidForLater: a large message is permitted, and what follows waits for it; so do requests for their answers.
func TestBytesArePaidForLater(t *testing.T) {
	now := time.Hour
	x := NewLimiter(Limits{BytesIn: 1000, BytesOut: 1000}, func() time.Duration { return now })
	if err := x.Request(5000); err != nil {
		t.Fatal(err)
	}
	for range 2 { // a refusal costs nothing
		if refused, ok := errors.AsType[*LimitError](x.Request(1)); !ok || refused.Retry.Round(10*time.Millisecond) != 4*time.Second {
			t.Fatalf("after five seconds' worth: %+v", refused)
		}
	}
	now += 5 * time.Second
	x.Sent(3000)
	if refused, ok := errors.AsType[*LimitError](x.Request(0)); !ok || refused.Retry != 2*time.Second {
		t.Fatalf("after an answer of three seconds' worth: %+v", refused)
	}
	now += 2 * time.Second
	if err := x.Request(0); err != nil {
		t.Error(err)
	}
}

// TestOpenResourcesAreCounted, and given back; limits change while they are open.
func TestOpenResourcesAreCounted(t *testing.T) {
	x := NewLimiter(Limits{Watches: 2}, func() time.Duration { return 0 })
	for i := range 4 {
		if err := x.Open(Watches); (err == nil) != (i < 2) {
			t.Fatalf("watch %d: %v", i, err)
		}
		if err := x.Open(Streams); err != nil {
			t.Fatal(err)
		}
	}
	x.Close(Watches)
	if err := x.Open(Watches); err != nil {
		t.Errorf("a watch after another was closed: %v", err)
	}
	x.Set(Limits{})
	if err := x.Open(Watches); err != nil {
		t.Errorf("a watch without limits: %v", err)
	}
	var none *Limiter
	if none.Request(1) != nil || none.Open(Streams) != nil {
		t.Error("no limiter has limits")
	}
	none.Sent(1)
	none.Close(Streams)
}
