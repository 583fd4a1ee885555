package client

import (
	"context"
	"errors"
	"io"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// fakeLeases is a LeaseService that notes when each lease was kept alive.
type fakeLeases struct {
	kvpb.LeaseServiceClient

	mu       sync.Mutex
	kept     map[uint64][]time.Time
	messages int
	away     bool // keep-alives fail
	silent   bool // they are not answered
	latency  time.Duration
	answers  int // beyond so many leases, their answer is refused: the server is overloaded; 0: it is not
	ended    map[uint64]bool
	revoked  int
}

func newFakeLeases() (*fakeLeases, *Client) {
	f := &fakeLeases{kept: map[uint64][]time.Time{}, ended: map[uint64]bool{}}
	return f, &Client{leases: f}
}

func (f *fakeLeases) set(change func(*fakeLeases)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

func (f *fakeLeases) GrantLease(_ context.Context, r *kvpb.GrantLeaseRequest, _ ...grpc.CallOption) (*kvpb.GrantLeaseResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.kept[r.GetId()] = []time.Time{time.Now()}
	return &kvpb.GrantLeaseResponse{Id: r.GetId(), Ttl: r.GetTtl()}, nil
}

func (f *fakeLeases) RevokeLease(context.Context, *kvpb.RevokeLeaseRequest, ...grpc.CallOption) (*kvpb.RevokeLeaseResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.revoked++
	return nil, nil
}

func (f *fakeLeases) KeepAlive(ctx context.Context, _ ...grpc.CallOption) (grpc.BidiStreamingClient[kvpb.KeepAliveRequest, kvpb.KeepAliveResponse], error) {
	return &fakeKeepAlives{leases: f, ctx: ctx}, nil
}

// longestGap is the longest time in which a lease was not kept alive, so far.
func (f *fakeLeases) longestGap(l *Lease) (longest time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	times := append(f.kept[l.ID()], time.Now())
	for i := range times[1:] {
		longest = max(longest, times[i+1].Sub(times[i]))
	}
	return longest
}

type fakeKeepAlives struct {
	grpc.ClientStream
	leases  *fakeLeases
	ctx     context.Context
	ids     []uint64
	refused bool // the stream has ended
}

func (s *fakeKeepAlives) Send(r *kvpb.KeepAliveRequest) error {
	s.ids = r.GetIds()
	return nil
}

func (s *fakeKeepAlives) CloseSend() error {
	s.ids = nil
	return nil
}

func (s *fakeKeepAlives) Recv() (*kvpb.KeepAliveResponse, error) {
	f := s.leases
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case s.ids == nil:
		return nil, io.EOF
	case f.away:
		return nil, status.Error(codes.Unavailable, "away")
	case f.latency > 0:
		f.mu.Unlock()
		select {
		case <-time.After(f.latency):
		case <-s.ctx.Done():
		}
		f.mu.Lock()
		if s.ctx.Err() != nil {
			return nil, status.FromContextError(s.ctx.Err()).Err()
		}
	case f.silent:
		f.mu.Unlock()
		<-s.ctx.Done()
		f.mu.Lock()
		return nil, status.FromContextError(s.ctx.Err()).Err()
	}
	if s.refused {
		return nil, io.EOF
	}
	f.messages++
	out := new(kvpb.KeepAliveResponse)
	for _, id := range s.ids {
		left := testTTL
		if f.ended[id] {
			left = 0
		}
		f.kept[id] = append(f.kept[id], time.Now())
		out.Leases = append(out.Leases, &kvpb.LeaseAlive{Id: id, TtlMs: uint64(left.Milliseconds())})
	}
	if s.refused = f.answers > 0 && len(s.ids) > f.answers; s.refused { // the leases were kept alive
		return nil, refusal(codes.ResourceExhausted, kvpb.ErrorReason_ERROR_REASON_OVERLOADED)
	}
	return out, nil
}

// refusal is the error of a server that has not executed a request.
func refusal(code codes.Code, reason kvpb.ErrorReason) error {
	st, err := status.New(code, "refused").WithDetails(&errdetails.ErrorInfo{Domain: kvpb.ErrorDomain, Reason: reason.Reason()})
	if err != nil {
		panic(err)
	}
	return st.Err()
}

const testTTL = 30 * time.Second

func mustGrant(t *testing.T, c *Client, ttl time.Duration) *Lease {
	t.Helper()
	l, err := c.GrantLease(t.Context(), ttl, "test")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// isLost waits until no goroutine has anything left to do at this moment.
func isLost(l *Lease) bool {
	synctest.Wait()
	select {
	case <-l.Lost():
		return true
	default:
		return false
	}
}

// endKeepers closes leases. The test fails if a goroutine is left.
func endKeepers(t *testing.T, c *Client, all ...*Lease) {
	t.Helper()
	for _, l := range all {
		if err := l.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	synctest.Wait()
	if n := len(c.keepers.all); n != 0 {
		t.Errorf("%d keepers are left", n)
	}
}

// TestLeasesShareTheirKeepAlives: each of many leases is kept alive in time, with few messages.
func TestLeasesShareTheirKeepAlives(t *testing.T) {
	for name, test := range map[string]struct {
		leases, messages int // in ten times the time to live
		pause            time.Duration
	}{
		"granted within a third of the time to live": {leases: 500, pause: testTTL / 3 / 500, messages: 150},
		"granted at once": {leases: keepAliveIDsMax + 1, messages: 100},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f, c := newFakeLeases()
				var all []*Lease
				for range test.leases {
					all = append(all, mustGrant(t, c, testTTL))
					time.Sleep(test.pause)
				}
				time.Sleep(10 * testTTL)
				synctest.Wait()
				for _, l := range all {
					if gap := f.longestGap(l); gap > testTTL/3 {
						t.Fatalf("lease %d was not kept alive for %v", l.ID(), gap)
					}
				}
				if f.messages < 30 || f.messages > test.messages {
					t.Errorf("%d messages for %d leases", f.messages, len(all))
				}
				endKeepers(t, c, all...)
				if f.revoked != len(all) {
					t.Errorf("%d of %d leases were revoked", f.revoked, len(all))
				}
			})
		})
	}
}

