package mvcc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
)

func TestEpochsAreDenseAndSharedByABatch(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	if e := mustPut(t, s, "a", "1"); e != 1 {
		t.Fatalf("first epoch %d", e)
	}
	x := mustSession(t, s)
	defer x.Close()
	var w Write
	w.Set([]byte("z"), []byte("26"))
	w.Set([]byte("b"), []byte("2"))
	w.Delete([]byte("a"))
	e, err := commitAndWait(x, &w)
	if err != nil || e != 2 {
		t.Fatalf("epoch %d, %v", e, err)
	}
	for _, k := range []string{"b", "z"} {
		if v, _ := x.Get(nil, []byte(k), 0); v.Epoch != 2 || v.At != 2 {
			t.Errorf("%s: epoch %d at %d", k, v.Epoch, v.At)
		}
	}
	if got := get(t, s, "a", 0); got != "-" {
		t.Errorf("a = %q after its deletion", got)
	}
}

func TestBadInputChangesNothing(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	long := strings.Repeat("k", s.options.Limits.KeyBytes)
	twice := new(batch.DuplicateKeyError)
	limit := new(LimitError)
	for _, c := range []struct {
		name string
		fill func(w *Write)
		is   func(error) bool
	}{
		{"empty batch", func(*Write) {}, func(err error) bool { return errors.Is(err, ErrEmptyBatch) }},
		{"empty key", func(w *Write) { w.Set(nil, nil) }, func(err error) bool { return errors.Is(err, ErrEmptyKey) }},
		{"key too long", func(w *Write) { w.Set([]byte(long+"k"), nil) }, func(err error) bool { return errors.As(err, &limit) }},
		{"value too long", func(w *Write) { w.Set([]byte("k"), make([]byte, s.options.Limits.ValueBytes+1)) }, func(err error) bool { return errors.As(err, &limit) }},
		{"key twice", func(w *Write) { w.Set([]byte("k"), nil); w.Set([]byte("j"), nil); w.Delete([]byte("k")) }, func(err error) bool {
			return errors.As(err, &twice) && string(twice.Key) == "k"
		}},
		{"condition on empty key", func(w *Write) {
			w.Set([]byte("k"), nil)
			w.Conditions = append(w.Conditions, Condition{Kind: KeyAbsent})
		}, func(err error) bool { return errors.Is(err, ErrEmptyKey) }},
	} {
		var w Write
		c.fill(&w)
		if _, err := x.Commit(context.Background(), &w); err == nil || !c.is(err) {
			t.Errorf("%s: error %v", c.name, err)
		}
	}
	if v := s.Visible(); v != 0 {
		t.Errorf("refused writes took %d epochs", v)
	}
	if e, err := put(x, long, strings.Repeat("v", s.options.Limits.ValueBytes), DurabilityAsync); err != nil || e != 1 {
		t.Errorf("at the limits: epoch %d, %v", e, err)
	}
}

func TestPreconditions(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	mustPut(t, s, "there", "v1")
	at := mustPut(t, s, "there", "v2")
	mustPut(t, s, "gone", "x")
	mustPut(t, s, "empty", "")
	mustPut(t, s, "large", string(make([]byte, 16<<10)))
	w := Write{}
	w.Delete([]byte("gone"))
	if _, err := commitAndWait(x, &w); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		condition Condition
		holds     bool
	}{
		{Condition{Kind: KeyAbsent, Key: []byte("never")}, true},
		{Condition{Kind: KeyAbsent, Key: []byte("gone")}, true},
		{Condition{Kind: KeyAbsent, Key: []byte("there")}, false},
		{Condition{Kind: KeyPresent, Key: []byte("there")}, true},
		{Condition{Kind: KeyPresent, Key: []byte("gone")}, false},
		{Condition{Kind: ValueEquals, Key: []byte("there"), Value: []byte("v2")}, true},
		{Condition{Kind: ValueEquals, Key: []byte("there"), Value: []byte("v1")}, false},
		{Condition{Kind: ValueEquals, Key: []byte("gone"), Value: nil}, false},
		{Condition{Kind: ValueEquals, Key: []byte("empty"), Value: nil}, true},
		{Condition{Kind: ValueEquals, Key: []byte("large"), Value: []byte("v2")}, false},
		{Condition{Kind: EpochEquals, Key: []byte("there"), Epoch: at}, true},
		{Condition{Kind: EpochEquals, Key: []byte("there"), Epoch: at - 1}, false},
		{Condition{Kind: EpochEquals, Key: []byte("gone"), Epoch: 4}, false},
	} {
		w := Write{Conditions: []Condition{c.condition}}
		w.Set([]byte("out"), []byte("y"))
		before := s.Visible()
		_, err := commitAndWait(x, &w)
		failed := new(PreconditionError)
		switch {
		case c.holds && err != nil:
			t.Errorf("%+v: %v", c.condition, err)
		case !c.holds && (!errors.As(err, &failed) || string(failed.Condition.Key) != string(c.condition.Key)):
			t.Errorf("%+v: error %v", c.condition, err)
		case !c.holds && s.Visible() != before:
			t.Errorf("%+v: a refused write took an epoch", c.condition)
		}
	}
	if n := cap(x.committing.writer.Scratch); n >= 16<<10 {
		t.Errorf("%d bytes were read to compare a large value with a short one", n)
	}
}

