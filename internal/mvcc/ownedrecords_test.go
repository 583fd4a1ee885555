package mvcc

import (
	"errors"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/vfs"
)

// countingMost is the limit of operations in the tests of this file.
const countingMost = 30

func countingStore(t *testing.T) (*Store, *Session) {
	t.Helper()
	o := tiny(vfs.NewMem())
	o.Limits.BatchOps = countingMost
	s := mustOpen(t, o)
	s.GuardLeases(LeaseGuard{Admit: func(uint64, int) error { return nil }, Room: func(uint64) int { return 1 << 20 }})
	x := mustSession(t, s)
	t.Cleanup(x.Close)
	return s, x
}

func countingKey(i int) []byte { return fmt.Appendf(nil, "key %03d", i) }

// TestWhatSetsADeadlineCountsWithItsRecords against the limit of operations, however it is written: a commit has no more records of a client than the
// limit says, and is refused before it is executed.
func TestWhatSetsADeadlineCountsWithItsRecords(t *testing.T) {
	puts := func(f metadata.Fields) func(*Session, int) error {
		return func(x *Session, n int) error {
			w := &Write{Durability: DurabilityAsync}
			for i := range n {
				w.SetWithMetadata(countingKey(i), []byte("v"), &f)
			}
			_, err := x.Commit(t.Context(), w)
			return err
		}
	}
	invocations := func(op Invoke) func(*Session, int) error {
		return func(x *Session, n int) error {
			ops := make([]Invoke, n)
			for i := range ops {
				ops[i] = op
				ops[i].Key = countingKey(i)
			}
			_, err := x.InvokeAll(t.Context(), ops, nil, DurabilityAsync, make([]Invoked, n))
			return err
		}
	}
	for _, c := range []struct {
		name string
		most int // of operations
		run  func(*Session, int) error
	}{
		{"puts", countingMost, puts(metadata.Fields{})},
		{"puts with deadlines", countingMost / 3, puts(metadata.Fields{ExpiresAt: far + 1})},
		{"puts with leases", countingMost / 2, puts(metadata.Fields{Lease: 7})},
		{"puts with both", countingMost / 4, puts(metadata.Fields{ExpiresAt: far + 1, Lease: 7})},
		{"touches", countingMost / 3, invocations(Invoke{Kind: InvokeTouch, ExpiresAt: far + 2})},
		{"exchanges with deadlines", countingMost / 3, invocations(Invoke{Kind: InvokeGetAndSet, ExpiresAt: far + 2})},
		{"sums that keep deadlines", countingMost, invocations(Invoke{Kind: InvokeAdd, Delta: 1})},
		{"persists", countingMost, invocations(Invoke{Kind: InvokePersist})},
		{"a transaction", countingMost / 3, func(x *Session, n int) error {
			txn, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
			for i := 0; err == nil && i < n; i++ {
				err = txn.SetWithMetadata(countingKey(i), []byte("v"), &metadata.Fields{ExpiresAt: far + 3})
			}
			if err == nil {
				_, err = txn.Commit(t.Context())
			}
			return err
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, x := countingStore(t)
			for i := range countingMost + 1 {
				w := &Write{Durability: DurabilityAsync}
				w.SetWithMetadata(countingKey(i), []byte("1"), &metadata.Fields{ExpiresAt: far})
				if _, err := commitAndWait(x, w); err != nil {
					t.Fatal(err)
				}
			}
			before := s.Visible()
			var limit *LimitError
			if err := c.run(x, c.most+1); !errors.As(err, &limit) || limit.What != "batch operations" && limit.What != "transaction operations" || limit.Got <= countingMost {
				t.Errorf("%d operations: %v", c.most+1, err)
			}
			if s.Visible() != before {
				t.Error("a refused write has changed something")
			}
			if err := c.run(x, c.most); err != nil {
				t.Errorf("%d operations: %v", c.most, err)
			}
		})
	}
}

// TestOneOperationFitsWhateverItSets: a limit of one operation admits a put with a deadline.
func TestOneOperationFitsWhateverItSets(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Limits.BatchOps = 1
	x := mustSession(t, mustOpen(t, o))
	defer x.Close()
	w := &Write{Durability: DurabilityAsync}
	w.SetWithMetadata([]byte("k"), []byte("v"), &metadata.Fields{ExpiresAt: far})
	if _, err := commitAndWait(x, w); err != nil {
		t.Error(err)
	}
	ops := []Invoke{{Kind: InvokeTouch, Key: []byte("k"), ExpiresAt: far + 1}}
	if _, err := x.InvokeAll(t.Context(), ops, nil, DurabilityAsync, make([]Invoked, 1)); err != nil {
		t.Error(err)
	}
}

// TestCommitsOfTheStoreAreNotCounted: one may set more deadlines than a client's.
func TestCommitsOfTheStoreAreNotCounted(t *testing.T) {
	_, x := countingStore(t)
	w := &Write{Durability: DurabilityAsync}
	w.SetOwn()
	for i := range countingMost {
		w.SetWithMetadata(countingKey(i), []byte("v"), &metadata.Fields{ExpiresAt: far})
	}
	if _, err := commitAndWait(x, w); err != nil {
		t.Error(err)
	}
}
