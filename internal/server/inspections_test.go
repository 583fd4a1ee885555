package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// TestInspectionsWorkOneAtATime: a verification has a value and a record of the log in memory, and it and a walk by prefix compute. What waits for its
// turn keeps its deadline, and ends with its right, which is checked when its turn comes, too.
func TestInspectionsWorkOneAtATime(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		for i := range 40 {
			h.put(t, fmt.Sprintf("key-%d", i), string(make([]byte, 100_000)))
		}
		for i := range 600 {
			h.put(t, fmt.Sprintf("%0200d", i), string(make([]byte, 900)))
		}
		if err := h.store.Checkpoint(testContext(t)); err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct {
			name string
			line *turnLine
			do   func(ctx context.Context, rate uint32) error
		}{
			{"verification", &h.inspections.verifications, func(ctx context.Context, rate uint32) error {
				stream, err := h.admin.Verify(ctx, &pb.VerifyRequest{PagesPerSecond: rate})
				for err == nil {
					_, err = stream.Recv()
				}
				if errors.Is(err, io.EOF) {
					return nil
				}
				return err
			}},
			{"walk by prefix", &h.inspections.walks, func(ctx context.Context, rate uint32) error {
				_, err := h.admin.Space(ctx, &pb.SpaceRequest{ByPrefix: true, PagesPerSecond: rate})
				return err
			}},
		} {
			ctx, cancel := context.WithCancel(testContext(t))
			first, second := make(chan error, 1), make(chan error, 1)
			go func() { first <- c.do(ctx, 1) }()
			eventually(t, c.name+" works", func() bool { return len(h.snapshotList(t)) == 1 })
			late, endLate := context.WithTimeout(testContext(t), 50*time.Millisecond)
			if err := c.do(late, 0); status.Code(err) != codes.DeadlineExceeded {
				t.Errorf("a second %s at once: %v", c.name, err)
			}
			endLate()
			soon, end := context.WithTimeout(testContext(t), 10*time.Second)
			go func() { second <- c.do(soon, 0) }()
			eventually(t, "two wait or work", func() bool { return c.line.waiting() == 2 })
			if n := len(h.snapshotList(t)); n != 1 {
				t.Errorf("%d of kind %s work at once", n, c.name)
			}
			cancel()
			if err := <-first; status.Code(err) != codes.Canceled {
				t.Errorf("the first %s: %v", c.name, err)
			}
			if err := <-second; err != nil {
				t.Errorf("the second %s: %v", c.name, err)
			}
			end()
			eventually(t, "the turn is given back", func() bool { return c.line.waiting() == 0 && len(c.line.turn) == 0 })
		}
	})
}

// TestInspectionsThatWaitEndWhenTheServerStops, and do not hold it up.
func TestInspectionsThatWaitEndWhenTheServerStops(t *testing.T) {
	h := mustStart(t)
	line := &h.inspections.verifications
	line.turn <- struct{}{}
	stream, err := h.admin.Verify(testContext(t), new(pb.VerifyRequest))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "it waits", func() bool { return line.waiting() == 1 })
	began := time.Now()
	if err := h.stop(); err != nil {
		t.Error(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
		t.Error(err)
	}
	if took := time.Since(began); took > h.config.DrainTimeout/2 {
		t.Errorf("the server stopped after %v", took)
	}
}

// TestInspectionsOfClientsTakeTurns: a client with many requests has one of them in the line of the others.
func TestInspectionsOfClientsTakeTurns(t *testing.T) {
	var line turnLine
	line.init(inspectionsMax)
	leave, err := line.enter(t.Context(), "many")
	if err != nil {
		t.Fatal(err)
	}
	order := make(chan string, 20)
	begin := func(client string) {
		before := line.waiting()
		go func() {
			leave, err := line.enter(t.Context(), client)
			if err != nil {
				t.Error(err)
				return
			}
			order <- client
			leave()
		}()
		eventually(t, "it waits", func() bool { return line.waiting() == before+1 })
	}
	for range 9 {
		begin("many")
	}
	begin("one")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, client := range []string{"many", "gone"} {
		if _, err := line.enter(ended, client); !errors.Is(err, context.Canceled) {
			t.Errorf("%s has ended: %v", client, err)
		}
	}
	leave()
	var got []string
	for range 10 {
		got = append(got, <-order)
	}
	if at := slices.Index(got, "one"); at > 1 {
		t.Errorf("a client with one request came at place %d of %q", at, got)
	}
	eventually(t, "nothing is left", func() bool { return line.waiting() == 0 && len(line.turn) == 0 && len(line.clients) == 0 })
}

// waiting is the number of requests that wait or work.
func (l *turnLine) waiting() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, own := range l.clients {
		n += own.requests
	}
	return n
}

// TestInspectionsThatWaitHaveABound, and a client leaves others as many places as it has. What is refused has a reason.
func TestInspectionsThatWaitHaveABound(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		verify := func(admin pb.AdminServiceClient) error {
			stream, err := admin.Verify(testContext(t), new(pb.VerifyRequest))
			for err == nil {
				_, err = stream.Recv()
			}
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		walk := func(admin pb.AdminServiceClient) error {
			_, err := admin.Space(testContext(t), &pb.SpaceRequest{ByPrefix: true})
			return err
		}
		one, other := h.admin, pb.NewAdminServiceClient(h.dialFrom(t, "127.0.0.2"))
		for line, do := range map[*turnLine]func(pb.AdminServiceClient) error{&h.inspections.verifications: verify, &h.inspections.walks: walk} {
			var places []*clientLine
			for {
				own, err := line.join("127.0.0.1/32")
				if err != nil {
					break
				}
				places = append(places, own)
			}
			if len(places) != inspectionsMax/2 {
				t.Errorf("a client has %d places", len(places))
			}
			failureOf(t, do(one)).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
			if err := do(other); err != nil {
				t.Errorf("another client: %v", err)
			}
			for i := len(places); i < inspectionsMax; i++ {
				own, err := line.join(fmt.Sprintf("other %d", i))
				if err != nil {
					t.Fatal(err)
				}
				defer line.quit(fmt.Sprintf("other %d", i), own)
			}
			failureOf(t, do(other)).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
			for _, own := range places {
				line.quit("127.0.0.1/32", own)
			}
			if err := do(one); err != nil {
				t.Errorf("there is room again: %v", err)
			}
		}
	})
}