// TestCompareAndSetLosesNoUpdate counts with EpochEquals from many goroutines. Checking the
// condition outside the latch makes it fail.
func TestCompareAndSetLosesNoUpdate(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	mustPut(t, s, "n", "0")
	const writers, each = 8, 200
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			x, err := s.Session()
			if err != nil {
				t.Error(err)
				return
			}
			defer x.Close()
			for done := 0; done < each; {
				v, err := x.Get(nil, []byte("n"), 0)
				if err != nil {
					t.Error(err)
					return
				}
				var n int
				if _, err := fmt.Sscan(string(v.Data), &n); err != nil {
					t.Error(err)
					return
				}
				w := Write{Durability: DurabilityAsync, Conditions: []Condition{{Kind: EpochEquals, Key: []byte("n"), Epoch: v.Epoch}}}
				w.Set([]byte("n"), fmt.Append(nil, n+1))
				failed := new(PreconditionError)
				if _, err := commitAndWait(x, &w); err == nil {
					done++
				} else if !errors.As(err, &failed) {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if got := get(t, s, "n", 0); got != fmt.Sprint(writers*each) {
		t.Fatalf("n = %s, want %d", got, writers*each)
	}
}

// TestSameKeyWritersAgreeWithReplay: 16 writers race on one key; what readers saw last is what a
// restart brings back. Installing outside the latch makes it fail.
func TestSameKeyWritersAgreeWithReplay(t *testing.T) {
	fs := vfs.NewMem()
	s := mustOpen(t, tiny(fs))
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			x := mustSession(t, s)
			defer x.Close()
			for j := range 300 {
				if _, err := put(x, "hot", fmt.Sprintf("%d/%d", i, j), DurabilityAsync); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	want := get(t, s, "hot", 0)
	mustClose(t, s)
	s = mustOpen(t, tiny(fs))
	if got := get(t, s, "hot", 0); got != want {
		t.Fatalf("after the restart %q, before %q", got, want)
	}
}

// TestTinySegmentsWithManyWriters rotates constantly, and compares with what each writer was told.
func TestTinySegmentsWithManyWriters(t *testing.T) {
	fs := vfs.NewMem()
	s := mustOpen(t, tiny(fs))
	want := make(map[string]string)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			x := mustSession(t, s)
			defer x.Close()
			rng := rand.New(rand.NewPCG(1, uint64(i)))
			for j := range 400 {
				k, v := fmt.Sprintf("%02d-%d", i, rng.IntN(100)), strings.Repeat(fmt.Sprint(j), 1+rng.IntN(100))
				d := DurabilityAsync
				if j%10 == 0 {
					d = DurabilitySync
				}
				if _, err := put(x, k, v, d); err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				want[k] = v
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if n := s.Stats().Storage.Rotations; n < 5 {
		t.Fatalf("only %d rotations: the test tests nothing", n)
	}
	if err := equalMaps(want, dump(t, s)); err != nil {
		t.Fatal(err)
	}
	if st := s.Stats().Storage; st.Checkpoints.Finished == 0 || st.Tree.Height == 0 {
		t.Fatalf("%+v: nothing was merged", st)
	}
	if err := s.AwaitDurable(t.Context(), s.Visible()); err != nil { // async commits wait for the interval otherwise
		t.Fatal(err)
	}
	s = mustOpen(t, tiny(fs.Crash(1, vfs.SurviveNone)))
	if err := equalMaps(want, dump(t, s)); err != nil {
		t.Fatalf("after a crash: %v", err)
	}
	if s.Recovery().Epoch != 16*400 || s.Recovery().Records == 0 {
		t.Fatalf("at epoch %d, %+v", s.Visible(), s.Recovery())
	}
	mustClose(t, s)
}

// TestBigBatchIsAtomicAmongSinglePuts: a batch larger than a segment is whole or absent to every
// reader, and hides no put of another session.
func TestBigBatchIsAtomicAmongSinglePuts(t *testing.T) {
	fs := vfs.NewMem()
	s := mustOpen(t, tiny(fs))
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var puts atomic.Int64
	for i := range 4 {
		wg.Go(func() {
			x := mustSession(t, s)
			defer x.Close()
			for j := 0; ; j++ {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := put(x, fmt.Sprintf("single-%d", i), fmt.Sprint(j), DurabilityAsync); err != nil {
					t.Error(err)
					return
				}
				puts.Add(1)
				if v, err := x.Get(nil, fmt.Appendf(nil, "single-%d", i), 0); err != nil || string(v.Data) != fmt.Sprint(j) {
					t.Errorf("own put hidden: %q, %v", v.Data, err)
					return
				}
			}
		})
	}
	x := mustSession(t, s)
	for round := range 5 {
		var w Write
		for k := range 2000 {
			w.Set(fmt.Appendf(nil, "batch-%04d", k), fmt.Appendf(nil, "%d-%s", round, strings.Repeat("x", 100)))
		}
		if _, err := commitAndWait(x, &w); err != nil {
			t.Fatal(err)
		}
		if n := countPrefix(t, x, "batch-", fmt.Sprintf("%d-", round)); n != 2000 {
			t.Fatalf("round %d: %d of 2000 keys have the value", round, n)
		}
	}
	x.Close()
	close(stop)
	wg.Wait()
	want := dump(t, s)
	mustClose(t, s)
	if err := equalMaps(want, dump(t, mustOpen(t, tiny(fs)))); err != nil {
		t.Fatal(err)
	}
	if puts.Load() == 0 {
		t.Fatal("no single put ran")
	}
}

// countPrefix counts the keys with a prefix whose value has one too, in a new view of x.
func countPrefix(t testing.TB, x *Session, key, value string) (n int) {
	t.Helper()
	if _, err := x.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	defer x.CloseSnapshot()
	upper, _ := keys.Successor(nil, []byte(key)) // nil for an empty prefix
	c, err := x.Scan(ScanOptions{Lower: []byte(key), Upper: upper})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for c.Next() {
		if strings.HasPrefix(string(c.Value()), value) {
			n++
		}
	}
	return n
}

// TestSnapshotNeverChangesUnderItsReader reads one view while others write, rotate and collect.
func TestSnapshotNeverChangesUnderItsReader(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	for i := range 100 {
		mustPut(t, s, fmt.Sprintf("k%02d", i), "old")
	}
	x := mustSession(t, s)
	defer x.Close()
	at, err := x.OpenSnapshot(0)
	if err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		y := mustSession(t, s)
		defer y.Close()
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			if _, err := put(y, fmt.Sprintf("k%02d", i%120), strings.Repeat("new", 50), DurabilityAsync); err != nil {
				t.Error(err)
				return
			}
		}
	})
	for range 50 {
		c, err := x.Scan(ScanOptions{Reverse: true})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for c.Next() {
			if string(c.Value()) != "old" || c.Epoch() > at {
				t.Fatalf("%s = %q of epoch %d in a snapshot at %d", c.Key(), c.Value(), c.Epoch(), at)
			}
			if n++; n%30 == 0 {
				c.Pause()
				time.Sleep(100 * time.Microsecond)
			}
		}
		if c.Err() != nil || n != 100 {
			t.Fatalf("%d keys, %v", n, c.Err())
		}
		c.Close()
	}
	close(stop)
	wg.Wait()
}

func TestDeleteRangeIsAtomicAmongWriters(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Go(func() {
			x := mustSession(t, s)
			defer x.Close()
			for j := 0; ; j++ {
				select {
				case <-stop:
					return
				default:
				}
				var w Write // a pair: both keys or none
				w.Durability = DurabilityAsync
				w.Set(fmt.Appendf(nil, "r/%d/%d", i, j%50), nil)
				w.Set(fmt.Appendf(nil, "r/%d/%d/twin", i, j%50), nil)
				if _, err := commitAndWait(x, &w); err != nil {
					t.Error(err)
					return
				}
				time.Sleep(50 * time.Microsecond)
			}
		})
	}
	x := mustSession(t, s)
	deleted := 0
	for until := time.Now().Add(300 * time.Millisecond); time.Now().Before(until); {
		out, err := x.DeleteRange(context.Background(), RangeDelete{Lower: []byte("r/"), Upper: []byte("r0"), Durability: DurabilityAsync})
		conflict := new(ConflictError)
		if errors.As(err, &conflict) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		deleted += out.Count
		if out.Count%2 != 0 {
			t.Fatalf("deleted %d keys, which is one key of a pair", out.Count)
		}
		if out.Count > 0 {
			if _, err := x.OpenSnapshot(out.Epoch); err == nil { // the epoch may be gone already; if not, the range is empty there
				c, err := x.Scan(ScanOptions{Lower: []byte("r/"), Upper: []byte("r0")})
				if err != nil {
					t.Fatal(err)
				}
				for c.Next() {
					t.Fatalf("%s survived the deletion of its range at %d", c.Key(), out.Epoch)
				}
				c.Close()
				x.CloseSnapshot()
			}
		}
	}
	close(stop)
	wg.Wait()
	x.Close()
	if deleted == 0 {
		t.Fatal("nothing was ever deleted")
	}
}

