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

// TestALimitThatIsRaisedHoldsUpNothing: what was taken at a rate that was too low by mistake is paid for at the new one.
func TestALimitThatIsRaisedHoldsUpNothing(t *testing.T) {
	now := time.Hour
	x := NewLimiter(Limits{BytesIn: 10, BytesOut: 10, Requests: 1}, func() time.Duration { return now })
	if err := x.Request(10 << 20); err != nil {
		t.Fatal(err)
	}
	x.Sent(10 << 20)
	if refused, ok := errors.AsType[*LimitError](x.Request(1)); !ok || refused.Retry < 10*24*time.Hour {
		t.Fatalf("after 10 MiB at 10 bytes a second: %+v", refused)
	}
	x.Set(Limits{BytesIn: 10 << 20, BytesOut: 20 << 20, Requests: 1000})
	if refused, ok := errors.AsType[*LimitError](x.Request(1)); ok && refused.Retry > time.Second {
		t.Errorf("at 10 MiB a second: %+v", refused)
	}
	now += time.Second
	if err := x.Request(1); err != nil {
		t.Errorf("a second later: %v", err)
	}
	now += time.Second
	if err := x.Request(5 << 20); err != nil {
		t.Error(err)
	}
	x.Set(Limits{BytesIn: 1 << 20})
	if refused, ok := errors.AsType[*LimitError](x.Request(1)); !ok || refused.Retry.Round(time.Second/2) != 4*time.Second {
		t.Errorf("after a limit was lowered, half a second's worth is 5 seconds' worth: %+v", refused)
	}
	x.Set(Limits{})
	x.Set(Limits{BytesIn: 1 << 20})
	if err := x.Request(1); err != nil {
		t.Errorf("after a time without limits: %v", err)
	}
}
