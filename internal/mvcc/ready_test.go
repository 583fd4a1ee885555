package mvcc

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// whileLatched runs do while another session holds the latch of a key, and a commit that comes meanwhile waits for it. It returns when the latch is
// held; done is closed at the end.
func whileLatched(t *testing.T, s *Store, of []byte, do func()) (done chan struct{}) {
	t.Helper()
	held, done := make(chan struct{}), make(chan struct{})
	other := mustSession(t, s)
	began := false
	other.Permit(func() error {
		if !began {
			began = true
			close(held)
			time.Sleep(200 * time.Millisecond)
			do()
		}
		return nil
	})
	go func() {
		defer close(done)
		defer other.Close()
		w := Write{Durability: DurabilityAsync}
		w.Set([]byte(besideInStripe(s, of)), nil)
		if _, err := other.Commit(context.Background(), &w); err != nil {
			t.Error(err)
		}
	}()
	<-held
	return done
}

// otherStripes returns a function that makes keys with a prefix and a latch that no key of a write has.
func otherStripes(s *Store, w *Write) func(prefix string) []byte {
	held := make(map[int]bool)
	for i := range w.Batch.Count() {
		held[s.latches.stripe(w.Batch.Key(i))] = true
	}
	return func(prefix string) []byte {
		for i := 0; ; i++ {
			if key := fmt.Appendf(nil, "%s%d", prefix, i); !held[s.latches.stripe(keys.Append(nil, keys.SpaceUser, key))] {
				return key
			}
		}
	}
}

// startCommit commits in a session of its own, and sends how that ends.
func startCommit(t *testing.T, s *Store, w *Write) chan error {
	t.Helper()
	x, done := mustSession(t, s), make(chan error, 1)
	go func() {
		defer x.Close()
		_, err := x.Commit(context.Background(), w)
		done <- err
	}()
	return done
}

// TestOnlyDeletionsHaveTheLogsReserve: on a full disk a large record of deletions takes the place of the reserve. The deletions of an InvokeAll are placeholders.
func TestOnlyDeletionsHaveTheLogsReserve(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	for name, c := range map[string]struct {
		fill  func(*Write)
		frees bool
	}{
		"deletion":   {func(*Write) {}, true},
		"invocation": {func(w *Write) { w.ops = []Invoke{{Kind: InvokeMax, Key: []byte("k")}} }, false},
		"put":        {func(w *Write) { w.Set([]byte("other"), nil) }, false},
	} {
		var w Write
		w.Delete([]byte("k"))
		if c.fill(&w); x.demand(&w).Frees != c.frees {
			t.Errorf("%s: frees: %t", name, !c.frees)
		}
	}
}

// TestACommitOfManyKeysWaitsForRoomWithoutLatches: others write its keys meanwhile, as long as the memtable has room for them. Memory becomes full before
// the commit, or while it waits for its latches.
func TestACommitOfManyKeysWaitsForRoomWithoutLatches(t *testing.T) {
	for _, latched := range []bool{false, true} {
		t.Run(fmt.Sprint("latched ", latched), func(t *testing.T) {
			for tries := 1; !waitsWithoutLatches(t, latched); tries++ {
				if tries == 20 {
					t.Fatal("whenever memory is full, so is the memtable")
				}
			}
		})
	}
}

