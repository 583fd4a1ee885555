package mvcc

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestReadNeverRevealsWhatACrashCouldTakeBack: a SYNC commit that is visible but not durable makes a reader wait; an ASYNC one
// does not.
func TestReadNeverRevealsWhatACrashCouldTakeBack(t *testing.T) {
	s := mustOpen(t, func() Options { o := tiny(vfs.NewMem()); o.SyncInterval = time.Hour; return o }())
	x := mustSession(t, s)
	defer x.Close()
	commit := func(key string, d Durability, fill func(*Write)) {
		w := Write{Durability: d}
		fill(&w)
		if _, err := x.Commit(context.Background(), &w); err != nil { // and no Wait: the flusher does not know of it yet
			t.Fatal(key, err)
		}
	}
	commit("async", DurabilityAsync, func(w *Write) { w.Set([]byte("async"), []byte("1")) })
	if v, err := x.Get(nil, []byte("async"), 0); err != nil || !v.Found || v.Await != 0 {
		t.Fatalf("async: %+v, %v", v, err)
	}
	commit("sync", DurabilitySync, func(w *Write) { w.Set([]byte("sync"), []byte("1")) })
	v, err := x.Get(nil, []byte("sync"), 0)
	if err != nil || !v.Found || v.Await != v.Epoch {
		t.Fatalf("sync: %+v, %v", v, err)
	}
	commit("deletion", DurabilitySync, func(w *Write) { w.Delete([]byte("sync")) })
	if v, err = x.Get(nil, []byte("sync"), 0); err != nil || v.Found || v.Await == 0 {
		t.Fatalf("a deletion reveals as much: %+v, %v", v, err)
	}
	if _, err = x.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	c, err := x.Scan(ScanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for c.Next() {
	}
	if got := c.Await(); got != v.Await {
		t.Fatalf("the scan met the deletion at %d, awaits %d", v.Await, got)
	}
	x.CloseSnapshot()
	if err := s.AwaitDurable(t.Context(), v.Await); err != nil {
		t.Fatal(err)
	}
	if v, _ = x.Get(nil, []byte("sync"), 0); v.Await != 0 {
		t.Fatalf("durable, and still to be awaited: %+v", v)
	}
}

// TestRefusedPreconditionNeverRevealsWhatACrashCouldTakeBack: nor does any other outcome of a write. Each names the SYNC commit that it has
// met, for its teller to await; the session itself waits for no disk.
func TestRefusedPreconditionNeverRevealsWhatACrashCouldTakeBack(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.SyncInterval = time.Hour
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	one := make([]Invoked, 1)
	for name, attempt := range map[string]func(key []byte, c []Condition) error{
		"commit": func(key []byte, c []Condition) error {
			w := Write{Conditions: c}
			w.Set(key, nil)
			_, err := x.Commit(context.Background(), &w)
			return err
		},
		"condition that holds": func(key []byte, c []Condition) error {
			c[0].Kind = KeyPresent
			w := Write{Conditions: c, Durability: DurabilityAsync}
			w.Set([]byte("other"), nil)
			_, err := x.Commit(context.Background(), &w)
			return err
		},
		"invoke": func(key []byte, c []Condition) error {
			_, err := x.InvokeAll(context.Background(), []Invoke{{Kind: InvokeAdd, Key: key, Delta: 1}}, c, DurabilitySync, one)
			return err
		},
		"type": func(key []byte, _ []Condition) error {
			_, err := x.InvokeAll(context.Background(), []Invoke{{Kind: InvokeAdd, Key: key, Delta: 1}}, nil, DurabilitySync, one)
			return err
		},
		"length": func(key []byte, _ []Condition) error {
			_, err := x.InvokeAll(context.Background(), []Invoke{{Kind: InvokeAppend, Key: key, Operand: make([]byte, s.options.Limits.ValueBytes)}}, nil, DurabilitySync, one)
			return err
		},
		"comparison": func(key []byte, _ []Condition) error {
			_, err := x.InvokeAll(context.Background(), []Invoke{{Kind: InvokeCompareSet, Key: key, Expect: []byte("no")}}, nil, DurabilitySync, one)
			return err
		},
		"delete range": func(key []byte, c []Condition) error {
			_, err := x.DeleteRange(context.Background(), RangeDelete{Lower: key, Conditions: c})
			return err
		},
		"deleted range": func(key []byte, _ []Condition) error {
			_, err := x.DeleteRange(context.Background(), RangeDelete{Lower: key, Limit: 1, Durability: DurabilityAsync})
			return err
		},
	} {
		w := Write{Durability: DurabilitySync}
		w.Set([]byte(name), []byte("text"))
		e, err := x.Commit(context.Background(), &w) // and no Wait
		if err != nil {
			t.Fatal(err)
		}
		if got := x.Await(); got != 0 {
			t.Fatalf("a blind commit awaits %d beside itself", got)
		}
		err = attempt([]byte(name), []Condition{{Kind: KeyAbsent, Key: []byte(name)}})
		if got := x.Await(); got != e || s.Durable() >= e {
			t.Errorf("%s: %v, awaits %d, durable is %d of %d", name, err, got, s.Durable(), e)
		}
	}
}

// TestChangedRangeNeverRevealsWhatACrashCouldTakeBack: the answer that a range has changed names the
// SYNC commit that has changed it. The answer that it has not changed names none.
func TestChangedRangeNeverRevealsWhatACrashCouldTakeBack(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.SyncInterval = time.Hour
	s := mustOpen(t, o)
	since := mustPut(t, s, "k", "v")
	x := mustSession(t, s)
	defer x.Close()
	if _, err := x.OpenSnapshot(since); err != nil {
		t.Fatal(err)
	}
	y := mustSession(t, s)
	defer y.Close()
	w := Write{Durability: DurabilitySync}
	w.Set([]byte("k"), []byte("new"))
	e, err := y.Commit(t.Context(), &w) // and no Wait
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		lower   string
		changed bool
		await   keys.Epoch
	}{{"a", true, e}, {"z", false, 0}} {
		operate := func(context.Context, *Txn, bool) error { return nil }
		out, err := y.Execute(t.Context(), &Execution{
			Write: &Write{}, Ranges: []RangeCondition{{Lower: []byte(c.lower), UnchangedSince: since}}, Operate: operate,
		})
		if got := y.Await(); err != nil || out.Holds == c.changed || got != c.await || s.Durable() >= e {
			t.Errorf("from %s: %+v, %v, awaits %d, want %d; durable is %d of %d", c.lower, out, err, got, c.await, s.Durable(), e)
		}
	}
}

