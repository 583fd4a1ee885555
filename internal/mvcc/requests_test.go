package mvcc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// requestID makes an id of a time, in milliseconds since 1970.
func requestID(at uint64) (id RequestID) {
	binary.BigEndian.PutUint64(id[:], at<<16)
	binary.BigEndian.PutUint64(id[8:], rand.Uint64())
	id[6], id[7] = 0x70|byte(rand.Uint32()&15), byte(rand.Uint32())
	id[8] = id[8]&0x3f | 0x80
	return id
}

func milliseconds(t time.Time) uint64 { return uint64(t.UnixMilli()) }

func newRequest() *Request {
	return &Request{ID: requestID(milliseconds(time.Now())), Hash: 7, Method: 3}
}

// putOnce commits one key as a request.
func putOnce(t *testing.T, x *Session, r *Request, key, value string) (keys.Epoch, error) {
	t.Helper()
	w := &Write{Durability: DurabilityAsync}
	w.Identify(r)
	w.Set([]byte(key), []byte(value))
	epoch, err := x.Commit(t.Context(), w)
	if err == nil {
		err = x.store.Wait(t.Context(), epoch, DurabilityAsync)
	}
	return epoch, err
}

func applied(t *testing.T, err error) Outcome {
	t.Helper()
	e := new(AppliedError)
	if !errors.As(err, &e) {
		t.Fatalf("%v, want an outcome of before", err)
	}
	return e.Outcome
}

func TestRequestIsAppliedOnce(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	r := newRequest()
	epoch, err := putOnce(t, x, r, "k", "1")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := putOnce(t, x, newRequest(), "k", "2"); err != nil {
		t.Fatal(err)
	}
	_, err = putOnce(t, x, r, "k", "1")
	if out := applied(t, err); out.Epoch != epoch || out.State != OutcomeApplied || out.Method != 3 {
		t.Fatalf("%+v, want epoch %d", out, epoch)
	}
	if v, err := x.Get(nil, []byte("k"), 0); err != nil || string(v.Data) != "2" {
		t.Fatalf("%q, %v: the second attempt was applied", v.Data, err)
	}
	other := *r
	other.Hash++
	if _, err := putOnce(t, x, &other, "k", "3"); !errors.Is(err, ErrRequestReused) {
		t.Fatalf("another request with the id: %v", err)
	}
	other = *r
	other.Identity++
	if _, err := putOnce(t, x, &other, "k", "3"); !errors.Is(err, ErrRequestReused) {
		t.Fatalf("another user with the id: %v", err)
	}
}

