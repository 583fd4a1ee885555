//go:build invariants

package mvcc

import (
	"context"
	"errors"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestConflictInTheWindowAwaitsWhatItReveals: a SYNC commit that comes between the first look of a validation and the epoch is revealed by the
// conflict as much as one that came before, and a crash could still take it back. An asynchronous one promises nothing.
func TestConflictInTheWindowAwaitsWhatItReveals(t *testing.T) {
	get := func(tx *Txn) error { _, err := tx.Get(nil, []byte("r")); return err }
	scan := func(tx *Txn) error {
		_, err := tx.DeleteRange(context.Background(), []byte("r"), []byte("s"))
		return err
	}
	for name, test := range map[string]struct {
		durability Durability
		read       func(tx *Txn) error
		value      int // bytes; a large record has its epoch in a segment of its own
	}{
		"key": {DurabilitySync, get, 0}, "range": {DurabilitySync, scan, 0}, "asynchronous": {DurabilityAsync, get, 0},
		"key, large": {DurabilityAsync, get, 40_000}, "range, large": {DurabilityAsync, scan, 40_000},
	} {
		t.Run(name, func(t *testing.T) {
			fs := &stuckFS{FS: vfs.NewMem(), suffix: ".log"}
			s := mustOpen(t, tiny(fs))
			x, other := mustSession(t, s), mustSession(t, s)
			defer x.Close()
			defer other.Close()
			if test.value == 0 {
				defer fs.hold()()
			}
			tx, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(test.read(tx), tx.Set([]byte("k"), make([]byte, test.value))); err != nil {
				t.Fatal(err)
			}
			var epoch keys.Epoch
			x.committing.atStep = func(step commitStep) {
				if step != stepChecked || epoch != 0 {
					return
				}
				w := Write{Durability: test.durability}
				w.Set([]byte("r"), nil)
				if epoch, err = other.Commit(context.Background(), &w); err != nil {
					t.Error(err)
				}
			}
			var conflict *ConflictError
			if _, err := tx.Commit(context.Background()); !errors.As(err, &conflict) || conflict.Epoch != epoch {
				t.Fatalf("no conflict with epoch %d: %v", epoch, err)
			}
			want := epoch
			if test.durability == DurabilityAsync {
				want = 0
			}
			if got := x.Await(); got != want {
				t.Errorf("the conflict is told once epoch %d is durable, and reveals epoch %d", got, epoch)
			}
		})
	}
}
