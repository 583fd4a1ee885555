package clients

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

func number(v client.Value) int {
	n, _ := strconv.Atoi(string(v.Data))
	return n
}

func TestUpdateRunsAgainUntilNothingIsLost(t *testing.T) {
	s := startServer(t)
	c := s.dial(s.endpoint)
	key := []byte("n")
	const clients, rounds = 8, 25
	var all sync.WaitGroup
	var attempts atomic.Int64
	for n := range clients {
		all.Go(func() {
			for range rounds {
				options := []client.TxnOption{client.CommitWith(client.Async())}
				if n%2 == 0 {
					options = append(options, client.SnapshotIsolation())
				}
				if err := c.Update(t.Context(), func(tx *client.Txn) error {
					attempts.Add(1)
					v, err := tx.Get(key)
					if err != nil {
						return err
					}
					return tx.Put(key, []byte(strconv.Itoa(number(v)+1)))
				}, options...); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	v, err := c.Get(t.Context(), key)
	if err != nil || number(v) != clients*rounds {
		t.Errorf("the counter is %q, want %d, %v", v.Data, clients*rounds, err)
	}
	if attempts.Load() == clients*rounds {
		t.Log("no attempt met a conflict")
	}
	if open, err := c.Transactions(t.Context()); err != nil || len(open) != 0 {
		t.Errorf("left open: %v, %v", open, err)
	}
}

func TestAnErrorOfTheFunctionRollsBackAndComesOut(t *testing.T) {
	s := startServer(t)
	c := s.dial(s.endpoint)
	enough, calls := errors.New("enough"), 0
	err := c.Update(t.Context(), func(tx *client.Txn) error {
		calls++
		return errors.Join(tx.Put([]byte("k"), []byte("v")), enough)
	})
	if !errors.Is(err, enough) || calls != 1 {
		t.Errorf("%d calls, %v", calls, err)
	}
	var e *client.Error
	err = c.Update(t.Context(), func(tx *client.Txn) error { return tx.Put(nil, nil) }) // the error comes with the commit
	if !errors.As(err, &e) || e.Reason != kvpb.ErrorReason_ERROR_REASON_KEY_EMPTY {
		t.Errorf("an empty key: %v", err)
	}
	err = c.View(t.Context(), func(tx *client.Txn) error { return tx.Put([]byte("k"), nil) })
	if !errors.As(err, &e) || e.Reason != kvpb.ErrorReason_ERROR_REASON_TXN_READ_ONLY {
		t.Errorf("a write in View: %v", err)
	}
	if v, err := c.Get(t.Context(), []byte("k")); err != nil || v.Found {
		t.Errorf("k is %v, %v", v, err)
	}
}

func TestATransactionScansInPagesOverItsOwnWrites(t *testing.T) {
	s := startServer(t)
	c := s.dial(s.endpoint)
	var b client.Batch
	for i := range 100 {
		b.Put(fmt.Appendf(nil, "k%03d", i), make([]byte, 50))
	}
	if _, err := c.Write(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	for _, o := range []client.ScanOptions{
		{PageBytes: 300},
		{PageBytes: 300, Reverse: true},
		{PageBytes: 300, Limit: 25},
		{PageBytes: 300, Limit: 25, Reverse: true},
		{KeysOnly: true},
	} {
		if err := c.Update(t.Context(), func(tx *client.Txn) error {
			if err := errors.Join(tx.Put([]byte("k0505"), nil), tx.Delete([]byte("k051"))); err != nil {
				return err
			}
			var got []string
			for e, err := range tx.Scan(client.Prefix([]byte("k")), o) {
				if err != nil {
					return err
				}
				got = append(got, string(e.Key))
			}
			want := 100
			if o.Limit > 0 {
				want = int(o.Limit)
			}
			if len(got) != want {
				t.Errorf("%+v: %d entries, want %d", o, len(got), want)
			}
			for i := 1; i < len(got); i++ {
				if (got[i-1] < got[i]) == o.Reverse {
					t.Errorf("%+v: %s, then %s", o, got[i-1], got[i])
				}
			}
			return errors.New("only looking")
		}); err == nil || err.Error() != "only looking" {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

func TestInteractiveTransactions(t *testing.T) {
	s := startServer(t)
	c := s.dial(s.endpoint)
	tx, err := c.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(tx.Put([]byte("a"), []byte("1")))
	point, err := tx.Savepoint()
	must(err)
	must(tx.Put([]byte("text"), []byte("x")))
	if _, err := tx.Invoke(client.Increment([]byte("text"), 1)); err == nil {
		t.Error("a text was incremented")
	}
	if _, err := tx.Get([]byte("a")); err == nil {
		t.Error("a failed transaction goes on")
	}
	must(tx.RollbackTo(point))
	out, err := tx.Invoke(client.IncrementWithin([]byte("a"), 5, 0, 6).ReturnOld().ReturnNew())
	if must(err); string(out.Old) != "1" || string(out.New) != "6" || !out.Applied {
		t.Errorf("increment: %+v", out)
	}
	epoch, err := tx.Commit()
	if must(err); epoch == 0 {
		t.Error("the commit has no epoch")
	}
	if _, err := tx.Get([]byte("a")); !errors.Is(err, client.ErrTxnDone) {
		t.Errorf("a read after the commit: %v", err)
	}
	past, err := c.Begin(t.Context(), client.ReadOnly())
	must(err)
	defer past.Rollback()
	if at, err := past.ReadEpoch(); err != nil || at < epoch || past.ID() == tx.ID() {
		t.Errorf("reads at %d, %v", at, err)
	}
	must(c.EndTransaction(t.Context(), past.ID()))
	var e *client.Error
	if _, err := past.Get([]byte("a")); !errors.As(err, &e) || e.Reason != kvpb.ErrorReason_ERROR_REASON_TXN_ENDED {
		t.Errorf("ended by the operator: %v", err)
	}
}

func TestPlansAndInvocations(t *testing.T) {
	s := startServer(t)
	c := s.dial(s.endpoint)
	ctx := t.Context()
	leader := []byte("leader")
	take := client.When(client.Absent(leader), client.Empty(client.Prefix([]byte("leader/")))).
		Then(client.OpPut(leader, []byte("me"))).Else(client.OpGet(leader))
	first, err := c.Execute(ctx, take)
	if err != nil || !first.Succeeded || first.Epoch == 0 {
		t.Fatalf("%+v, %v", first, err)
	}
	second, err := c.Execute(ctx, take, client.Sync())
	if err != nil || second.Succeeded || string(second.Results[0].Value.Data) != "me" {
		t.Errorf("%+v, %v", second, err)
	}
	swap, err := c.CompareAndSet(ctx, leader, []byte("you"), []byte("they"))
	if err != nil || swap {
		t.Errorf("a wrong comparison: %v, %v", swap, err)
	}
	if n, err := c.Increment(ctx, []byte("n"), -7); err != nil || n != -7 {
		t.Errorf("%d, %v", n, err)
	}
	all, epoch, err := c.InvokeAll(ctx, []client.Invocation{
		client.Max([]byte("n"), 3).ReturnNew(), client.Min([]byte("low"), 2).ReturnNew(), client.Append([]byte("log"), []byte("x")),
		client.PutIfAbsent(leader, []byte("other")), client.GetAndSet([]byte("s"), []byte("1")), client.GetAndDelete([]byte("t")),
	})
	if err != nil || epoch == 0 || string(all[0].New) != "3" || string(all[1].New) != "2" || all[3].Applied || all[4].OldFound || all[5].NewFound {
		t.Errorf("%+v, %v", all, err)
	}
	p, err := c.Pipeline(ctx, client.PipelineOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		if err := p.Invoke(client.Increment([]byte("n"), 1), func(o client.Outcome, _ client.Epoch, err error) {
			if err != nil || !o.Applied {
				t.Errorf("%+v, %v", o, err)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if v, err := c.Get(ctx, []byte("n")); err != nil || number(v) != 13 {
		t.Errorf("n is %q, %v", v.Data, err)
	}
}

// A server that ends in the middle is not a conflict; before the commit is sent, running again is
// safe.
func TestUpdateOutlivesARestartOfTheServer(t *testing.T) {
	s := startServer(t)
	c := s.dial(s.endpoint)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	calls := 0
	err := c.Update(ctx, func(tx *client.Txn) error {
		if calls++; calls == 1 {
			if _, err := tx.Get([]byte("n")); err != nil { // else the server may not have seen the transaction, which then begins with the next one
				return err
			}
			s.signal(syscall.SIGKILL)
			s.start()
		}
		v, err := tx.Get([]byte("n"))
		if err != nil {
			return fmt.Errorf("wrapped: %w", err)
		}
		return tx.Put([]byte("n"), []byte(strconv.Itoa(number(v)+1)))
	})
	if err != nil || calls < 2 {
		t.Fatalf("%d calls, %v", calls, err)
	}
	if v, err := c.Get(ctx, []byte("n")); err != nil || number(v) != 1 {
		t.Errorf("n is %q, %v", v.Data, err)
	}
}