// TestConflictNeverRevealsWhatACrashCouldTakeBack: the error of a transaction names the commit that it met.
func TestConflictNeverRevealsWhatACrashCouldTakeBack(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.SyncInterval = time.Hour
	s := mustOpen(t, o)
	x, y := mustSession(t, s), mustSession(t, s)
	defer x.Close()
	defer y.Close()
	conflict := new(ConflictError)
	for name, read := range map[string]func(*Txn) error{
		"write": func(t *Txn) error { return t.Set([]byte("k"), nil) },
		"point": func(t *Txn) error {
			_, err := t.Get(nil, []byte("k"))
			return err
		},
		"range": func(t *Txn) error {
			c, err := t.Scan(ScanOptions{})
			if err == nil {
				c.Next()
				c.Close()
			}
			return err
		},
	} {
		for _, d := range []Durability{DurabilitySync, DurabilityAsync} {
			txn, err := x.Begin(TxnOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(read(txn), txn.Set([]byte("other"), nil)); err != nil {
				t.Fatal(err)
			}
			w := Write{Durability: d}
			w.Set([]byte("k"), nil)
			e, err := y.Commit(context.Background(), &w) // and no Wait
			if err != nil {
				t.Fatal(err)
			}
			_, err = txn.Commit(context.Background())
			got := x.Await()
			if name == "range" && d == DurabilityAsync {
				got = 0 // it may await for nothing: the range does not tell whose commit it was
			}
			if want := map[Durability]keys.Epoch{DurabilitySync: e}[d]; !errors.As(err, &conflict) || got != want {
				t.Errorf("%s: %v, awaits %d, want %d", name, err, got, want)
			}
		}
	}
}
