package mvcc

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

func TestInvokeOperations(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	b := func(s string) []byte { return []byte(s) }
	for i, c := range []struct {
		op      Invoke
		applied bool
		now     string // "-": missing
		fails   bool
	}{
		{Invoke{Kind: InvokeAdd, Key: b("n"), Delta: 5}, true, "5", false},
		{Invoke{Kind: InvokeAdd, Key: b("n"), Delta: -7, Bounded: true, Min: 0, Max: 9}, false, "5", true},
		{Invoke{Kind: InvokeAdd, Key: b("n"), Delta: -7, Bounded: true, Min: -2, Max: 9}, true, "-2", false},
		{Invoke{Kind: InvokeAdd, Key: b("n"), Delta: math.MinInt64}, false, "-2", true},
		{Invoke{Kind: InvokeMax, Key: b("n"), Delta: 3}, true, "3", false},
		{Invoke{Kind: InvokeMin, Key: b("n"), Delta: 4}, true, "3", false},
		{Invoke{Kind: InvokeMin, Key: b("m"), Delta: 4}, true, "4", false},
		{Invoke{Kind: InvokeAppend, Key: b("s"), Operand: b("ab")}, true, "ab", false},
		{Invoke{Kind: InvokeAppend, Key: b("s"), Operand: b("c")}, true, "abc", false},
		{Invoke{Kind: InvokeAdd, Key: b("s"), Delta: 1}, false, "abc", true},
		{Invoke{Kind: InvokeCompareSet, Key: b("s"), Expect: b("x"), Operand: b("y")}, false, "abc", false},
		{Invoke{Kind: InvokeCompareSet, Key: b("s"), Expect: b("abc"), Operand: b("y")}, true, "y", false},
		{Invoke{Kind: InvokePutIfAbsent, Key: b("s"), Operand: b("z")}, false, "y", false},
		{Invoke{Kind: InvokeGetAndSet, Key: b("s"), Operand: b("z")}, true, "z", false},
		{Invoke{Kind: InvokeGetAndDelete, Key: b("s")}, true, "-", false},
		{Invoke{Kind: InvokePutIfAbsent, Key: b("s"), Operand: b("q")}, true, "q", false},
		{Invoke{Kind: InvokeCompareSet, Key: b("none"), Expect: nil, Operand: b("y")}, false, "-", false},
		{Invoke{Kind: 99, Key: b("s")}, false, "q", true},
	} {
		before := get(t, s, string(c.op.Key), 0)
		for _, inTxn := range []bool{true, false} { // first in a transaction that is rolled back, then for good
			var out Invoked
			var err error
			if inTxn {
				txn, berr := x.Begin(TxnOptions{})
				if berr != nil {
					t.Fatal(berr)
				}
				out, err = txn.Invoke(&c.op)
				txn.Rollback()
			} else {
				outs := make([]Invoked, 1)
				_, err = x.InvokeAll(context.Background(), []Invoke{c.op}, nil, DurabilitySync, outs)
				out = outs[0]
			}
			wrong := new(TypeError)
			if c.fails {
				if !errors.As(err, &wrong) {
					t.Errorf("%d: error %v", i, err)
				}
				continue
			}
			if err != nil || out.Applied != c.applied {
				t.Errorf("%d: %+v, %v", i, out, err)
			}
			if text(out.Old, out.OldFound) != before || text(out.New, out.NewFound) != c.now {
				t.Errorf("%d: %s -> %s, want %s -> %s", i, text(out.Old, out.OldFound), text(out.New, out.NewFound), before, c.now)
			}
		}
		if got := get(t, s, string(c.op.Key), 0); got != c.now {
			t.Errorf("%d: now %q, want %q", i, got, c.now)
		}
	}
}

func text(b []byte, found bool) string {
	if !found {
		return "-"
	}
	return string(b)
}

func TestInvokeAllIsAtomic(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	mustPut(t, s, "text", "abc")
	out := make([]Invoked, 2)
	wrong := new(TypeError)
	_, err := x.InvokeAll(context.Background(), []Invoke{
		{Kind: InvokeAdd, Key: []byte("n"), Delta: 1}, {Kind: InvokeAdd, Key: []byte("text"), Delta: 1},
	}, nil, DurabilitySync, out)
	if !errors.As(err, &wrong) || wrong.Index != 1 {
		t.Fatalf("error %v", err)
	}
	if got := get(t, s, "n", 0); got != "-" {
		t.Fatalf("a failed InvokeAll was applied in part: n = %s", got)
	}
}

