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
			if _, err := tx.Commit(context.Background()); !errors.As(err, &conflict) {
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
			if err := s.engine.Rotate(context.Background()); err != nil {
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
	if err := x.validateSince(context.Background(), &tx.reads, s.Visible()+1); !errors.As(err, &conflict) {
		t.Fatalf("the change was not seen: %v", err)
	}
	x.slot.Leave()
}

// TestScanThatEndsEarlyReadsUpToItsLastKey: what was walked over counts as read, gaps and both ends included, and nothing else does.
func TestScanThatEndsEarlyReadsUpToItsLastKey(t *testing.T) {
	for _, c := range []struct {
		reverse  bool
		changed  string
		conflict bool
	}{
		{false, "0", true},
		{false, "a", true},
		{false, "aa", true},
		{false, "b", true},
		{false, "bb", false},
		{false, "c", false},
		{true, "dd", true},
		{true, "d", true},
		{true, "cc", true},
		{true, "c", true},
		{true, "bb", false},
		{true, "b", false},
	} {
		t.Run(fmt.Sprintf("reverse=%v/changed=%s", c.reverse, c.changed), func(t *testing.T) {
			s := mustOpen(t, tiny(vfs.NewMem()))
			for _, k := range []string{"a", "b", "c", "d"} {
				mustPut(t, s, k, "old")
			}
			x := mustSession(t, s)
			defer x.Close()
			tx, err := x.Begin(TxnOptions{})
			if err != nil {
				t.Fatal(err)
			}
			cursor, err := tx.Scan(ScanOptions{Reverse: c.reverse})
			if err != nil {
				t.Fatal(err)
			}
			if first, second := cursor.Next(), cursor.Next(); !first || !second {
				t.Fatal(cursor.Err())
			}
			mustPut(t, s, c.changed, "new")
			if err := tx.Set([]byte("elsewhere"), []byte("v")); err != nil {
				t.Fatal(err)
			}
			var conflict *ConflictError
			if _, err := tx.Commit(context.Background()); errors.As(err, &conflict) != c.conflict {
				t.Fatalf("commit: %v", err) // with the cursor still open
			}
		})
	}
}

// TestConflictIsToldOnceARetrySeesIt: what beat the transaction is installed, and hidden by a smaller epoch that is not.
func TestConflictIsToldOnceARetrySeesIt(t *testing.T) {
	for _, read := range []bool{false, true} { // found among the writes, or among the reads
		s := mustOpen(t, tiny(vfs.NewMem()))
		x, y := mustSession(t, s), mustSession(t, s)
		behindHole(t, s, func() error {
			tx, err := x.Begin(TxnOptions{})
			if err != nil {
				return err
			}
			mine := "k"
			if read {
				mine = "mine"
				if _, err := tx.Get(nil, []byte("k")); err != nil {
					return err
				}
			}
			if err := tx.Set([]byte(mine), []byte("x")); err != nil {
				return err
			}
			w := Write{Durability: DurabilityAsync}
			w.Set([]byte("k"), []byte("y"))
			newer, err := y.Commit(context.Background(), &w)
			if err != nil {
				return err
			}
			var conflict *ConflictError
			if _, err := tx.Commit(context.Background()); !errors.As(err, &conflict) {
				return fmt.Errorf("no conflict: %w", err)
			}
			if at := s.Visible(); at < newer {
				return fmt.Errorf("told at %d that %d is in the way", at, newer)
			}
			return nil
		}, func() {})
		x.Close()
		y.Close()
	}
}
