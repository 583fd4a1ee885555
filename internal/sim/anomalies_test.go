package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// location is where the version is that a transaction must notice when it commits.
type location string

var locations = []location{"memtable", "immutable", "tree"}

// bench is a store in which one thing happens at a time.
type bench struct {
	t     *testing.T
	store *mvcc.Store
	plain *mvcc.Session
}

func newBench(t *testing.T) *bench {
	t.Helper()
	o := tiny(vfs.NewMem())
	o.Storage.CheckpointBytes = 32 << 20 // no checkpoints except requested ones
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	plain, err := s.Session()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		plain.Close()
		mustClose(t, s)
	})
	return &bench{t: t, store: s, plain: plain}
}

// put commits a plain write; an empty value deletes.
func (b *bench) put(key, value string) keys.Epoch {
	b.t.Helper()
	w := mvcc.Write{Durability: mvcc.DurabilityAsync}
	if w.Set([]byte(key), []byte(value)); value == "" {
		w.Reset()
		w.Delete([]byte(key))
	}
	epoch, err := b.plain.Commit(context.Background(), &w)
	if err == nil {
		err = b.store.Wait(context.Background(), epoch, mvcc.DurabilityAsync)
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return epoch
}

// move brings everything up to an epoch to a location, and checks that it is there.
func (b *bench) move(epoch keys.Epoch, to location) {
	b.t.Helper()
	switch to {
	case "immutable":
		for n := 0; b.active() <= epoch; n++ {
			if n > 1000 {
				b.t.Fatal("the generation does not rotate")
			}
			b.put("~filler", strings.Repeat("f", 1000))
		}
	case "tree":
		if err := b.store.Checkpoint(context.Background()); err != nil {
			b.t.Fatal(err)
		}
	}
	generations := b.store.Stats().Storage.Generations
	oldest := generations[0].First
	for _, g := range generations {
		oldest = min(oldest, g.First)
	}
	if inTree, isActive := oldest > epoch, b.active() <= epoch; inTree != (to == "tree") || isActive != (to == "memtable") {
		b.t.Fatalf("epoch %d is not in the %s: %+v", epoch, to, generations)
	}
}

// active is the first epoch of the active generation.
func (b *bench) active() keys.Epoch {
	for _, g := range b.store.Stats().Storage.Generations {
		if g.Active {
			return g.First
		}
	}
	b.t.Fatal("no generation is active")
	return 0
}

// A conflict is found wherever the version is that causes it, and each anomaly is prevented at the
// levels that promise it.
func TestConflictsAreFoundWhereverTheVersionIs(t *testing.T) {
	scenarios := []struct {
		name      string
		before    func(tx *mvcc.Txn) error     // what the transaction does first
		meanwhile func(b *bench) keys.Epoch    // what is committed meanwhile
		after     func(tx *mvcc.Txn) error     // what it does then
		snapshot  bool                         // whether it conflicts at Snapshot
		strict    bool                         // and at Strict
		look      func(*mvcc.Session) []string // what it must see of it, before and after: the same
	}{
		{
			name: "lost update", before: getting("x"), meanwhile: putting("x", "2"), after: setting("x", "3"),
			snapshot: true, strict: true, look: seeing("x"),
		},
		{
			name: "blind write", before: nothing, meanwhile: putting("x", "2"), after: setting("x", "3"),
			snapshot: true, strict: true, look: seeing("y"),
		},
		{
			name: "write skew", before: getting("x", "y"), meanwhile: putting("y", "2"), after: setting("x", "3"),
			snapshot: false, strict: true, look: seeing("x", "y"),
		},
		{
			name: "read of a key that is deleted", before: getting("y"), meanwhile: putting("y", ""), after: setting("x", "3"),
			snapshot: false, strict: true, look: seeing("y"),
		},
		{
			name: "read of a key that was missing", before: getting("none"), meanwhile: putting("none", "2"), after: setting("x", "3"),
			snapshot: false, strict: true, look: seeing("none"),
		},
		{
			name: "phantom", before: scanning("p/", "p0"), meanwhile: putting("p/2", "2"), after: setting("x", "3"),
			snapshot: false, strict: true, look: seeing("p/2"),
		},
		{
			name: "a range loses a key", before: scanning("p/", "p0"), meanwhile: putting("p/1", ""), after: setting("x", "3"),
			snapshot: false, strict: true, look: seeing("p/1"),
		},
		{
			name: "deleted while deleting the range", before: nothing, meanwhile: putting("p/1", ""), after: deleting("p/", "p0"),
			snapshot: true, strict: true, look: seeing("p/1"),
		},
		{
			name: "beside the range", before: scanning("p/", "p0"), meanwhile: putting("p0", "2"), after: setting("x", "3"),
			snapshot: false, strict: false, look: seeing("p0"),
		},
		{
			name: "a reader alone", before: getting("x"), meanwhile: putting("x", "2"), after: scanning("a", "z"),
			snapshot: false, strict: false, look: seeing("x"),
		},
	}
	for _, s := range scenarios {
		for _, at := range locations {
			for _, base := range []location{"memtable", "tree"} { // where the older version is
				for _, level := range []mvcc.Isolation{mvcc.IsolationSnapshot, mvcc.IsolationSerializable} {
					t.Run(fmt.Sprintf("%s/at=%s/base=%s/level=%d", s.name, at, base, level), func(t *testing.T) {
						b := newBench(t)
						for _, key := range []string{"p/1", "p/3", "x", "y"} {
							b.put(key, "1")
						}
						b.move(4, base)
						session, err := b.store.Session()
						if err != nil {
							t.Fatal(err)
						}
						defer session.Close()
						tx, err := session.Begin(mvcc.TxnOptions{Isolation: level, Durability: mvcc.DurabilityAsync})
						if err != nil {
							t.Fatal(err)
						}
						reader := b.readerAt(tx.At()) // another session, whose reads are not in the transaction's read set
						was := s.look(reader)
						if err := s.before(tx); err != nil {
							t.Fatal(err)
						}
						b.move(s.meanwhile(b), at)
						if is := s.look(reader); fmt.Sprint(is) != fmt.Sprint(was) {
							t.Errorf("the snapshot changed: %v, then %v", was, is)
						}
						if err := s.after(tx); err != nil {
							t.Fatal(err)
						}
						_, err = tx.Commit(context.Background())
						want := level == mvcc.IsolationSnapshot && s.snapshot || level == mvcc.IsolationSerializable && s.strict
						var conflict *mvcc.ConflictError
						if errors.As(err, &conflict) != want || err != nil && !want {
							t.Errorf("commit: %v, want a conflict: %v", err, want)
						}
					})
				}
			}
		}
	}
}

func nothing(*mvcc.Txn) error { return nil }

func getting(all ...string) func(*mvcc.Txn) error {
	return func(tx *mvcc.Txn) error {
		for _, key := range all {
			if _, err := tx.Get(nil, []byte(key)); err != nil {
				return err
			}
		}
		return nil
	}
}

func setting(key, value string) func(*mvcc.Txn) error {
	return func(tx *mvcc.Txn) error { return tx.Set([]byte(key), []byte(value)) }
}

func deleting(lower, upper string) func(*mvcc.Txn) error {
	return func(tx *mvcc.Txn) error {
		_, err := tx.DeleteRange(context.Background(), []byte(lower), []byte(upper))
		return err
	}
}

func scanning(lower, upper string) func(*mvcc.Txn) error {
	return func(tx *mvcc.Txn) error {
		c, err := tx.Scan(mvcc.ScanOptions{Lower: []byte(lower), Upper: []byte(upper)})
		if err != nil {
			return err
		}
		defer c.Close()
		for c.Next() {
		}
		return c.Err()
	}
}

func putting(key, value string) func(*bench) keys.Epoch {
	return func(b *bench) keys.Epoch { return b.put(key, value) }
}

// readerAt is a snapshot at an epoch.
func (b *bench) readerAt(epoch keys.Epoch) *mvcc.Session {
	b.t.Helper()
	x, err := b.store.Session()
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(x.Close)
	if _, err := x.OpenSnapshot(epoch); err != nil {
		b.t.Fatal(err)
	}
	return x
}

// seeing reads keys in a snapshot.
func seeing(all ...string) func(*mvcc.Session) []string {
	return func(x *mvcc.Session) []string {
		var values []string
		for _, key := range all {
			v, err := x.Read(nil, []byte(key))
			values = append(values, fmt.Sprint(v.Found, string(v.Data), v.Epoch, err))
		}
		return values
	}
}

// Money is moved between accounts at either level; every reader of all accounts, at any time, finds
// the same sum.
func TestNoMoneyIsMadeOrLost(t *testing.T) {
	const accounts, each, clients, transfers = 10, 100, 6, 150
	for _, level := range []Level{Snapshot, Strict} {
		t.Run(fmt.Sprintf("level=%d", level), func(t *testing.T) {
			s := mustOpen(t, vfs.NewMem())
			defer mustClose(t, s)
			open := func() *StoreSession {
				x, err := NewStoreSession(s)
				if err != nil {
					t.Fatal(err)
				}
				return x
			}
			account := func(n int) string { return fmt.Sprintf("account/%02d", n) }
			x := open()
			defer x.Close()
			_ = x.Begin(level)
			for n := range accounts {
				_ = x.Set(account(n), fmt.Sprint(each))
			}
			if err := x.Commit(); err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithCancel(context.Background())
			var writers, others sync.WaitGroup
			for n := range clients {
				writers.Go(func() {
					x, rng := open(), rand.New(rand.NewPCG(1, uint64(n)))
					defer x.Close()
					for done := 0; done < transfers; {
						from, to := rng.IntN(accounts), rng.IntN(accounts)
						err := transfer(x, level, account(from), account(to), 1+rng.IntN(20))
						if err == nil {
							done++
						} else if !errors.Is(err, ErrConflict) {
							t.Error(err)
							return
						}
					}
				})
			}
			others.Go(func() {
				for ctx.Err() == nil {
					_ = s.Checkpoint(context.Background())
					time.Sleep(time.Millisecond)
				}
			})
			others.Go(func() {
				x := open()
				defer x.Close()
				for n := 0; ctx.Err() == nil || n == 0; n++ {
					_ = x.Begin(level)
					all, err := x.Scan("account/")
					if err != nil {
						t.Error(err)
						return
					}
					sum := 0
					for _, text := range all {
						var balance int
						_, _ = fmt.Sscan(text, &balance)
						if sum += balance; balance < 0 {
							t.Errorf("a balance of %d", balance)
						}
					}
					if sum != accounts*each {
						t.Errorf("the sum is %d", sum)
						return
					}
				}
			})
			writers.Wait()
			stop()
			others.Wait()
		})
	}
}

func transfer(x Session, level Level, from, to string, amount int) error {
	if err := x.Begin(level); err != nil {
		return err
	}
	balance := map[string]int{}
	for _, key := range []string{from, to} {
		text, err := x.Get(key)
		if err != nil {
			return err
		}
		var n int
		if _, err := fmt.Sscan(text, &n); err != nil {
			return err
		}
		balance[key] = n
		waitBriefly(n)
	}
	if balance[from] < amount {
		return x.Commit()
	}
	balance[from] -= amount
	balance[to] += amount
	for key, n := range balance {
		if err := x.Set(key, fmt.Sprint(n)); err != nil {
			return err
		}
	}
	return x.Commit()
}