// TestLeaseIsLostAtItsDeadlineAndNotBefore: whatever the server does instead of answering.
func TestLeaseIsLostAtItsDeadlineAndNotBefore(t *testing.T) {
	for name, fail := range map[string]func(*fakeLeases){
		"away":   func(f *fakeLeases) { f.away = true },
		"silent": func(f *fakeLeases) { f.silent = true },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f, c := newFakeLeases()
				l := mustGrant(t, c, testTTL)
				time.Sleep(testTTL/3 + time.Millisecond) // kept alive once, just now
				f.set(fail)
				time.Sleep(testTTL - 2*time.Millisecond)
				if isLost(l) {
					t.Fatal("lost before its time to live has passed since it was kept alive")
				}
				time.Sleep(time.Millisecond)
				if !isLost(l) {
					t.Fatal("not lost")
				}
				endKeepers(t, c, l)
			})
		})
	}
}

// TestLeaseSurvivesAServerThatIsAwayForAWhile: the keep-alive is repeated soon after a failure.
func TestLeaseSurvivesAServerThatIsAwayForAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, c := newFakeLeases()
		l := mustGrant(t, c, testTTL)
		f.set(func(f *fakeLeases) { f.away = true })
		time.Sleep(testTTL - 200*time.Millisecond)
		f.set(func(f *fakeLeases) { f.away = false })
		time.Sleep(time.Hour)
		if isLost(l) {
			t.Fatal("lost")
		}
		endKeepers(t, c, l)
	})
}

// TestRoundThatHangsHoldsUpNoOtherLease, nor does a lease that has ended.
func TestRoundThatHangsHoldsUpNoOtherLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, c := newFakeLeases()
		hung := mustGrant(t, c, testTTL)
		time.Sleep(testTTL / 5)
		other, ended, short := mustGrant(t, c, testTTL), mustGrant(t, c, testTTL), mustGrant(t, c, testTTL/10)
		f.set(func(f *fakeLeases) { f.silent = true })
		time.Sleep(testTTL/3 - testTTL/5 + time.Millisecond) // the first round hangs
		f.set(func(f *fakeLeases) { f.silent, f.ended[ended.ID()] = false, true })
		time.Sleep(testTTL)
		if !isLost(hung) || isLost(other) || !isLost(ended) || !isLost(short) {
			t.Errorf("lost: the one that hangs %v, another %v, one that has ended %v, a short one %v", isLost(hung), isLost(other), isLost(ended), isLost(short))
		}
		if gap := f.longestGap(other); gap > testTTL/3 {
			t.Errorf("another lease was not kept alive for %v", gap)
		}
		endKeepers(t, c, hung, other, ended, short)
	})
}

// TestLeasesOutliveAnOverloadedServer: it keeps the leases of a message alive and refuses the answer if that is not small, for longer than
// the time to live. All leases are kept alive, those at the end as well, and none is lost.
func TestLeasesOutliveAnOverloadedServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, c := newFakeLeases()
		var all []*Lease
		for range 2*keepAliveIDsMax + 1 {
			all = append(all, mustGrant(t, c, testTTL))
		}
		f.set(func(f *fakeLeases) { f.answers = keepAliveIDsSmall })
		time.Sleep(3 * testTTL)
		synctest.Wait()
		for i, l := range all {
			if gap := f.longestGap(l); isLost(l) || gap > testTTL/3+time.Second {
				t.Fatalf("lease %d of %d: lost %v, not kept alive for %v", i, len(all), isLost(l), gap)
			}
		}
		endKeepers(t, c, all...)
	})
}

