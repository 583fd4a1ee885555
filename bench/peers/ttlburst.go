package peers

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/client"
)

// burst measures how fast keys expire that are due at the same time.
func burst() harness.Scenario {
	s := scenario("ttl-burst", fmt.Sprintf("Keys that are due at the same moment, until the last of them is deleted, beside %.0f durable puts/s.",
		besideRate), "expiries", "", harness.Axis{Name: "bursts", Points: []int{1}}, nil, load{})
	s.Size, s.Window, s.Fixed = 200_000, 0, true
	s.Large = harness.Sizes{Size: 1_000_000}
	k := epochKVKind()
	s.Arms = []harness.Arm{{Name: k.name, Run: func(r *harness.Run) error { return onServer(r, k, expire) }}, putsAlone(k)}
	s.Figures = []harness.Figure{
		{Arm: k.name, AtLeast: 200_000, Source: "at least 200,000 expiries/s"},
		{Arm: k.name, Measure: putP99Ratio, AtMost: 2, Source: "put p99 at most 2 times"},
	}
	return s
}

const (
	expiringSamples = 100
	burstBatch      = 1000
)

func expiringKey(i int) []byte {
	return binary.BigEndian.AppendUint64([]byte("expiring"), uint64(i)*0x9e3779b97f4a7c15)
}

// writeTime is how long writing keys may take: they are written before they are due.
func writeTime(size int) time.Duration { return time.Second + time.Duration(size)*10*time.Microsecond }

func expire(ctx context.Context, r *harness.Run, s *server) error {
	before, err := s.aloneDuring(ctx, r, 2*aloneFor(r)) // 20,000 puts
	if err != nil {
		return err
	}
	due := time.Now().Add(writeTime(r.Size))
	if err := s.putExpiring(ctx, r.Size, func(int) time.Time { return due }); err != nil {
		return err
	}
	expired, err := s.expired(ctx)
	if err != nil {
		return err
	}
	present, err := s.presentExpiring(ctx, r.Size)
	if err != nil {
		return err
	}
	if left := time.Until(due); left <= 0 {
		return fmt.Errorf("writing %d keys took %v longer than planned", r.Size, -left)
	}
	if err := sleep(ctx, time.Until(due)); err != nil {
		return err
	}
	err = s.against(ctx, r, before, func() (int, error) { return r.Size, s.awaitExpired(ctx, expired+float64(r.Size)) })
	if err != nil {
		return err
	}
	after, err := s.expired(ctx)
	if err != nil {
		return err
	}
	if err := r.Prove("keys expired", after-expired, float64(r.Size), float64(r.Size)); err != nil {
		return err
	}
	left, err := s.presentExpiring(ctx, r.Size)
	if err != nil {
		return err
	}
	return r.Verified(present-left, expiringSamples)
}

// putExpiring puts so many keys, each with its deadline.
func (s *server) putExpiring(ctx context.Context, size int, due func(i int) time.Time) error {
	for from := 0; from < size; from += burstBatch {
		var b client.Batch
		for i := from; i < min(from+burstBatch, size); i++ {
			b.PutExpiring(expiringKey(i), value(i, 1), client.Until(due(i)))
		}
		if _, err := s.client().Write(ctx, &b, client.Async()); err != nil {
			return err
		}
	}
	return nil
}

func (s *server) expired(ctx context.Context) (float64, error) {
	return metric(ctx, s.place.second, "kvserver_expired_keys_total")
}

// awaitExpired asks seldom: an answer takes the server about a millisecond.
func (s *server) awaitExpired(ctx context.Context, want float64) error {
	for {
		got, err := s.expired(ctx)
		if got >= want || err != nil {
			return err
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// presentExpiring counts which of some expiring keys are there.
func (s *server) presentExpiring(ctx context.Context, size int) (n int, err error) {
	for j := range expiringSamples {
		got, err := s.stores[0].get(ctx, expiringKey(j*(size/expiringSamples)))
		if err != nil {
			return n, err
		}
		if got != nil {
			n++
		}
	}
	return n, nil
}