// TestRefusedRequestsLeaveNoRecord: a refusal executes nothing, so a later attempt may.
func TestRefusedRequestsLeaveNoRecord(t *testing.T) {
	x := mustSession(t, mustOpen(t, tiny(vfs.NewMem())))
	r := newRequest()
	w := &Write{Conditions: []Condition{{Kind: KeyPresent, Key: []byte("other")}}}
	w.Identify(r)
	w.Set([]byte("k"), nil)
	if _, err := x.Commit(t.Context(), w); !errors.As(err, new(*PreconditionError)) {
		t.Fatal(err)
	}
	if out, err := x.Outcome(t.Context(), r); err != nil || out.State != OutcomeNotApplied {
		t.Fatalf("%+v, %v", out, err)
	}
	if _, err := putOnce(t, x, newRequest(), "other", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := x.Commit(t.Context(), w); err != nil {
		t.Fatalf("the attempt after the refusal: %v", err)
	}
}

// TestAnotherAttemptDoesNotHideBehindARefusal: every kind of request whose conditions are false because it was applied itself
// is told that it was applied.
func TestAnotherAttemptDoesNotHideBehindARefusal(t *testing.T) {
	key := []byte("k")
	for name, attempt := range map[string]func(x *Session, r *Request) error{
		"put if absent": func(x *Session, r *Request) error {
			w := &Write{Conditions: []Condition{{Kind: KeyAbsent, Key: key}}}
			w.Identify(r)
			w.Set(key, []byte("1"))
			_, err := x.Commit(context.Background(), w)
			return err
		},
		"invoke": func(x *Session, r *Request) error {
			op := []Invoke{{Kind: InvokeAdd, Key: key, Delta: 1, Bounded: true, Min: 0, Max: 1}}
			_, err := x.InvokeRequest(context.Background(), r, op, nil, DurabilityAsync, make([]Invoked, 1))
			return err
		},
		"compare and set that does not hold": func(x *Session, r *Request) error {
			op := []Invoke{{Kind: InvokePutIfAbsent, Key: key, Operand: []byte("1")}}
			_, err := x.InvokeRequest(context.Background(), r, op, nil, DurabilityAsync, make([]Invoked, 1))
			return err
		},
		"execute": func(x *Session, r *Request) error {
			w := &Write{Conditions: []Condition{{Kind: KeyAbsent, Key: key}}}
			w.Identify(r)
			out, err := x.Execute(context.Background(), &Execution{
				Write: w,
				Operate: func(_ context.Context, tx *Txn, holds bool) error {
					if !holds {
						return errors.New("does not hold")
					}
					return tx.Set(key, []byte("1"))
				},
			})
			if err == nil && !out.Holds {
				return errors.New("it did not hold")
			}
			return err
		},
		"execute that writes nothing the second time": func(x *Session, r *Request) error {
			w := &Write{Conditions: []Condition{{Kind: KeyAbsent, Key: key}}}
			w.Identify(r)
			_, err := x.Execute(context.Background(), &Execution{
				Write: w,
				Operate: func(_ context.Context, tx *Txn, holds bool) error {
					if !holds {
						return nil
					}
					return tx.Set(key, []byte("1"))
				},
			})
			return err
		},
		"transaction": func(x *Session, r *Request) error {
			tx, err := x.Begin(TxnOptions{})
			if err != nil {
				return err
			}
			if v, err := tx.Get(nil, key); err == nil && !v.Found {
				_ = tx.Set(key, []byte("1"))
			}
			_, err = tx.CommitRequest(context.Background(), r)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			x := mustSession(t, mustOpen(t, tiny(vfs.NewMem())))
			r := newRequest()
			if err := attempt(x, r); err != nil {
				t.Fatal(err)
			}
			r.Result = nil
			applied(t, attempt(x, r))
			if v, err := x.Get(nil, key, 0); err != nil || string(v.Data) != "1" {
				t.Fatalf("%q, %v", v.Data, err)
			}
		})
	}
}

func TestRepeatedRangeDeletionTellsWhatTheFirstDid(t *testing.T) {
	x := mustSession(t, mustOpen(t, tiny(vfs.NewMem())))
	for i := range 5 {
		if _, err := putOnce(t, x, newRequest(), fmt.Sprint("k", i), "v"); err != nil {
			t.Fatal(err)
		}
	}
	o := RangeDelete{Lower: []byte("k"), Upper: []byte("l"), Request: newRequest(), Result: func(d RangeDeleted) []byte {
		return strconv.AppendInt(nil, int64(d.Count), 10)
	}}
	if out, err := x.DeleteRange(t.Context(), o); err != nil || out.Count != 5 {
		t.Fatalf("%+v, %v", out, err)
	}
	_, err := x.DeleteRange(t.Context(), o)
	if out := applied(t, err); string(out.Result) != "5" {
		t.Fatalf("result %q", out.Result)
	}
}

func TestLongResultsAreDropped(t *testing.T) {
	x := mustSession(t, mustOpen(t, tiny(vfs.NewMem())))
	for length, want := range map[int]OutcomeState{resultBytesMax: OutcomeApplied, resultBytesMax + 1: OutcomeResultDropped} {
		r := newRequest()
		r.Result = func() []byte { return make([]byte, length) }
		epoch, err := putOnce(t, x, r, "k", "v")
		if err != nil {
			t.Fatal(err)
		}
		out, err := x.Outcome(t.Context(), r)
		if err != nil || out.State != want || out.Epoch != epoch || want == OutcomeApplied && len(out.Result) != length {
			t.Fatalf("a result of %d bytes: %v with %d, %v", length, out.State, len(out.Result), err)
		}
	}
}