func TestDeleteRangeLimitLeavesTheRest(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	for i := range 10 {
		mustPut(t, s, fmt.Sprint(i), "v")
	}
	x := mustSession(t, s)
	defer x.Close()
	out, err := x.DeleteRange(context.Background(), RangeDelete{Lower: []byte("2"), Limit: 3})
	if err != nil || out.Count != 3 || !out.More {
		t.Fatalf("%+v, %v", out, err)
	}
	if err := s.Wait(t.Context(), out.Epoch, DurabilitySync); err != nil {
		t.Fatal(err)
	}
	if got := len(dump(t, s)); got != 7 || get(t, s, "5", 0) != "v" || get(t, s, "4", 0) != "-" {
		t.Fatalf("%d keys left", got)
	}
	out, err = x.DeleteRange(context.Background(), RangeDelete{Lower: []byte("a"), Upper: []byte("b")})
	if err != nil || out.Count != 0 || out.Epoch != s.Visible() {
		t.Fatalf("empty range: %+v, %v", out, err)
	}
}

// TestEmptyRangeDeleteAndItsConditionsHoldAtOnePoint: a batch puts a key into the range together
// with the one that the condition wants. A range delete whose condition held must have deleted it.
func TestEmptyRangeDeleteAndItsConditionsHoldAtOnePoint(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x, y := mustSession(t, s), mustSession(t, s)
	defer x.Close()
	defer y.Close()
	rounds := 3000
	if testing.Short() {
		rounds = 300
	}
	for n := range rounds {
		flag, row := fmt.Appendf(nil, "flag-%d", n), fmt.Appendf(nil, "row-%d", n)
		var done sync.WaitGroup
		done.Go(func() {
			w := Write{Durability: DurabilityAsync}
			w.Set(flag, []byte("1"))
			w.Set(row, []byte("1"))
			if _, err := commitAndWait(y, &w); err != nil {
				t.Error(err)
			}
		})
		out, err := x.DeleteRange(context.Background(), RangeDelete{
			Lower: row, Upper: append(bytes.Clone(row), 0), Durability: DurabilityAsync,
			Conditions: []Condition{{Kind: KeyPresent, Key: flag}},
		})
		done.Wait()
		if err == nil && out.Count == 0 {
			t.Fatalf("round %d: the flag existed, and the row of the same commit was not deleted", n)
		}
	}
}

