package mvcc

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestCommitBetweenValidationAndEpochIsAConflict: a commit with a smaller epoch, which was not
// installed when the transaction validated what it read.
func TestCommitBetweenValidationAndEpochIsAConflict(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	for _, read := range []func(tx *Txn) error{
		func(tx *Txn) error { _, err := tx.Get(nil, []byte("hole")); return err },
		func(tx *Txn) error {
			_, err := tx.DeleteRange(context.Background(), []byte("h"), []byte("i"))
			return err
		},
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

// TestConflictIsFoundInEveryGeneration: between validation and reservation the log rotates several
// times, and a checkpoint merges what came in between, whose memtables the validation has never
// seen.
func TestConflictIsFoundInEveryGeneration(t *testing.T) {
	for _, at := range []int{0, 1, 2, 3} { // rotations before the conflicting commit
		for _, merged := range []bool{false, true} {
			for _, ranged := range []bool{false, true} {
				t.Run(fmt.Sprintf("rotations=%d/merged=%v/range=%v", at, merged, ranged), func(t *testing.T) {
					conflictBehindRotations(t, at, 3, merged, ranged)
					conflictBehindRotations(t, 0, 0, merged, ranged)
				})
			}
		}
	}
}

// conflictBehindRotations lets a key change after so many rotations of as many as last.
func conflictBehindRotations(t *testing.T, rotations, last int, merged, ranged bool) {
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
		_, err = tx.DeleteRange(context.Background(), []byte("p"), []byte("q"))
	} else {
		_, err = tx.Get(nil, []byte("p"))
	}
	if err != nil {
		t.Fatal(err)
	}
	tx.cursor.Close()
	x.slot.Enter()
	ctx := context.Background()
	if err := x.validate(ctx, &tx.reads); err != nil {
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
	rotate(last - rotations)
	if merged {
		if err := s.Checkpoint(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	defer x.slot.Leave()
	var own batch.Builder
	own.Set(keys.SpaceUser, []byte("own"), nil)
	body, err := own.Finish()
	if err != nil {
		t.Fatal(err)
	}
	var conflict *ConflictError
	epoch, err := x.store.engine.ReserveValidated(&tx.reads.validation, &x.committing.writer, body)
	if last > 0 || merged {
		if !errors.Is(err, storage.ErrRotating) {
			t.Fatalf("epoch %d, %v: reserved in a generation that was not validated", epoch, err)
		}
		if err := x.validate(ctx, &tx.reads); !errors.As(err, &conflict) {
			t.Fatalf("the change was not seen: %v", err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	err = x.validateWindow(ctx, &tx.reads, epoch)
	x.store.engine.NoOp(&x.committing.writer)
	s.counters.noOps.Add(1)
	s.watermark.markInstalled(epoch)
	if !errors.As(err, &conflict) {
		t.Fatalf("the change was not seen: %v", err)
	}
}

// TestScanThatEndsEarlyReadsUpToItsLastKey: what was walked over counts as read, gaps and both ends
// included, and nothing else does.
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

// TestConflictIsReportedOnceARetryWouldSeeIt: what beat the transaction is installed, and hidden by
// a smaller epoch that is not.
func TestConflictIsReportedOnceARetryWouldSeeIt(t *testing.T) {
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
				return fmt.Errorf("a conflict with %d is reported at %d", at, newer)
			}
			return nil
		}, func() {})
		x.Close()
		y.Close()
	}
}

// TestWindowChecksCommitsAndNotTheRange: what a range delete or a transaction does between its
// reservation and its install, while all later commits wait, depends on how many keys were written
// since it was validated, and not on how much it read.
func TestWindowChecksCommitsAndNotTheRange(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Storage.MemtableBytes, o.Storage.SegmentBytes = 16<<20, 16<<20 // no rotation between validation and reservation
	s := mustOpen(t, o)
	const keysInRange, keysSince = 20_000, 5
	x := mustSession(t, s)
	defer x.Close()
	w := Write{Durability: DurabilityAsync}
	for i := range keysInRange {
		w.Set(fmt.Appendf(nil, "r/%06d", i), nil)
	}
	if _, err := commitAndWait(x, &w); err != nil {
		t.Fatal(err)
	}
	for name, read := range map[string]func(tx *Txn) error{
		"range": func(tx *Txn) error {
			c, err := tx.Scan(ScanOptions{Lower: []byte("r/"), Upper: []byte("r0")})
			for err == nil && c.Next() {
				continue
			}
			return errors.Join(err, c.Err())
		},
		"points": func(tx *Txn) error {
			for i := range keysInRange {
				if _, err := tx.Get(nil, fmt.Appendf(nil, "r/%06d", i)); err != nil {
					return err
				}
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			tx, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(read(tx), tx.Set([]byte("own"), nil)); err != nil {
				t.Fatal(err)
			}
			tx.cursor.Close()
			body, err := func() (*batch.Body, error) {
				var b batch.Builder
				b.Set(keys.SpaceUser, []byte("own"), nil)
				return b.Finish()
			}()
			if err != nil {
				t.Fatal(err)
			}
			x.slot.Enter()
			if err := x.validate(t.Context(), &tx.reads); err != nil {
				t.Fatal(err)
			}
			for i := range keysSince {
				mustPut(t, s, fmt.Sprintf("other/%d", i), "v")
			}
			epoch, err := s.engine.ReserveValidated(&tx.reads.validation, &x.committing.writer, body)
			if err != nil {
				t.Fatal(err)
			}
			err = x.validateWindow(t.Context(), &tx.reads, epoch)
			s.engine.NoOp(&x.committing.writer)
			s.counters.noOps.Add(1)
			s.watermark.markInstalled(epoch)
			x.slot.Leave()
			if err != nil {
				t.Error(err)
			}
			if tx.reads.windowKeys != keysSince {
				t.Errorf("the window has checked %d keys; %d were written since", tx.reads.windowKeys, keysSince)
			}
			tx.Rollback()
		})
	}
}

// TestReadSetFindsWhatWasRead: sorted and joined, a read set has the keys and ranges that went into
// it, and no others.
func TestReadSetFindsWhatWasRead(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1))
		var r readSet
		var read [64]bool // by the key's one byte after the keyspace
		key := func(i int) []byte { return []byte{byte(keys.SpaceUser), byte(i)} }
		for range random.IntN(8) {
			i := random.IntN(64)
			r.addPoint(key(i))
			read[i] = true
		}
		for range random.IntN(8) {
			from := random.IntN(64)
			to := from + random.IntN(10)
			r.addRange(key(from), key(to))
			for i := from; i < min(to, 64); i++ {
				read[i] = true
			}
		}
		r.sort()
		for i := range read {
			if r.has(key(i)) != read[i] {
				t.Fatalf("seed %d: key %d: %v, read: %v", seed, i, !read[i], read[i])
			}
		}
	}
}