func TestFencedRequestIsNeverApplied(t *testing.T) {
	x := mustSession(t, mustOpen(t, tiny(vfs.NewMem())))
	r := newRequest()
	out, epoch, err := x.Fence(t.Context(), r, DurabilitySync)
	if err != nil || out.State != OutcomeCancelled || epoch == 0 {
		t.Fatalf("%+v, %d, %v", out, epoch, err)
	}
	r.Hash++ // a fence does not know what the request asks for
	if _, err := putOnce(t, x, r, "k", "v"); !errors.Is(err, ErrRequestCancelled) {
		t.Fatalf("a late attempt: %v", err)
	}
	if again, epoch, err := x.Fence(t.Context(), r, DurabilitySync); err != nil || again.State != OutcomeCancelled || epoch != 0 {
		t.Fatalf("the second fence: %+v, %d, %v", again, epoch, err)
	}
	done := newRequest()
	if _, err := putOnce(t, x, done, "k", "v"); err != nil {
		t.Fatal(err)
	}
	if out, _, err := x.Fence(t.Context(), done, DurabilitySync); err != nil || out.State != OutcomeApplied {
		t.Fatalf("the fence of an applied request: %+v, %v", out, err)
	}
}

// TestAttemptsAtOnceAreAppliedOnce sends each increment from several sessions at once, beside fences of some, and compares the
// sum with the outcomes that were told.
func TestAttemptsAtOnceAreAppliedOnce(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	const attempts, rounds = 4, 150
	told := make([]int, rounds) // how many attempts were told that the request is applied
	var mu sync.Mutex
	var all sync.WaitGroup
	requests := make([]*Request, rounds)
	for i := range requests {
		requests[i] = newRequest()
	}
	for a := range attempts {
		x := mustSession(t, s)
		all.Go(func() {
			for i, r := range requests {
				mine := *r
				op := []Invoke{{Kind: InvokeAdd, Key: []byte("sum"), Delta: 1}}
				if a == 0 && i%7 == 0 {
					if _, _, err := x.Fence(context.Background(), &mine, DurabilityAsync); err != nil {
						t.Error(err)
					}
					continue
				}
				_, err := x.InvokeRequest(context.Background(), &mine, op, nil, DurabilityAsync, make([]Invoked, 1))
				switch {
				case err == nil || errors.As(err, new(*AppliedError)):
					mu.Lock()
					told[i]++
					mu.Unlock()
				case !errors.Is(err, ErrRequestCancelled):
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	sum := 0
	for i, n := range told {
		if n > 0 {
			sum++
		}
		if n != 0 && n != attempts && i%7 != 0 {
			t.Errorf("request %d: %d of %d attempts were told that it is applied", i, n, attempts)
		}
	}
	v, err := mustSession(t, s).Get(nil, []byte("sum"), 0)
	if err != nil || string(v.Data) != strconv.Itoa(sum) {
		t.Fatalf("the sum is %s, the outcomes say %d", v.Data, sum)
	}
}

// TestIdsAtOrBelowTheCutoffAreRefused: an id that may have been forgotten is neither executed nor called not applied, before and
// after its record is merged away, and after a start.
func TestIdsAtOrBelowTheCutoffAreRefused(t *testing.T) {
	o := tiny(vfs.NewMem())
	s := mustOpen(t, o)
	x := mustSession(t, s)
	base := milliseconds(time.Now())
	var old, young []*Request
	for i := range 2000 {
		r := newRequest()
		r.ID = requestID(base - 1000 + uint64(i%2000))
		if r.ID.Time() <= base {
			old = append(old, r)
		} else {
			young = append(young, r)
		}
		if _, err := putOnce(t, x, r, fmt.Sprint("k", i), "v"); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := s.Stats().Storage.Tree.Entries
	if err := s.advanceCutoff(t.Context(), s.newSession(), base); err != nil {
		t.Fatal(err)
	}
	check := func(when string, known bool) {
		t.Helper()
		for i, r := range append(old[:20:20], young[:20]...) {
			want := OutcomeApplied
			if i < 20 && !known {
				want = OutcomeExpired
			}
			if out, err := x.Outcome(t.Context(), r); err != nil || out.State != want {
				t.Fatalf("%s: request %d is %v, %v; want %v", when, i, out.State, err, want)
			}
		}
		fresh := newRequest()
		fresh.ID = requestID(base)
		if _, err := putOnce(t, x, fresh, "new", "v"); !errors.As(err, new(*RequestExpiredError)) {
			t.Fatalf("%s: an id at the cut-off: %v", when, err)
		}
		fresh.ID = requestID(base + 1)
		if _, err := putOnce(t, x, fresh, "new", "v"); err != nil {
			t.Fatalf("%s: an id after the cut-off: %v", when, err)
		}
	}
	check("before the merge", true)
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	check("after the merge", false)
	if after := s.Stats().Storage.Tree.Entries; after > before-uint64(len(old))+10 {
		t.Fatalf("%d entries, %d before the cut-off passed %d records", after, before, len(old))
	}
	mustClose(t, s)
	s = mustOpen(t, o)
	x = mustSession(t, s)
	check("after a start", false)
}

// TestCutoffThatACrashTakesBackDropsNothing: the cut-off is installed, and is not durable when a merge begins. After a crash it is
// not there, so all records must be.
func TestCutoffThatACrashTakesBackDropsNothing(t *testing.T) {
	fs := vfs.NewMem()
	s := mustOpen(t, tiny(fs))
	x := mustSession(t, s)
	requests := make([]*Request, 50)
	for i := range requests {
		requests[i] = newRequest()
		if _, err := putOnce(t, x, requests[i], fmt.Sprint("k", i), "v"); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.requests.cutoff.Store(milliseconds(time.Now())) // as advanceCutoff does before it waits
	if _, err := putOnce(t, x, &Request{ID: requestID(milliseconds(time.Now().Add(time.Minute)))}, "k", "v"); err != nil {
		t.Fatal(err)
	}
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	s = mustOpen(t, tiny(fs.Crash(1, vfs.SurviveSome)))
	x = mustSession(t, s)
	for i, r := range requests {
		if out, err := x.Outcome(t.Context(), r); err != nil || out.State != OutcomeApplied {
			t.Fatalf("request %d is %v, %v", i, out.State, err)
		}
	}
}

func TestCutoffFollowsWindowAndBytes(t *testing.T) {
	var r requestWindow
	minute := uint64(time.Minute.Milliseconds())
	at := 1000 * minute
	step := func(bytes uint64) uint64 {
		at += minute
		r.bytes.Add(bytes)
		to := r.next(at, 15*time.Minute, 1000)
		if to != 0 {
			r.cutoff.Store(to)
		}
		return to
	}
	for range 5 {
		if to := step(0); to != 0 {
			t.Fatalf("without records the cut-off moves to %d", to)
		}
	}
	if to := step(100); to != at-15*minute {
		t.Fatalf("cut-off %d, want %d", to, at-15*minute)
	}
	step(900) // 1000 bytes in the window
	if to := step(400); to <= at-15*minute || to > at {
		t.Fatalf("1400 bytes of 1000: cut-off %d minutes back", (at-to)/minute)
	}
	last := uint64(0)
	for range 40 {
		if to := step(0); to != 0 {
			if to < last {
				t.Fatal("the cut-off goes back")
			}
			last = to
		}
	}
	if to := step(0); to != 0 {
		t.Fatal("the cut-off still moves long after the last record")
	}
	if len(r.samples) > 20 {
		t.Fatalf("%d samples", len(r.samples))
	}
}

// TestCutoffPassesRecordsOfFastClocksAfterAStart: ids may be ahead of the server's clock, so a start that finds records does not know
// their times. The cut-off moves until it has passed all that there may be.
func TestCutoffPassesRecordsOfFastClocksAfterAStart(t *testing.T) {
	o := tiny(vfs.NewMem())
	s := mustOpen(t, o)
	ahead := &Request{ID: requestID(milliseconds(time.Now().Add(RequestAheadMax)))}
	if _, err := putOnce(t, mustSession(t, s), ahead, "k", "v"); err != nil {
		t.Fatal(err)
	}
	mustClose(t, s)
	s = mustOpen(t, o)
	var window requestWindow
	if err := window.open(s.newSession()); err != nil {
		t.Fatal(err)
	}
	later := ahead.ID.Time() + uint64(time.Hour.Milliseconds())
	window.cutoff.Store(ahead.ID.Time() - 1)
	if to := window.next(later, time.Minute, 1<<20); to < ahead.ID.Time() {
		t.Fatalf("the cut-off stays %d ms before a record", ahead.ID.Time()-window.cutoff.Load())
	}
}

func TestRequestIDsAreUUIDsOfVersion7(t *testing.T) {
	id := requestID(123456789)
	if got, err := ToRequestID(id[:]); err != nil || got.Time() != 123456789 {
		t.Fatalf("%v, %v", got.Time(), err)
	}
	for _, bad := range [][]byte{nil, id[:15], append(id[:], 0), make([]byte, 16)} {
		if _, err := ToRequestID(bad); !errors.Is(err, ErrRequestID) {
			t.Errorf("%x: %v", bad, err)
		}
	}
}

// TestSumOfRepeatedIncrementsIsExact increments one key again and again as requests, cuts the power at random operations of the
// file system, and repeats after each start what was not answered, and some of what was. The sum is what was told.
func TestSumOfRepeatedIncrementsIsExact(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	fs := vfs.NewMem()
	var told, unknown []*Request
	for range 25 {
		fs.CrashAt(fs.Mutations() + 40 + rng.Int64N(400))
		s, err := Open(tiny(fs))
		if err == nil {
			told, unknown = incrementUntilCrash(t, s, rng, told, unknown)
			_ = s.Close() // the crash ends it
		}
		fs = fs.Crash(rng.Uint64(), vfs.SurviveSome)
	}
	s := mustOpen(t, tiny(fs))
	x := mustSession(t, s)
	for _, r := range unknown {
		if err := increment(x, r, DurabilitySync); err != nil {
			t.Fatal(err)
		}
		told = append(told, r)
	}
	v, err := x.Get(nil, []byte("sum"), 0)
	if err != nil || string(v.Data) != strconv.Itoa(len(told)) {
		t.Fatalf("the sum is %s after %d requests, %v", v.Data, len(told), err)
	}
}

// incrementUntilCrash begins with the requests whose outcome is unknown.
func incrementUntilCrash(t *testing.T, s *Store, rng *rand.Rand, told, unknown []*Request) (t2, u2 []*Request) {
	x := s.newSession()
	for i := 0; ; i++ {
		var r *Request
		switch {
		case len(unknown) > 0:
			r, unknown = unknown[0], unknown[1:]
		case len(told) > 0 && rng.IntN(5) == 0:
			if err := increment(x, told[rng.IntN(len(told))], DurabilitySync); err != nil {
				return told, unknown
			}
			continue
		default:
			r = newRequest()
		}
		if err := increment(x, r, DurabilitySync); err != nil {
			if errors.Is(err, ErrRequestReused) || errors.As(err, new(*RequestExpiredError)) {
				t.Error(err)
			}
			return told, append(unknown, r)
		}
		if told = append(told, r); i%20 == 19 {
			_ = s.Checkpoint(context.Background()) // a crash shows at the next increment
		}
	}
}

func increment(x *Session, r *Request, d Durability) error {
	op := []Invoke{{Kind: InvokeAdd, Key: []byte("sum"), Delta: 1}}
	epoch, err := x.InvokeRequest(context.Background(), r, op, nil, d, make([]Invoked, 1))
	if e := new(AppliedError); errors.As(err, &e) {
		epoch, err = e.Outcome.Epoch, nil
	}
	if err != nil {
		return err
	}
	return x.store.Wait(context.Background(), epoch, d)
}

// TestDamagedCutoffRefusesWhatMayBeForgotten: a store whose cut-off cannot be read is opened, and executes no request that it may have
// forgotten.
func TestDamagedCutoffRefusesWhatMayBeForgotten(t *testing.T) {
	fs := vfs.NewMem()
	s, err := Open(tiny(fs))
	if err != nil {
		t.Fatal(err)
	}
	x := s.newSession()
	before := newRequest()
	if _, err := putOnce(t, x, before, "k", "v"); err != nil {
		t.Fatal(err)
	}
	if err := s.advanceCutoff(t.Context(), s.newSession(), before.ID.Time()); err != nil {
		t.Fatal(err)
	}
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	damageTree(t, fs)
	if s, err = Open(tiny(fs)); err != nil {
		t.Fatalf("a damaged page keeps the store from being opened: %v", err)
	}
	defer func() { _ = s.Close() }()
	if cutoff := s.RequestCutoff(); cutoff < before.ID.Time() {
		t.Fatalf("the cut-off is %d, before %d", cutoff, before.ID.Time())
	}
	if _, err := putOnce(t, s.newSession(), before, "k", "again"); err == nil {
		t.Fatal("a request that was forgotten was executed again")
	}
}

// damageTree flips a bit in every leaf of the data file.
func damageTree(t *testing.T, fs *vfs.Mem) {
	t.Helper()
	f, err := fs.Open("db/data.ekv", vfs.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	size, err := fs.Size("db/data.ekv")
	if err != nil {
		t.Fatal(err)
	}
	const page = 8192
	for at := int64(0); at+page <= size; at += page {
		b := make([]byte, page)
		if _, err := f.ReadAt(b, at); err != nil {
			t.Fatal(err)
		}
		if leaf := b[4] == 1; leaf {
			b[page-1] ^= 1
			if _, err := f.WriteAt(b, at); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestFreshRequestsReadNoPage: a damaged page among the records of old requests does not refuse new ones, whose ids are later than
// all in the tree.
func TestFreshRequestsReadNoPage(t *testing.T) {
	fs := vfs.NewMem()
	s, err := Open(tiny(fs))
	if err != nil {
		t.Fatal(err)
	}
	old := newRequest()
	if _, err := putOnce(t, s.newSession(), old, "k", "v"); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Checkpoint(t.Context()), s.Close()); err != nil {
		t.Fatal(err)
	}
	damageTree(t, fs)
	if s, err = Open(tiny(fs)); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	x := s.newSession()
	fresh := newRequest()
	if _, err := putOnce(t, x, fresh, "k", "v"); err == nil {
		t.Fatal("after a start, a clock that was fast before it may have made this id: it must be looked up")
	}
	s.requests.inTree.Store(old.ID.Time()) // as if the time had passed by which clocks may be fast
	for fresh.ID.Time() <= s.RequestCutoff() {
		time.Sleep(time.Millisecond)
		fresh = newRequest()
	}
	epoch, err := putOnce(t, x, fresh, "k", "2")
	if err != nil {
		t.Fatalf("a damaged page of old records refuses a new request: %v", err)
	}
	_, err = putOnce(t, x, fresh, "k", "2")
	if out := applied(t, err); out.Epoch != epoch {
		t.Fatalf("epoch %d, want %d", out.Epoch, epoch)
	}
	if _, err := putOnce(t, x, old, "k", "3"); err == nil || errors.As(err, new(*AppliedError)) {
		t.Fatalf("an old request whose record cannot be read: %v", err)
	}
}

// TestRecordsInImmutableMemtablesAreFound: look-ups that may leave immutable memtables out find what is in them, with ids in any order
// of time.
func TestRecordsInImmutableMemtablesAreFound(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Storage.CheckpointBytes = 64 << 20
	s := mustOpen(t, o)
	x := mustSession(t, s)
	now := milliseconds(time.Now())
	var requests []*Request
	var epochs []keys.Epoch
	for i, ahead := range []uint64{5, 3, 9, 4, 0, 20, 10} {
		r := newRequest()
		r.ID = requestID(now + 1000*ahead)
		epoch, err := putOnce(t, x, r, fmt.Sprint("k", i), "v")
		if err != nil {
			t.Fatal(err)
		}
		requests, epochs = append(requests, r), append(epochs, epoch)
		if i%2 == 0 {
			if err := s.engine.Rotate(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		for j, r := range requests {
			_, err := putOnce(t, x, r, fmt.Sprint("k", j), "again")
			if out := applied(t, err); out.Epoch != epochs[j] {
				t.Fatalf("after %d, request %d: epoch %d, want %d", i, j, out.Epoch, epochs[j])
			}
		}
	}
	if s.requests.inTree.Load() != 0 {
		t.Error("a merge took the memtables: the test tests nothing")
	}
}

// TestBoundOfTheTreeNeverGoesBack: checkpoints that begin at once raise the bound together. One that was interrupted must not take
// it back from one that has raised it meanwhile: an id between the two would be looked up in the memtables alone, and be
// executed again.
func TestBoundOfTheTreeNeverGoesBack(t *testing.T) {
	var window requestWindow
	var ended atomic.Bool
	var others sync.WaitGroup
	for range 2 {
		others.Go(func() {
			for !ended.Load() {
				window.merging()
			}
		})
	}
	for at, end := uint64(1), time.Now().Add(time.Second); time.Now().Before(end); at++ {
		id := requestID(at)
		window.note(&id)
		window.merging()
		if is := window.inTree.Load(); is < at {
			t.Errorf("the bound is %d after a merge that takes an id of %d", is, at)
			break
		}
	}
	ended.Store(true)
	others.Wait()
}