// hole takes an epoch and keeps every later one invisible until the function it returns is called.
func hole(t *testing.T, s *Store) (fill func()) {
	t.Helper()
	x := mustSession(t, s)
	w := Write{Durability: DurabilityAsync}
	w.Set([]byte("hole"), []byte("v"))
	if err := x.prepare(&w); err != nil {
		t.Fatal(err)
	}
	body := w.body
	x.slot.Enter()
	epoch, err := s.engine.Reserve(&x.committing.writer, body)
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		s.engine.Record(&x.committing.writer, body)
		if err := s.engine.Install(&x.committing.writer, body, false); err != nil {
			t.Error(err)
		}
		s.watermark.markInstalled(epoch)
		x.slot.Leave()
		x.Close()
	}
}

// behindHole runs commit, which must not come to its end before the hole is filled; meanwhile runs
// in between.
func behindHole(t *testing.T, s *Store, commit func() error, meanwhile func()) {
	t.Helper()
	fill := hole(t, s)
	result := make(chan error)
	go func() { result <- commit() }()
	select {
	case err := <-result:
		fill()
		t.Fatalf("did not wait for a smaller epoch: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	meanwhile()
	fill()
	if err := <-result; err != nil {
		t.Fatal(err)
	}
}

// TestASessionAheadOfVisibleIsBounded: the ring over which visible is moved has room for no more.
func TestASessionAheadOfVisibleIsBounded(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	behindHole(t, s, func() error {
		for i := range epochsAheadMax + 1 {
			w := Write{Durability: DurabilityAsync}
			w.Set(fmt.Append(nil, i), []byte("v"))
			if _, err := x.Commit(context.Background(), &w); err != nil {
				return err
			}
		}
		return nil
	}, func() {})
}

// TestLatchesAreHeldFromTheCheckToTheInstall: a transaction that waits for a smaller epoch in its
// window keeps other writers from its keys. A refused condition that waits until it may be returned
// holds no latch.
func TestLatchesAreHeldFromTheCheckToTheInstall(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	free := func() bool {
		var set latchSet
		set.add(s.latches, keys.Append(nil, keys.SpaceUser, []byte("k")))
		latch := &s.latches.table[set.only]
		if !latch.tryLock() {
			return false
		}
		latch.unlock()
		return true
	}
	tx, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
	if err == nil {
		_, err = tx.Get(nil, []byte("r"))
	}
	if err == nil {
		err = tx.Set([]byte("k"), []byte("v"))
	}
	if err == nil {
		err = x.prevalidate(t.Context(), &Write{reads: &tx.reads}) // so that it waits in its window alone
	}
	if err != nil {
		t.Fatal(err)
	}
	behindHole(t, s, func() error {
		_, err := tx.Commit(context.Background())
		return err
	}, func() {
		if free() {
			t.Error("the key's latch is free between check and install")
		}
	})
	behindHole(t, s, func() error {
		w := Write{Durability: DurabilityAsync}
		w.Set([]byte("k"), []byte("w"))
		if _, err := x.Commit(context.Background(), &w); err != nil {
			return err
		}
		y := mustSession(t, s)
		defer y.Close()
		w.Conditions = []Condition{{Kind: KeyAbsent, Key: []byte("k")}}
		var refused *PreconditionError
		if _, err := y.Commit(context.Background(), &w); !errors.As(err, &refused) {
			return fmt.Errorf("not refused: %w", err)
		}
		return nil
	}, func() {
		if !free() {
			t.Error("a refused condition delays the writers of its key until its error is returned")
		}
	})
}

// TestEveryWriteTakesEveryStep: whatever kind of write it is, a closed store and a condition that
// no key can meet are refused. A range delete that found nothing once went past these checks.
func TestEveryWriteTakesEveryStep(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	mustPut(t, s, "present", "1")
	x := mustSession(t, s)
	ctx := t.Context()
	conditions := []Condition{{Kind: KeyAbsent}} // with an empty key
	for name, write := range map[string]func() error{
		"commit": func() error {
			w := Write{Conditions: conditions}
			w.Set([]byte("k"), nil)
			_, err := x.Commit(ctx, &w)
			return err
		},
		"invoke": func() error {
			ops := []Invoke{{Kind: InvokeAdd, Key: []byte("k")}}
			_, err := x.InvokeAll(ctx, ops, conditions, DurabilityAsync, make([]Invoked, 1))
			return err
		},
		"range delete": func() error {
			_, err := x.DeleteRange(ctx, RangeDelete{Lower: []byte("p"), Conditions: conditions})
			return err
		},
		"range delete of nothing": func() error {
			_, err := x.DeleteRange(ctx, RangeDelete{Lower: []byte("q"), Conditions: conditions})
			return err
		},
	} {
		if err := write(); !errors.Is(err, ErrEmptyKey) {
			t.Errorf("%s: %v, want %v", name, err, ErrEmptyKey)
		}
		s.lifecycle.closing.Store(true)
		if err := write(); !errors.Is(err, ErrClosed) {
			t.Errorf("%s: %v, want %v", name, err, ErrClosed)
		}
		s.lifecycle.closing.Store(false)
	}
	x.Close()
}
