package mvcc

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/testseed"
)

var clockJumps = []time.Duration{time.Hour, -time.Hour, 24 * time.Hour, -24 * time.Hour}

// jumping are options of a store whose wall clock is set by so much from now on.
func jumping() (o Options, by *atomic.Int64) {
	o, by = atLeisure(), new(atomic.Int64)
	o.WallClock = func() time.Time { return time.Now().Add(time.Duration(by.Load())) }
	return o, by
}

// TestJumpOfTheWallClockExpiresNoRequest: the cut-off of request ids follows the clock of the store, which a wall clock that jumps
// moves slowly. So neither repeats of a request expire early nor are new ones refused, and the window ends nevertheless. After a
// restart with the wall clock that has jumped, a request may have expired; it is not executed again.
func TestJumpOfTheWallClockExpiresNoRequest(t *testing.T) {
	for _, jump := range clockJumps {
		t.Run(jump.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o, by := jumping()
				o.RequestWindow = 15 * time.Second
				s := mustOpen(t, o)
				x := mustSession(t, s)
				first := newRequest()
				epoch, err := putOnce(t, x, first, "k", "v")
				if err != nil {
					t.Fatal(err)
				}
				by.Store(int64(jump))
				var last *Request
				for second := range 12 {
					time.Sleep(time.Second)
					last = newRequest()
					if _, err := putOnce(t, x, last, "l", "v"); err != nil {
						t.Fatalf("a new request %d s after the jump: %v", second, err)
					}
					_, err := putOnce(t, x, first, "k", "v")
					if out := applied(t, err); out.Epoch != epoch {
						t.Fatalf("repeated %d s after the jump: epoch %d, want %d", second, out.Epoch, epoch)
					}
				}
				time.Sleep(8 * time.Second)
				mustCheckpoint(t, s) // drops the record
				if _, err := putOnce(t, x, first, "k", "v"); !errors.As(err, new(*RequestExpiredError)) {
					t.Errorf("repeated after the window: %v", err)
				}
				x.Close()
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				s = mustOpen(t, o)
				x = mustSession(t, s)
				defer x.Close()
				for range 5 {
					before := s.Visible()
					_, err := putOnce(t, x, last, "l", "v")
					if !errors.As(err, new(*AppliedError)) && !errors.As(err, new(*RequestExpiredError)) {
						t.Fatalf("repeated after a restart: %v; visible %d and %d", err, before, s.Visible())
					}
					time.Sleep(time.Second)
				}
			})
		})
	}
}

// TestRequestsFromBeforeTheClockWasSetBackAreFound: a store of the oldest feature level has no times of commits, so after a restart
// its clock shows what the wall clock does. The ids of requests in its tree may then be from the future, and are found nevertheless.
func TestRequestsFromBeforeTheClockWasSetBackAreFound(t *testing.T) {
	testseed.SkipUnderRace(t)
	synctest.Test(t, func(t *testing.T) {
		o, by := jumping()
		o.Storage.FeatureLevel = 1
		s := mustOpen(t, o)
		x := mustSession(t, s)
		first := newRequest()
		epoch, err := putOnce(t, x, first, "k", "v")
		if err != nil {
			t.Fatal(err)
		}
		x.Close()
		if err := s.Close(); err != nil { // the record is in the tree
			t.Fatal(err)
		}
		by.Store(-int64(time.Hour))
		s = mustOpen(t, o)
		x = mustSession(t, s)
		defer x.Close()
		for range 13 {
			_, err := putOnce(t, x, first, "k", "again")
			if out := applied(t, err); out.Epoch != epoch {
				t.Fatalf("repeated: epoch %d, want %d", out.Epoch, epoch)
			}
			time.Sleep(5 * time.Minute)
		}
	})
}

// TestClockThatWasSetBackBeforeAStartExpiresNothingEarly: the clock of the store goes on from its newest commit.
func TestClockThatWasSetBackBeforeAStartExpiresNothingEarly(t *testing.T) {
	for _, jump := range clockJumps {
		if jump > 0 {
			continue
		}
		t.Run(jump.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o, by := jumping()
				s := mustOpen(t, o)
				x := mustSession(t, s)
				putWith(t, x, "k", "v", metadata.Fields{ExpiresAt: in(s, time.Minute)})
				newest := s.Clock().Now()
				x.Close()
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				by.Store(int64(jump))
				time.Sleep(10 * time.Second)
				s = mustOpen(t, o)
				if now := s.Clock().Now(); now < newest {
					t.Fatalf("the clock went back by %d µs", newest-now)
				}
				time.Sleep(59 * time.Second) // at nine tenths of its speed
				if get(t, s, "k", 0) != "v" {
					t.Error("expired early")
				}
				time.Sleep(10 * time.Second)
				if get(t, s, "k", 0) != "-" {
					t.Error("not expired")
				}
			})
		})
	}
}
