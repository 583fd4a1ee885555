package mvcc

import (
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// heapBytes is what is reachable on the heap.
func heapBytes() int {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// TestTransactionIsChargedForTheMemoryThatItHolds: whatever a client does in a transaction, what
// the transaction says it holds is within a factor of what it does hold, so that the limit of a
// transaction bounds memory.
func TestTransactionIsChargedForTheMemoryThatItHolds(t *testing.T) {
	testseed.SkipUnderRace(t)
	put := func(tx *Txn, n int) error { return tx.Set(fmt.Appendf(nil, "%08d", n), nil) }
	for name, grow := range map[string]func(tx *Txn) error{
		"many small keys": func(tx *Txn) error {
			for i := range 100_000 {
				if err := put(tx, i); err != nil {
					return err
				}
			}
			return nil
		},
		"one key overwritten behind a savepoint": func(tx *Txn) error {
			if err := put(tx, 0); err != nil {
				return err
			}
			if _, err := tx.Savepoint(); err != nil {
				return err
			}
			for range 1_000_000 {
				if err := put(tx, 0); err != nil {
					return err
				}
			}
			return nil
		},
		"all keys overwritten behind many savepoints": func(tx *Txn) error {
			for range 200 {
				for i := range 500 {
					if err := put(tx, i); err != nil {
						return err
					}
				}
				if _, err := tx.Savepoint(); err != nil {
					return err
				}
			}
			return nil
		},
		"savepoints alone": func(tx *Txn) error {
			for range 200_000 {
				if _, err := tx.Savepoint(); err != nil {
					return err
				}
			}
			return nil
		},
		"many keys read": func(tx *Txn) error {
			for i := range 100_000 {
				if _, err := tx.Get(nil, fmt.Appendf(nil, "%d", i)); err != nil {
					return err
				}
			}
			return nil
		},
		"many ranges read": func(tx *Txn) error {
			for i := range 50_000 {
				c, err := tx.Scan(ScanOptions{Lower: fmt.Appendf(nil, "%d", i), Upper: fmt.Appendf(nil, "%d0", i)})
				if err != nil {
					return err
				}
				c.Next()
				c.Close()
			}
			return nil
		},
		"written and rolled back": func(tx *Txn) error {
			n, err := tx.Savepoint()
			for i := 0; i < 100_000 && err == nil; i++ {
				err = put(tx, i)
			}
			return errors.Join(err, tx.RollbackTo(n))
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := mustOpen(t, tiny(vfs.NewMem()))
			x := mustSession(t, s)
			defer x.Close()
			tx, err := x.Begin(TxnOptions{})
			if err != nil {
				t.Fatal(err)
			}
			before, charged := heapBytes(), tx.Size()
			if err := grow(tx); err != nil {
				t.Fatal(err)
			}
			held, charged := heapBytes()-before, tx.Size()-charged
			const slack = 256 << 10
			if held > 2*charged+slack {
				t.Errorf("the transaction has %d bytes and is charged for %d", held, charged)
			}
			if charged > 2*held+slack {
				t.Errorf("the transaction is charged for %d bytes and has %d", charged, held)
			}
			tx.Rollback()
			if left := heapBytes() - before; left > pooledBytesMax+slack {
				t.Errorf("the session still has %d bytes of the transaction", left)
			}
		})
	}
}

// TestTransactionThatIsTooLargeGoesOnFromItsSavepoint: the limit refuses whatever it is that makes
// a transaction large, and a rollback to a savepoint makes it small again: it goes on, and commits
// what the savepoint had.
func TestTransactionThatIsTooLargeGoesOnFromItsSavepoint(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Limits.BatchBytes = 64 << 10
	s := mustOpen(t, o)
	for name, step := range map[string]func(tx *Txn, i int) error{
		"keys":       func(tx *Txn, i int) error { return tx.Set(fmt.Appendf(nil, "%d", i), nil) },
		"values":     func(tx *Txn, i int) error { return tx.Set([]byte("k"), make([]byte, 100)) },
		"savepoints": func(tx *Txn, i int) error { _, err := tx.Savepoint(); return err },
		"undo": func(tx *Txn, i int) error {
			_, err := tx.Savepoint()
			return errors.Join(err, tx.Delete([]byte("first")))
		},
	} {
		t.Run(name, func(t *testing.T) {
			x := mustSession(t, s)
			defer x.Close()
			tx, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
			if err != nil {
				t.Fatal(err)
			}
			if err := tx.Set([]byte("first"), []byte(name)); err != nil {
				t.Fatal(err)
			}
			n, err := tx.Savepoint()
			for i := 0; err == nil; i++ {
				if i > 100_000 {
					t.Fatal("nothing is refused")
				}
				err = step(tx, i)
			}
			var limit *LimitError
			if !errors.As(err, &limit) || limit.What != "transaction bytes" {
				t.Fatal(err)
			}
			if err := errors.Join(tx.RollbackTo(n), tx.Set([]byte("second"), nil)); err != nil {
				t.Fatal(err)
			}
			if size := tx.Size(); size > 1<<10 {
				t.Errorf("after the rollback the transaction is charged for %d bytes", size)
			}
			epoch, err := tx.Commit(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Wait(t.Context(), epoch, DurabilityAsync); err != nil {
				t.Fatal(err)
			}
			if v, err := x.Get(nil, []byte("first"), 0); err != nil || string(v.Data) != name {
				t.Errorf("%q, %v", v.Data, err)
			}
		})
	}
}

// TestTransactionIsNotChargedForWhatItGaveUp: neither for what one before it in its session had. What it has discarded it keeps no buffers of: it may
// stay open for long.
func TestTransactionIsNotChargedForWhatItGaveUp(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	for range 2 {
		tx, err := x.Begin(TxnOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if n := tx.Size(); n != 0 {
			t.Errorf("a transaction is charged for %d bytes when it begins", n)
		}
		for i := range 4 * linearMax {
			key := fmt.Appendf(nil, "%d", i)
			_, absent := tx.Get(nil, key)
			if err := tx.Set(key, key); err != nil {
				t.Fatal(err)
			}
			if v, err := tx.Get(nil, key); absent != nil || err != nil || string(v.Data) != string(key) {
				t.Fatalf("%v before; %q, %v", absent, v.Data, err)
			}
		}
		tx.Rollback()
	}
	tx, err := x.Begin(TxnOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if tx.Discard(); tx.Size() != 0 || tx.own.held()+tx.reads.held() != 0 {
			t.Errorf("charged for %d bytes, with buffers of %d and %d", tx.Size(), tx.own.held(), tx.reads.held())
		}
		if _, err := tx.Get(nil, []byte("k")); err != nil {
			t.Fatal(err)
		}
		if err := tx.Set([]byte("k"), []byte("v")); err != nil {
			t.Fatal(err)
		}
	}
}

// TestAScanAfterAWriteSortsNoOtherWrites: in a transaction that writes and scans in turn, a scan puts the new keys into their places, and does
// not sort all. Two keys that the test exchanges show that: they stay exchanged until so many are new that all are sorted.
func TestAScanAfterAWriteSortsNoOtherWrites(t *testing.T) {
	const writes = 2 * insertedMax
	var o overlay
	set := func(i int) { o.set(fmt.Appendf(nil, "%04d", i*7919%writes), nil, nil, keys.KindSet, false) }
	check := func(first string) {
		t.Helper()
		order := o.within(nil, nil)
		for i := 3; i < len(order); i++ {
			if before, key := o.bytes(o.entries[order[i-1]].key), o.bytes(o.entries[order[i]].key); string(before) >= string(key) {
				t.Fatalf("%s before %s", before, key)
			}
		}
		if key := string(o.bytes(o.entries[order[0]].key)); key != first || len(order) != o.count() {
			t.Fatalf("%s is the first of %d among %d", key, len(order), o.count())
		}
	}
	for i := range writes / 4 {
		set(i)
		check("0000")
	}
	second := string(o.bytes(o.entries[o.order[1]].key))
	o.order[0], o.order[1] = o.order[1], o.order[0]
	o.set([]byte("x"), nil, nil, keys.KindSet, false)
	check(second)
	for i := writes / 4; i < writes; i++ {
		set(i)
	}
	check("0000")
}

// TestAScanListsNoOtherWrites: a scan of a transaction that has written much costs as little as one of another that returns as many keys. It finds
// its place among the writes, and is not charged for a list of them. Writes meanwhile change nothing of its walk.
func TestAScanListsNoOtherWrites(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	tx, err := x.Begin(TxnOptions{Isolation: IsolationSnapshot})
	if err != nil {
		t.Fatal(err)
	}
	const writes = 4 * linearMax
	for i := range writes {
		if err := tx.Set(fmt.Appendf(nil, "%04d", i*7919%writes), nil); err != nil {
			t.Fatal(err)
		}
	}
	for _, o := range []ScanOptions{{}, {Reverse: true}, {Lower: []byte("0010"), Upper: []byte("0013")}, {Lower: []byte("0013"), Upper: []byte("0010")}} {
		size, found := tx.Size(), ""
		c, err := tx.Scan(o)
		if err != nil {
			t.Fatal(err)
		}
		if n := tx.Size(); n != size {
			t.Errorf("a scan is charged for %d bytes", n-size)
		}
		for n := 0; n < 3 && c.Next(); n++ {
			found += string(c.Key()) + " "
			if err := tx.Delete(fmt.Appendf(nil, "%sx", c.Key())); err != nil {
				t.Fatal(err)
			}
		}
		want := "0000 0001 0002 "
		switch {
		case o.Reverse:
			want = "0063 0062 0061 "
		case string(o.Lower) == "0010":
			want = "0010 0011 0012 "
		case o.Lower != nil:
			want = ""
		}
		if found != want {
			t.Errorf("%v: %q, want %q", o, found, want)
		}
	}
}