// TestWalkOverRangesLeavesTheGuard: the validation of many ranges, each of which may read pages, pauses as
// that of many keys does, and ends with its context.
func TestWalkOverRangesLeavesTheGuard(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	mustPut(t, s, "k", "v")
	mustCheckpoint(t, s)
	var r readSet
	r.init()
	const ranges = 10 * checkContextEvery
	for i := range ranges {
		r.addRange(keys.Append(nil, keys.SpaceUser, fmt.Appendf(nil, "%05d", 2*i)), keys.Append(nil, keys.SpaceUser, fmt.Appendf(nil, "%05d", 2*i+1)))
	}
	x.slot.Enter()
	defer x.slot.Leave()
	pauses := 0
	if err := x.walk(context.Background(), &r, func() error { pauses++; return nil }); err != nil || pauses < ranges/checkContextEvery-1 {
		t.Errorf("%d pauses in %d ranges, %v", pauses, ranges, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := x.rangesUnchanged(&r, keys.MaxEpoch, x.pauseIn(ctx)); !errors.Is(err, context.Canceled) {
		t.Errorf("without a client the walk ends with %v", err)
	}
	r.checked = 0 // the tree may have later versions
	if err := x.unchanged(ctx, &r, keys.MaxEpoch); !errors.Is(err, context.Canceled) {
		t.Errorf("without a client the window ends with %v", err)
	}
}

// TestTheWindowOfALargeRecordReadsNoPages: a record that takes more than half of a segment has its epoch before the last validation, and every later
// commit waits for it. What the transaction has read is not in the cache any more.
func TestTheWindowOfALargeRecordReadsNoPages(t *testing.T) {
	const count = 200
	files := vfs.NewFaulty(vfs.NewMem())
	o := tiny(files)
	o.Storage.PageSize, o.Storage.CacheBytes = 512, 16<<10
	s := mustOpen(t, o)
	key := func(i int) string { return fmt.Sprintf("key%06d", i) }
	for i := range count {
		mustPutAsync(t, s, key(i), string(make([]byte, 100)))
	}
	mustCheckpoint(t, s)
	x := mustSession(t, s)
	defer x.Close()
	for name, test := range map[string]struct {
		merged   string // a key that another commit writes while the record waits for its segment, and that is merged then
		conflict bool
	}{"": {"", false}, "a merge meanwhile": {"other", false}, "a merge of what was read": {key(count / 2), true}} {
		if test.merged != "" && !invariants.Enabled {
			continue // the commit cannot be stopped there
		}
		t.Run(name, func(t *testing.T) {
			tx, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
			if err != nil {
				t.Fatal(err)
			}
			for i := range count {
				if _, err := tx.Get(nil, []byte(key(i))); err != nil {
					t.Fatal(err)
				}
			}
			if err := tx.Set([]byte("large"), make([]byte, o.Storage.SegmentBytes*3/4)); err != nil {
				t.Fatal(err)
			}
			x.committing.atStep = func(step commitStep) {
				if step == stepChecked && test.merged != "" {
					mustPutAsync(t, s, test.merged, "v")
					mustCheckpoint(t, s)
					test.merged = ""
				}
			}
			defer func() { x.committing.atStep = nil }()
			reads := files.Inject(vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Fault: vfs.Slow})
			asked, before := 0, 0
			x.Permit(func() error { // the second time once it has its epoch
				asked, before = asked+1, reads.Fired()
				return nil
			})
			_, err = tx.Commit(t.Context())
			if conflict := errors.As(err, new(*ConflictError)); conflict != test.conflict || err != nil && !conflict {
				t.Fatal(err)
			}
			if asked != 2 { // a conflict is found before the commit has its epoch, and then it is asked for once more: with the epoch that would be three
				t.Errorf("permission was asked for %d times", asked)
			}
			if n := reads.Fired() - before; !test.conflict && n > count/10 { // another goroutine may read some
				t.Errorf("%d reads of the device while other commits wait", n)
			}
		})
	}
}
