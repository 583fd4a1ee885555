package mvcc

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"epochkv/internal/vfs"
)

// TestCommitBetweenValidationAndEpochIsAConflict: a commit with a smaller epoch, which was not installed when the transaction validated
// what it read.
func TestCommitBetweenValidationAndEpochIsAConflict(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	for _, read := range []func(tx *Txn) error{
		func(tx *Txn) error { _, err := tx.Get(nil, []byte("hole")); return err },
		func(tx *Txn) error { _, err := tx.DeleteRange([]byte("h"), []byte("i")); return err },
	} {
		behindHole(t, s, func() error {
			tx, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
			if err != nil {
				return err
			}
			if err := errors.Join(read(tx), tx.Set([]byte("k"), []byte("v"))); err != nil {
				return err
			}
			var conflict *ConflictError
			if _, err := tx.Commit(); !errors.As(err, &conflict) {
				return fmt.Errorf("no conflict: %w", err)
			}
			return nil
		}, func() {})
		var w Write
		w.Delete([]byte("hole"))
		if _, err := commitAndWait(x, &w); err != nil {
			t.Fatal(err)
		}
	}
	if got := get(t, s, "k", 0); got != "-" {
		t.Fatalf("a transaction that conflicted has written %q", got)
	}
}

// TestConflictIsFoundInWhateverGenerationItLies: between validation and reservation the log rotates several times, and a
// checkpoint merges what came in between, whose memtables the validation has never seen.
func TestConflictIsFoundInWhateverGenerationItLies(t *testing.T) {
	for _, at := range []int{0, 1, 2, 3} { // rotations before the conflicting commit
		for _, merged := range []bool{false, true} {
			for _, ranged := range []bool{false, true} {
				t.Run(fmt.Sprintf("rotations=%d/merged=%v/range=%v", at, merged, ranged), func(t *testing.T) {
					conflictBehindRotations(t, at, merged, ranged)
				})
			}
		}
	}
}

func conflictBehindRotations(t *testing.T, rotations int, merged, ranged bool) {
	t.Helper()
	s := mustOpen(t, tiny(vfs.NewMem()))
	mustPut(t, s, "p", "old")
	x := mustSession(t, s)
	defer x.Close()
	tx, err := x.Begin(TxnOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if ranged {
		_, err = tx.DeleteRange([]byte("p"), []byte("q"))
	} else {
		_, err = tx.Get(nil, []byte("p"))
	}
	if err != nil {
		t.Fatal(err)
	}
	tx.cursor.Close()
	x.slot.Enter()
	if err := x.validate(&tx.reads); err != nil {
		t.Fatal(err)
	}
	rotate := func(times int) {
		for i := range times {
			mustPut(t, s, fmt.Sprintf("other-%d", i), "v")
			if err := s.engine.Rotate(); err != nil {
				t.Fatal(err)
			}
		}
	}
	rotate(rotations)
	mustPut(t, s, "p", "new")
	rotate(3 - rotations)
	if merged {
		if err := s.Checkpoint(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	var conflict *ConflictError
	if err := x.validateSince(&tx.reads, s.Visible()+1); !errors.As(err, &conflict) {
		t.Fatalf("the change was not seen: %v", err)
	}
	x.slot.Leave()
}
