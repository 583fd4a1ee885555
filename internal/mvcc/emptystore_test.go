package mvcc

import (
	"context"
	"errors"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestTransactionOfTheEmptyStoreConflictsWithADeletion: the first commit deletes a key that a transaction of the empty store
// writes. A checkpoint keeps the tombstone, so that the conflict is found, as long as the transaction is open.
func TestTransactionOfTheEmptyStoreConflictsWithADeletion(t *testing.T) {
	for _, isolation := range []Isolation{IsolationSnapshot, IsolationSerializable} {
		s := mustOpen(t, tiny(vfs.NewMem()))
		x, other := mustSession(t, s), mustSession(t, s)
		tx, err := x.Begin(TxnOptions{Isolation: isolation})
		if err != nil || tx.At() != 0 {
			t.Fatalf("a transaction of the empty store is at epoch %d, %v", tx.At(), err)
		}
		if err := tx.Set([]byte("k"), []byte("v")); err != nil {
			t.Fatal(err)
		}
		w := Write{}
		w.Delete([]byte("k"))
		if e, err := other.Commit(context.Background(), &w); err != nil || e != 1 {
			t.Fatalf("the deletion has epoch %d, %v", e, err)
		}
		for range 3 {
			mustCheckpoint(t, s)
			s.collector.collect(nil, true)
		}
		if _, err := tx.Commit(context.Background()); !isConflict(err) {
			t.Errorf("isolation %d: %v, expected a conflict", isolation, err)
		}
		x.Close()
		other.Close()
	}
}

func isConflict(err error) bool {
	_, ok := errors.AsType[*ConflictError](err)
	return ok
}
