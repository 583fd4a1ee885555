package mvcc

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestRecordsOfRequestsTakeTheSpaceOfOneWindow overwrites some keys with ids, for several windows: a record takes at most 70 bytes of
// the data file, and from the second window on the file does not grow.
func TestRecordsOfRequestsTakeTheSpaceOfOneWindow(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	const writes, perWriteMax = 3000, 70
	base := milliseconds(time.Now()) - 60_000
	live := func() uint64 {
		if err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
		st := s.Stats().Storage
		return st.Pages.Live * uint64(st.PageSize)
	}
	window := func(n uint64) {
		for i := range uint64(writes) {
			r := &Request{ID: requestID(base + n*writes + i)}
			if _, err := putOnce(t, x, r, fmt.Sprint("k", i%10), "v"); err != nil {
				t.Fatal(err)
			}
		}
	}
	before := live()
	window(0)
	first := live()
	if grown := first - before; grown > writes*perWriteMax {
		t.Errorf("%d writes with ids take %d bytes, %d for each", writes, grown, grown/writes)
	}
	for n := uint64(1); n < 5; n++ {
		window(n)
		if err := s.advanceCutoff(t.Context(), s.newSession(), base+n*writes); err != nil {
			t.Fatal(err)
		}
		// A merge of everything that began between the cut-off's commit and its sync may not know it, and without a commit there would be no other.
		mustPut(t, s, "other", "v")
		if now := live(); now > first+first/4 {
			t.Errorf("%d bytes after window %d, %d after the first", now, n, first)
		}
	}
}

// TestRecordsFarFromAnyCommitAreDropped lets the records of many leaves expire. The commits that follow are nowhere near most of these leaves.
func TestRecordsFarFromAnyCommitAreDropped(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	const writes = 10_000
	base := milliseconds(time.Now()) - 60_000
	pages := func() uint64 {
		mustPut(t, s, "key", "v")
		if err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
		return s.Stats().Storage.Pages.Live
	}
	before := pages()
	for i := range uint64(writes) {
		if _, err := putOnce(t, x, &Request{ID: requestID(base + i)}, "key", "v"); err != nil {
			t.Fatal(err)
		}
	}
	full := pages()
	if err := s.advanceCutoff(t.Context(), s.newSession(), base+writes); err != nil {
		t.Fatal(err)
	}
	if now := pages(); full < before+40 || now > before+(full-before)/10 {
		t.Errorf("%d pages with the records and %d without, of %d before", full, now, before)
	}
}

// TestWindowThatShrinksUnderRetriesExecutesNothingTwice: records are forgotten after some milliseconds, by time and by bytes, while
// requests are repeated from several sessions, some of them later than that.
func TestWindowThatShrinksUnderRetriesExecutesNothingTwice(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.RequestWindow, o.RequestBytes = 30*time.Millisecond, 8<<10
	s := mustOpen(t, o)
	var sum, expired atomic.Int64
	var all sync.WaitGroup
	begun := time.Now()
	goesOn := func() bool {
		took := time.Since(begun)
		return took < 400*time.Millisecond || took < 30*time.Second && (sum.Load() == 0 || expired.Load() == 0)
	}
	for range 3 {
		x, again := mustSession(t, s), mustSession(t, s)
		all.Go(func() {
			for goesOn() {
				r := newRequest()
				first := increment(x, r, DurabilityAsync)
				time.Sleep(time.Duration(rand.Int64N(int64(rand.N(60*time.Millisecond)) + 1)))
				second := increment(again, r, DurabilityAsync)
				switch gone := new(RequestExpiredError); {
				case first == nil && (second == nil || errors.As(second, &gone)):
					sum.Add(1)
				case errors.As(first, &gone) && errors.As(second, &gone):
				default:
					t.Errorf("first %v, then %v", first, second)
				}
				if second != nil {
					expired.Add(1)
				}
			}
		})
		all.Go(func() {
			for goesOn() {
				_ = s.Checkpoint(context.Background())
				time.Sleep(time.Millisecond)
			}
		})
	}
	all.Wait()
	v, err := mustSession(t, s).Get(nil, []byte("sum"), 0)
	if err != nil || string(v.Data) != strconv.FormatInt(sum.Load(), 10) {
		t.Fatalf("the sum is %s, %d requests were told that they are applied: %v", v.Data, sum.Load(), err)
	}
	if expired.Load() == 0 || sum.Load() == 0 {
		t.Errorf("%d requests expired, %d were applied: this tests nothing", expired.Load(), sum.Load())
	}
}

// TestRecordsOfBeforeAStartCountTowardsTheirBound: after a start the cut-off passes the records that are over the bound in bytes, and
// keeps those within it, although all of them were written before.
func TestRecordsOfBeforeAStartCountTowardsTheirBound(t *testing.T) {
	const records, apart, kept = 200, 20, 50
	fs := vfs.NewMem()
	o := tiny(fs)
	o.RequestWindow = 6 * time.Second // 15 ticks, and room for all
	base := milliseconds(time.Now()) - records*apart
	s := mustOpen(t, o)
	x := mustSession(t, s)
	for i := range uint64(records) {
		if _, err := putOnce(t, x, &Request{ID: requestID(base + i*apart)}, "k", "v"); err != nil {
			t.Fatal(err)
		}
	}
	x.Close()
	mustClose(t, s)
	o.RequestBytes = kept * recordBytesAbout
	s = mustOpen(t, o)
	eventually(t, "the cut-off passes what is over the bound", func() bool { return s.RequestCutoff() >= base })
	step := uint64(o.RequestWindow.Milliseconds()) / 15
	if at, want := s.RequestCutoff(), base+(records-kept)*apart; at+step < want || at > want+2*step {
		t.Errorf("the cut-off is %d ms after the first record, %d are expected", at-base, want-base)
	}
}