// TestConcurrentIncrementsLoseNothing increments from invokes and from transactions at once.
func TestConcurrentIncrementsLoseNothing(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	const workers, each = 8, 200
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() {
			x := mustSession(t, s)
			defer x.Close()
			op := Invoke{Kind: InvokeAdd, Key: []byte("n"), Delta: 1}
			out := make([]Invoked, 1)
			for range each {
				if i%2 == 0 {
					if _, err := x.InvokeAll(context.Background(), []Invoke{op}, nil, DurabilityAsync, out); err != nil {
						t.Error(err)
					}
					continue
				}
				for {
					txn, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
					if err == nil {
						_, err = txn.Invoke(&op)
					}
					if err == nil {
						_, err = txn.Commit(context.Background())
					}
					conflict := new(ConflictError)
					if err == nil {
						break
					}
					if !errors.As(err, &conflict) {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	if got := get(t, s, "n", 0); got != fmt.Sprint(workers*each) {
		t.Fatalf("n = %s, want %d", got, workers*each)
	}
}

// TestIncrementsByInvocationAndByComparisonAreAllKept: invocations and conditional writes of one
// key exclude each other, with latches by key and, in builds that have it, with one latch for all
// keys.
func TestIncrementsByInvocationAndByComparisonAreAllKept(t *testing.T) {
	for _, baseline := range baselines() {
		t.Run(fmt.Sprintf("onemutex=%v", baseline.OneMutex), func(t *testing.T) {
			o := tiny(vfs.NewMem())
			o.Storage.Ablation = mustSwitch(t, baseline)
			incrementTwoWays(t, o)
		})
	}
}

// incrementTwoWays increments a key by invocations in one goroutine and by comparing and setting in
// another.
func incrementTwoWays(t *testing.T, o Options) {
	t.Helper()
	s := mustOpen(t, o)
	x, y := mustSession(t, s), mustSession(t, s)
	defer x.Close()
	defer y.Close()
	const rounds = 3000
	key := []byte("k")
	var done sync.WaitGroup
	done.Go(func() {
		var out [1]Invoked
		for range rounds {
			if _, err := y.InvokeAll(context.Background(), []Invoke{{Kind: InvokeAdd, Key: key, Delta: 1}}, nil, DurabilityAsync, out[:]); err != nil {
				t.Error(err)
			}
		}
	})
	for range rounds {
		// The same increment as a compare-and-set, which takes the path of plain commits.
		for {
			v, err := x.Get(nil, key, 0)
			if err != nil {
				t.Fatal(err)
			}
			n, _ := strconv.Atoi(string(v.Data))
			w := Write{Durability: DurabilityAsync, Conditions: []Condition{{Kind: ValueEquals, Key: key, Value: v.Data}}}
			if !v.Found {
				w.Conditions[0] = Condition{Kind: KeyAbsent, Key: key}
			}
			w.Set(key, strconv.AppendInt(nil, int64(n+1), 10))
			_, err = commitAndWait(x, &w)
			var refused *PreconditionError
			if err == nil {
				break
			}
			if !errors.As(err, &refused) {
				t.Fatal(err)
			}
		}
	}
	done.Wait()
	if got := get(t, s, "k", 0); got != strconv.Itoa(2*rounds) {
		t.Fatalf("the counter is %s after %d increments", got, 2*rounds)
	}
}

// TestRefusedInvocationReturnsTheEpochThatItFound: a comparison that fails says what is there and
// since when, in a transaction as outside.
func TestRefusedInvocationReturnsTheEpochThatItFound(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	epoch := mustPut(t, s, "k", "there")
	x := mustSession(t, s)
	defer x.Close()
	op := Invoke{Kind: InvokeCompareSet, Key: []byte("k"), Expect: []byte("something else"), Operand: []byte("new")}
	tx, err := x.Begin(TxnOptions{})
	if err != nil {
		t.Fatal(err)
	}
	inside, err := tx.Invoke(&op)
	if err != nil || inside.Applied || string(inside.Old) != "there" || inside.OldEpoch != epoch {
		t.Errorf("in a transaction: %+v, %v; want epoch %d", inside, err, epoch)
	}
	tx.Rollback()
	out := make([]Invoked, 1)
	if _, err := x.InvokeAll(context.Background(), []Invoke{op}, nil, DurabilityAsync, out); err != nil || out[0].Applied || out[0].OldEpoch != epoch {
		t.Errorf("outside: %+v, %v; want epoch %d", out[0], err, epoch)
	}
}

// pacedStore is a store that delays writers for a KiB by at least its argument, because checkpoints
// meet a full disk.
func pacedStore(t *testing.T, pace time.Duration) (*Store, *Session) {
	t.Helper()
	fs := vfs.NewFaulty(vfs.NewMem())
	o := tiny(fs)
	o.Storage.MemoryBytes = 16 << 20
	s := mustOpen(t, o)
	x := mustSession(t, s)
	t.Cleanup(x.Close)
	full := fs.Inject(vfs.Rule{Op: vfs.OpWrite | vfs.OpPreallocate, Name: "data.ekv", Err: syscall.ENOSPC})
	t.Cleanup(full.Remove)
	value := strings.Repeat("v", 10_000)
	for i := 0; s.engine.ThrottleDelayPerKiB() < pace; i++ {
		if _, err := put(x, fmt.Sprintf("k%d", i), value, DurabilityAsync); err != nil {
			t.Fatalf("put %d: %v", i, err)
		}
	}
	return s, x
}

// TestInvocationsAreThrottled: while checkpoints are lagging, every kind of write is delayed by
// what it writes.
func TestInvocationsAreThrottled(t *testing.T) {
	const pace = 20 * time.Microsecond
	s, x := pacedStore(t, pace)
	op := Invoke{Kind: InvokeGetAndSet, Key: []byte("k"), Operand: make([]byte, 400_000)}
	fastest := time.Hour
	for range 5 {
		start := time.Now()
		if _, err := x.InvokeAll(context.Background(), []Invoke{op}, nil, DurabilityAsync, make([]Invoked, 1)); err != nil {
			t.Fatal(err)
		}
		fastest = min(fastest, time.Since(start))
	}
	if fastest < 400*pace*3/4 {
		t.Errorf("400 KB took %v at %v a KiB", fastest, s.engine.ThrottleDelayPerKiB())
	}
}

// TestThrottledWriterHoldsNoSnapshot: a transaction and a range delete that wait because
// checkpoints are lagging do not keep the versions that these could drop.
func TestThrottledWriterHoldsNoSnapshot(t *testing.T) {
	s, x := pacedStore(t, 50*time.Microsecond)
	var long Write // what a range delete has to delete is as large as what the transaction writes
	long.Durability = DurabilityAsync
	for i := range 400 {
		long.Set(fmt.Appendf(nil, "k1/%01000d", i), nil)
	}
	for name, write := range map[string]func() error{
		"transaction": func() error {
			tx, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
			if err == nil {
				err = tx.Set([]byte("k"), make([]byte, 400_000))
			}
			if err == nil {
				_, err = tx.Commit(context.Background())
			}
			return err
		},
		"range delete": func() error {
			_, err := x.DeleteRange(context.Background(), RangeDelete{Lower: []byte("k1/"), Upper: []byte("k10"), Durability: DurabilityAsync})
			return err
		},
	} {
		const want = 5 // looks of a hundred that a wait has time for
		most := 0
		for attempt := 0; attempt < 5 && most < want; attempt++ { // on a busy machine the wait may be over before anything looks
			if _, err := x.Commit(context.Background(), &long); err != nil {
				t.Fatal(err)
			}
			before, without := s.Visible(), 0
			done := make(chan error)
			go func() { done <- write() }()
			for s.Visible() == before {
				runtime.Gosched()
			}
			for waiting := true; waiting; {
				open := x.slot.Epoch() != 0
				select {
				case err := <-done:
					if err != nil {
						t.Fatal(err)
					}
					waiting = false
				default:
					if !open {
						without++
					}
					time.Sleep(100 * time.Microsecond)
				}
			}
			most = max(most, without)
		}
		if most < want {
			t.Errorf("a %s that waits keeps its snapshot open", name)
		}
	}
}