// waitsWithoutLatches reports false if the memtable has become full together with memory, so that the commits of others would wait, too.
func waitsWithoutLatches(t *testing.T, latched bool) bool {
	t.Helper()
	fs := &stuckFS{FS: vfs.NewMem(), suffix: ".ekv"}
	o := tiny(fs)
	o.Storage.MemoryBytes, o.Storage.StallMax = 6<<20, time.Hour
	o.Storage.MemtableBytes, o.Storage.SegmentBytes = 1<<20, 1<<20
	s := mustOpen(t, o)
	large := Write{Durability: DurabilityAsync}
	for i := range 200 {
		large.Set(fmt.Append(nil, "key", i), make([]byte, 3000))
	}
	filler := string(otherStripes(s, &large)("filler"))
	release := fs.hold()
	fill := func() {
		for !s.engine.AwaitsMerge() {
			mustPutAsync(t, s, filler, string(make([]byte, 10_000)))
		}
	}
	filled := make(chan struct{})
	if latched {
		filled = whileLatched(t, s, []byte("key7"), fill)
	} else {
		fill()
		close(filled)
	}
	stalls, done := s.Stats().Storage.Backpressure.Stalls, startCommit(t, s, &large)
	<-filled
	eventually(t, "the commit waits for memory", func() bool { return s.Stats().Storage.Backpressure.Stalls > stalls })
	if turnsTaken(s) > 0 {
		t.Error("a commit that waits for memory has the turn of another")
	}
	other := mustSession(t, s)
	defer other.Close()
	if !s.engine.HasRoom(&storage.Demand{Body: batch.Contiguous(make([]byte, 200*100)), Records: 200}) {
		release()
		if err := <-done; err != nil {
			t.Error(err)
		}
		return false
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for i := range 200 {
		w := Write{Durability: DurabilityAsync}
		w.Set(fmt.Append(nil, "key", i), nil)
		if _, err := other.Commit(ctx, &w); err != nil {
			t.Errorf("key %d: %v", i, err)
			break
		}
	}
	if len(done) > 0 {
		t.Error("the commit did not wait: this tests nothing")
	}
	release()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if got := get(t, s, "key199", 0); len(got) != 3000 {
		t.Errorf("key199 is %q", got)
	}
	return true
}

// TestALargeCommitLeavesMemoryForOthers: beside what is not merged yet it would fill memory, and the next small commit would wait for its merge. So
// it waits for the merges before it, but not for ever.
func TestALargeCommitLeavesMemoryForOthers(t *testing.T) {
	for _, merged := range []bool{true, false} {
		t.Run(fmt.Sprint("merged ", merged), func(t *testing.T) {
			fs := &stuckFS{FS: vfs.NewMem(), suffix: ".ekv"}
			o := tiny(fs)
			o.Storage.MemoryBytes, o.Storage.StallMax = 8<<20, time.Hour
			if !merged {
				o.Storage.StallMax = 400 * time.Millisecond
			}
			o.Storage.MemtableBytes, o.Storage.SegmentBytes = 1<<20, 1<<20
			s := mustOpen(t, o)
			release := sync.OnceFunc(fs.hold())
			defer release()
			for i := range 300 {
				mustPutAsync(t, s, fmt.Sprint("small", i), string(make([]byte, 4000)))
			}
			large := Write{Durability: DurabilityAsync}
			for i := range 200 {
				large.Set(fmt.Append(nil, "key", i), make([]byte, 20_000))
			}
			stalls, done := s.Stats().Storage.Backpressure.Stalls, startCommit(t, s, &large)
			eventually(t, "the commit waits for memory", func() bool { return s.Stats().Storage.Backpressure.Stalls > stalls })
			if len(done) > 0 || s.engine.AwaitsMerge() {
				t.Error("memory was full before, or the commit has not waited: this tests nothing")
			}
			if !merged {
				eventually(t, "the commit goes on", func() bool { return len(get(t, s, "key199", 0)) == 20_000 })
			}
			release()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

// TestALargeCommitWaitsForTheOneBefore: that one is in the active generation, which is larger than others by far, and which a merge takes only once
// it has been replaced. Others write meanwhile. It is large by its bytes, however few its keys are.
func TestALargeCommitWaitsForTheOneBefore(t *testing.T) {
	for name, c := range map[string]struct {
		keys     int
		exchange bool
	}{"many keys": {keys: 200}, "few keys": {keys: 3}, "few exchanges": {keys: 3, exchange: true}} {
		t.Run(name, func(t *testing.T) {
			fs := &stuckFS{FS: vfs.NewMem(), suffix: ".ekv"}
			o := tiny(fs)
			o.Storage.MemoryBytes, o.Storage.StallMax = 8<<20, time.Hour
			o.Storage.MemtableBytes, o.Storage.SegmentBytes = 1<<20, 1<<20
			s := mustOpen(t, o)
			large := func(bytes int) *Write {
				if !c.exchange {
					w := &Write{Durability: DurabilityAsync}
					for i := range c.keys {
						w.Set(fmt.Append(nil, "key", i), make([]byte, bytes/c.keys))
					}
					return w
				}
				var ops []Invoke
				for i := range c.keys {
					ops = append(ops, Invoke{Kind: InvokeGetAndSet, Key: fmt.Append(nil, "key", i), Operand: make([]byte, bytes/c.keys)})
				}
				return invoking(ops, nil)
			}
			if err := <-startCommit(t, s, large(3_000_000)); err != nil {
				t.Fatal(err)
			}
			release := sync.OnceFunc(fs.hold())
			defer release()
			before := s.Stats().Storage
			if s.engine.AwaitsMerge() || before.Rotations == 0 {
				t.Fatal("memory is full, or the commit was not large: this tests nothing")
			}
			stalls, done := before.Backpressure.Stalls, startCommit(t, s, large(3_200_000))
			eventually(t, "the commit waits for memory", func() bool { return s.Stats().Storage.Backpressure.Stalls > stalls })
			for i := range 20 {
				mustPutAsync(t, s, fmt.Sprint("small", i), string(make([]byte, 4000)))
			}
			if len(done) > 0 {
				t.Error("the commit has not waited")
			}
			release()
			if err := <-done; err != nil {
				t.Error(err)
			}
			if v := get(t, s, fmt.Sprint("key", c.keys-1), 0); len(v) != 3_200_000/c.keys {
				t.Errorf("a value of %d bytes", len(v))
			}
		})
	}
}

// TestALargeCommitWaitsForNoMergeThatIsBlocked: on a full disk it may be the deletion that makes space.
func TestALargeCommitWaitsForNoMergeThatIsBlocked(t *testing.T) {
	fs := vfs.NewFaulty(vfs.NewMem())
	o := tiny(fs)
	o.Storage.MemoryBytes, o.Storage.StallMax = 24<<20, time.Hour
	o.Storage.MemtableBytes, o.Storage.SegmentBytes = 1<<20, 1<<20
	s := mustOpen(t, o)
	full := fs.Inject(vfs.Rule{Op: vfs.OpPreallocate, Name: "data.ekv", Err: syscall.ENOSPC})
	t.Cleanup(full.Remove)
	large := func() *Write {
		w := &Write{Durability: DurabilityAsync}
		for i := range 8 {
			w.Set(fmt.Append(nil, "large", i), make([]byte, 1_000_000))
		}
		return w
	}
	if err := <-startCommit(t, s, large()); err != nil {
		t.Fatal(err)
	}
	if err := s.Checkpoint(t.Context()); !errors.Is(err, vfs.ErrNoSpace) {
		t.Fatal(err)
	}
	select {
	case err := <-startCommit(t, s, large()):
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("it waits")
	}
}

// TestNoPageIsReadAgainUnderLatches: a merge takes what a commit has validated, while it waits for its latches. The cache has room for few pages.
func TestNoPageIsReadAgainUnderLatches(t *testing.T) {
	testseed.SkipUnderRace(t)
	const count = 4000
	for _, c := range []struct {
		name   string
		latch  string
		commit func(*Txn, *Write) error
	}{
		{"write set", "key000007", func(txn *Txn, w *Write) error {
			for i := range w.Batch.Count() {
				if err := txn.Set(keys.User(w.Batch.Key(i)), nil); err != nil {
					return err
				}
			}
			return nil
		}},
		{"read set of points", "other", func(txn *Txn, w *Write) error {
			for i := range w.Batch.Count() {
				if _, err := txn.Get(nil, keys.User(w.Batch.Key(i))); err != nil {
					return err
				}
			}
			return txn.Set([]byte("other"), nil)
		}},
		{"read set of ranges", "other", func(txn *Txn, w *Write) error {
			for i := range w.Batch.Count() {
				key := keys.User(w.Batch.Key(i))
				cursor, err := txn.Scan(ScanOptions{Lower: key, Upper: append(key[:len(key):len(key)], 0)})
				if err != nil {
					return err
				}
				for cursor.Next() {
				}
				cursor.Close()
				if err := cursor.Err(); err != nil {
					return err
				}
			}
			return txn.Set([]byte("other"), nil)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := mustOpen(t, smallCache(vfs.NewMem()))
			var all, beside Write
			for i := range count {
				key := fmt.Appendf(nil, "key%06d", i)
				all.Set(key, nil)
				mustPutAsync(t, s, string(key), string(make([]byte, 1000)))
			}
			mustCheckpoint(t, s)
			all.Set([]byte("other"), nil)
			other := otherStripes(s, &all)
			for i := range count {
				beside.Set(other(fmt.Sprintf("key%06d beside", i)), nil)
			}
			x := mustSession(t, s)
			defer x.Close()
			txn, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
			if err != nil {
				t.Fatal(err)
			}
			if err := c.commit(txn, &all); err != nil {
				t.Fatal(err)
			}
			x.reader.TakeReads()
			merged := whileLatched(t, s, []byte(c.latch), func() { // one of the keys of each leaf, all of which the tree has then
				y := mustSession(t, s)
				defer y.Close()
				beside.Durability = DurabilityAsync
				if _, err := y.Commit(t.Context(), &beside); err != nil {
					t.Error(err)
				}
				mustCheckpoint(t, s)
			})
			before, latched := uint64(0), false
			x.Permit(func() error { // the latches are held
				if !latched {
					latched = true
					before, _ = x.reader.TakeReads()
				}
				return nil
			})
			if _, err := txn.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			<-merged
			if n, _ := x.reader.TakeReads(); n > 16 || before < 100 { // of the session: a checkpoint reads at the same time
				t.Errorf("%d reads of the device while the latches are held, and %d before", n, before)
			}
		})
	}
}

// smallCache are options of a store whose memtables have room for far more than its cache.
func smallCache(files vfs.FS) Options {
	return Options{Storage: storage.Options{
		Dir: "db", FS: files, MemoryBytes: 256 << 20, CacheBytes: 1 << 20, MemtableBytes: 4 << 20, SegmentBytes: 4 << 20, CheckpointBytes: 8 << 20,
	}}
}

// TestAWindowReadsOnlyWhatWasWritten: between the reservation and the installation every later commit waits. If a merge has taken what was
// committed since the validation, the window looks at the pages that have something newer, and not at those of all that was read.
func TestAWindowReadsOnlyWhatWasWritten(t *testing.T) {
	const count = 4000
	files := vfs.NewFaulty(vfs.NewMem())
	s := mustOpen(t, smallCache(files))
	key := func(i int) []byte { return fmt.Appendf(nil, "key%06d", i) }
	for i := range count {
		mustPutAsync(t, s, string(key(i)), string(make([]byte, 1000)))
	}
	mustCheckpoint(t, s)
	x := mustSession(t, s)
	defer x.Close()
	txn, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
	if err != nil {
		t.Fatal(err)
	}
	defer txn.Rollback()
	for i := range count {
		if _, err := txn.Get(nil, key(i)); err != nil {
			t.Fatal(err)
		}
	}
	mustPutAsync(t, s, "key000000 beside", "")
	mustCheckpoint(t, s)
	reads := files.Inject(vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Fault: vfs.Slow})
	txn.reads.sort()
	x.slot.Enter()
	err = x.unchanged(t.Context(), &txn.reads, s.engine.Reserved()+1)
	x.slot.Leave()
	if n := reads.Fired(); n > 32 || err != nil {
		t.Errorf("%d reads of the device in the window, for %d keys that were read: %v", n, count, err)
	}
}

// TestALargeCommitWaitsForNothingThatCameAfterIt: while others write without a pause there is always something to merge, and a large commit would go on
// only after a part of StallMax, which may be longer than its client waits.
func TestALargeCommitWaitsForNothingThatCameAfterIt(t *testing.T) {
	later := &stuckFS{FS: vfs.NewMem(), suffix: ".ekv"}
	fs := &stuckFS{FS: later, suffix: ".ekv"}
	o := tiny(fs)
	o.Storage.MemoryBytes, o.Storage.StallMax = 24<<20, time.Hour
	o.Storage.MemtableBytes, o.Storage.SegmentBytes = 1<<20, 1<<20
	s := mustOpen(t, o)
	large := func(bytes int) *Write {
		w := &Write{Durability: DurabilityAsync}
		w.Set([]byte("large"), make([]byte, bytes))
		return w
	}
	if err := <-startCommit(t, s, large(8_000_000)); err != nil {
		t.Fatal(err)
	}
	release := sync.OnceFunc(fs.hold())
	defer release()
	before := s.Stats().Storage
	done := startCommit(t, s, large(15_000_000))
	eventually(t, "the commit waits for memory", func() bool { return s.Stats().Storage.Backpressure.Stalls > before.Backpressure.Stalls })
	for i := range 36 {
		mustPutAsync(t, s, fmt.Sprint("small", i), string(make([]byte, 100_000)))
	}
	if len(done) > 0 || s.engine.AwaitsMerge() {
		t.Fatal("memory is full, or the commit has not waited: this tests nothing")
	}
	largeIn := before.Generations[len(before.Generations)-1].First
	later.once = func() bool { return s.Stats().Storage.Generations[0].First > largeIn } // it is merged
	defer later.hold()()
	release()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("the commit waits for what was written after it")
	}
	if len(s.Stats().Storage.Generations) < 2 {
		t.Error("everything is merged: this tests nothing")
	}
}