// TestSmallKeepAlivesHaveSmallAnswers: of less than 4 KiB, which servers do not count, whatever the ids and times are.
func TestSmallKeepAlivesHaveSmallAnswers(t *testing.T) {
	const ttlMax = 10 * 365 * 24 * time.Hour
	out := new(kvpb.KeepAliveResponse)
	for range keepAliveIDsSmall {
		out.Leases = append(out.Leases, &kvpb.LeaseAlive{Id: 1<<63 - 1, TtlMs: uint64(ttlMax.Milliseconds())})
	}
	if n := out.SizeVT(); n >= 4<<10 {
		t.Errorf("%d bytes", n)
	}
}

// TestLeasesAreKeptAliveAfterALongOutage: when the server is back, some leases end before an answer can come. The others do not wait for
// them.
func TestLeasesAreKeptAliveAfterALongOutage(t *testing.T) {
	const every, latency = 20 * time.Millisecond, 50 * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		f, c := newFakeLeases()
		f.set(func(f *fakeLeases) { f.away, f.latency = true, latency })
		began := time.Now()
		var all []*Lease
		for range 300 { // none of them is kept alive before the outage
			all = append(all, mustGrant(t, c, testTTL))
			time.Sleep(every)
		}
		back := testTTL + time.Second + every/2
		time.Sleep(time.Until(began.Add(back)))
		f.set(func(f *fakeLeases) { f.away = false })
		time.Sleep(testTTL)
		lost, late := 0, time.Duration(0)
		for i, l := range all {
			if isLost(l) {
				lost++
				late = max(late, testTTL+time.Duration(i)*every-back)
			}
		}
		if lost < 50 || late > keepAliveRetry+2*latency {
			t.Errorf("%d of %d leases are lost, up to one that had lived for %v when the server was back", lost, len(all), late)
		}
		endKeepers(t, c, all...)
	})
}

// TestClosedLeaseIsNotKeptAlive, also if it is closed while a keep-alive is under way; and it does not count as lost.
func TestClosedLeaseIsNotKeptAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, c := newFakeLeases()
		early, late, other := mustGrant(t, c, testTTL), mustGrant(t, c, testTTL), mustGrant(t, c, testTTL)
		if err := early.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		f.set(func(f *fakeLeases) { f.silent = true })
		time.Sleep(testTTL/3 + time.Second) // the round waits
		if err := late.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		f.set(func(f *fakeLeases) { f.silent = false })
		time.Sleep(time.Hour)
		if n := len(f.kept[early.ID()]) + len(f.kept[late.ID()]); n != 2 || isLost(early) || isLost(late) {
			t.Errorf("%d grants and keep-alives of two leases that are closed; lost: %v, %v", n, isLost(early), isLost(late))
		}
		endKeepers(t, c, other)
	})
}

// TestCloseEndsWhatTheClientDoesInTheBackground: keepers with leases that are due and leases in a round, whose leases are lost, and
// undos that the server refuses for ever. The test fails if a goroutine is left.
func TestCloseEndsWhatTheClientDoesInTheBackground(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := Dial("localhost:1")
		if err != nil {
			t.Fatal(err)
		}
		f, _ := newFakeLeases()
		ctx, cancel := context.WithCancel(t.Context())
		locks := &lostAnswers{refused: 1 << 30, cancel: cancel}
		c.leases, c.locks = f, locks
		f.set(func(f *fakeLeases) { f.silent = true })
		leases := []*Lease{mustGrant(t, c, time.Hour), mustGrant(t, c, 10*time.Second), mustGrant(t, c, 10*time.Second)}
		time.Sleep(4 * time.Second) // two are in a round
		if _, err := c.Lock(ctx, []byte("name"), &Lease{client: c, id: 7, lost: make(chan struct{}), closed: make(chan struct{})}, nil); err == nil {
			t.Fatal("the lock was acquired")
		}
		began := time.Now()
		if err := c.Close(); err != nil || time.Since(began) > 0 {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		late := &Lease{client: c, ttl: time.Hour, until: time.Now().Add(time.Hour), lost: make(chan struct{}), closed: make(chan struct{})}
		c.keepers.keep(late) // of a call that Close overtook
		for i, l := range append(leases, late) {
			if !isLost(l) {
				t.Errorf("lease %d is not lost", i)
			}
		}
	})
}

// TestCloseWaitsForABoundedTime for what does not end.
func TestCloseWaitsForABoundedTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := Dial("localhost:1")
		if err != nil {
			t.Fatal(err)
		}
		release, began := make(chan struct{}), time.Now()
		c.background.run(func(context.Context) { <-release })
		if err := c.Close(); !errors.Is(err, errStillRunning) || time.Since(began) != closeWait {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		close(release)
	})
}
