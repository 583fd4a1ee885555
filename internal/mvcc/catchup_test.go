package mvcc

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// With -validation.keys=2000000 it is the measurement that docs/adr/0034 names.
var (
	validationKeys = flag.Int("validation.keys", 100_000/(1+4*testseed.RaceDetector), "keys of a range that is validated while another session writes")
	validationTime = flag.Duration("validation.time", 200*time.Millisecond, "duration of half a round of that measurement")
)

// TestWindowIsShortDespiteAFastWriter: while a transaction validates a large range, another session writes at full
// speed. Only a few of the keys that it writes are left for the window, in which every later commit waits.
func TestWindowIsShortDespiteAFastWriter(t *testing.T) {
	s := openWithRange(t)
	x := mustSession(t, s)
	defer x.Close()
	ctx, stop := context.WithCancel(t.Context())
	written := make(chan int)
	go func() { written <- writeUntil(ctx, t, s) }()
	least, most := 1<<30, 0
	for range 8 {
		if err := commitOverRange(ctx, x); err != nil {
			t.Fatal(err)
		}
		least, most = min(least, x.buffers.txn.reads.windowKeys), max(most, x.buffers.txn.reads.windowKeys)
		t.Logf("%d keys in the window", x.buffers.txn.reads.windowKeys)
	}
	stop()
	t.Logf("%d keys were written, at most %d and at least %d were left for the window", <-written, most, least)
	if least > 2000 { // the least: a goroutine that is descheduled between the last round and its reservation has more
		t.Errorf("each time at least %d keys were left for the window", least)
	}
}

// openWithRange opens a store whose memtables hold -validation.keys keys from "r/" to "r0".
func openWithRange(t testing.TB) *Store {
	o := tiny(vfs.NewMem())
	size := int64(32<<20 + 400**validationKeys) // no rotation: the range stays in one memtable
	o.Storage.MemoryBytes, o.Storage.MemtableBytes, o.Storage.SegmentBytes = 8*size, size, size
	o.CheckpointInterval = time.Hour
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	w := Write{Durability: DurabilityAsync}
	for i := 0; i < *validationKeys; i++ {
		w.Set(fmt.Appendf(nil, "r/%08d", i), nil)
		if i%100_000 != 99_999 && i != *validationKeys-1 {
			continue
		}
		if _, err := commitAndWait(x, &w); err != nil {
			t.Fatal(err)
		}
		w.Reset()
		w.Durability = DurabilityAsync
	}
	return s
}

// commitOverRange commits a serializable transaction that has read the whole range.
func commitOverRange(ctx context.Context, x *Session) error {
	tx, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
	if err == nil {
		_, err = tx.UnchangedSince([]byte("r/"), []byte("r0"), tx.At())
	}
	if err == nil {
		err = tx.Set([]byte("own"), nil)
	}
	if err == nil {
		_, err = tx.Commit(ctx)
	}
	return err
}

// BenchmarkForeignPutsBesideAValidation: puts of one key beside a writer at full speed, alone, then beside a session that walks a large
// range again and again, then beside one that commits transactions over the range, whose validation is the same walk. It reports how
// long the puts took; with the tag invariants also how long the windows of the transactions were.
func BenchmarkForeignPutsBesideAValidation(b *testing.B) {
	for name, do := range map[string]func(context.Context, *Session) error{
		"alone":               func(context.Context, *Session) error { time.Sleep(10 * time.Millisecond); return nil },
		"beside walks":        func(_ context.Context, x *Session) error { return errors.Join(walkRange(x), walkRange(x)) },
		"beside transactions": commitOverRange,
	} {
		b.Run(name, func(b *testing.B) {
			var windows, puts []time.Duration
			times := 0
			for b.Loop() {
				took, n := putsBeside(b, do, &windows)
				puts, times = append(puts, took...), times+n
			}
			b.Logf("puts: %s; %d times", quantiles(puts), times)
			b.Logf("windows: %s", quantiles(windows))
		})
	}
}

// putsBeside returns how long puts took beside a writer at full speed and a session that does something again and again.
// Each call has a store of its own, because the range must be in a memtable that began before the snapshots.
func putsBeside(t testing.TB, do func(context.Context, *Session) error, windows *[]time.Duration) (took []time.Duration, times int) {
	s := openWithRange(t)
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	x := mustSession(t, s)
	defer x.Close()
	var reserved time.Time
	x.committing.atStep = func(step commitStep) {
		switch step {
		case stepReserved:
			reserved = time.Now()
		case stepInstalled:
			*windows = append(*windows, time.Since(reserved))
		}
	}
	defer func() { x.committing.atStep = nil }()
	written, all := make(chan int), make(chan []time.Duration)
	go func() { written <- writeUntil(ctx, t, s) }()
	go func() { all <- putUntil(ctx, t, s) }()
	for start := time.Now(); time.Since(start) < *validationTime && !t.Failed(); times++ {
		if err := do(ctx, x); err != nil {
			t.Error(err)
		}
	}
	stop()
	took = <-all
	t.Logf("%d keys were written at full speed, with %d rotations", <-written, s.engine.Stats().Rotations)
	return took, times
}

// walkRange walks the range as a validation does, and ends without a commit.
func walkRange(x *Session) error {
	tx, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
	if err != nil {
		return err
	}
	defer tx.Rollback()
	_, err = tx.UnchangedSince([]byte("r/"), []byte("r0"), tx.At())
	return err
}

// putUntil puts one key after the other until ctx ends, and returns how long each put took until it was visible.
func putUntil(ctx context.Context, t testing.TB, s *Store) (took []time.Duration) {
	x := mustSession(t, s)
	defer x.Close()
	for i := 0; ctx.Err() == nil; i++ {
		start := time.Now()
		if _, err := put(x, fmt.Sprintf("foreign-%d", i%1000), "v", DurabilityAsync); err != nil {
			t.Error(err)
			return took
		}
		took = append(took, time.Since(start))
		time.Sleep(100 * time.Microsecond)
	}
	return took
}

func quantiles(d []time.Duration) string {
	if len(d) == 0 {
		return "none"
	}
	slices.Sort(d)
	at := func(q float64) time.Duration { return d[int(q*float64(len(d)-1))] }
	return fmt.Sprintf("%d, median %v, p99 %v, p99.9 %v, longest %v", len(d), at(0.5), at(0.99), at(0.999), at(1))
}

// writeUntil commits one batch of keys after the other until ctx ends, and returns how many keys. None of them has the
// latch of the key "own".
func writeUntil(ctx context.Context, t testing.TB, s *Store) (n int) {
	x := mustSession(t, s)
	defer x.Close()
	var own, other latchSet
	own.add(s.latches, keys.Append(nil, keys.SpaceUser, []byte("own")))
	var w Write
	key := make([]byte, 9)
	for i := uint64(0); ctx.Err() == nil; {
		w.Reset()
		w.Durability = DurabilityAsync
		for w.Batch.Count() < 50 {
			binary.BigEndian.PutUint64(key[1:], i)
			i++
			other.reset()
			if other.add(s.latches, keys.Append(nil, keys.SpaceUser, key)); other.only != own.only {
				w.Set(key, nil)
			}
		}
		n += w.Batch.Count()
		if _, err := x.Commit(context.WithoutCancel(ctx), &w); err != nil {
			t.Error(err)
			return n
		}
	}
	return n
}

// TestCatchUpFindsConflicts: a commit after the walk is found by the rounds, when there is much to look at, whether the
// log still has it in memory or a rotation and a checkpoint have moved it; and only a little is left for the window.
func TestCatchUpFindsConflicts(t *testing.T) {
	for _, rotate := range []bool{false, true} {
		for _, conflicts := range []bool{false, true} {
			for _, read := range []func(*readSet){
				func(r *readSet) { r.addPoint(internalKey("read")) },
				func(r *readSet) { r.addRange(internalKey("re"), internalKey("rf")) },
			} {
				o := tiny(vfs.NewMem())
				o.Storage.MemtableBytes, o.Storage.SegmentBytes = 2<<20, 2<<20 // no rotation
				s := mustOpen(t, o)
				mustPut(t, s, "read", "old")
				x := mustSession(t, s)
				at, err := x.OpenSnapshot(0)
				if err != nil {
					t.Fatal(err)
				}
				var r readSet
				r.reset(at)
				read(&r)
				x.slot.Enter()
				if err := x.walk(t.Context(), &r, nil); err != nil {
					t.Fatal(err)
				}
				x.slot.Leave()
				other := mustSession(t, s)
				for i := range 2000 {
					if _, err := put(other, fmt.Sprint(i), "v", DurabilityAsync); err != nil {
						t.Fatal(err)
					}
					if i == 1000 && conflicts {
						mustPut(t, s, "read", "new")
					}
				}
				if rotate {
					if err := s.Checkpoint(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				x.slot.Enter()
				err = x.validate(t.Context(), &r)
				_, left := r.validation.LogEnd()
				x.slot.Leave()
				if conflicted := errors.As(err, new(*ConflictError)); conflicted != conflicts || !conflicted && err != nil {
					t.Errorf("rotate %v: got %v, want a conflict: %v", rotate, err, conflicts)
				}
				if !conflicts && left > windowBytesMax {
					t.Errorf("rotate %v: %d bytes are left for the window", rotate, left)
				}
				x.Close()
				other.Close()
			}
		}
	}
}

// TestValidationHoldsNoLatches: while a transaction looks at what it has read, which may take long, another session
// writes the very key that the transaction writes.
func TestValidationHoldsNoLatches(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	mustPut(t, s, "read", "v")
	tx, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
	if err == nil {
		_, err = tx.Get(nil, []byte("read"))
	}
	if err == nil {
		err = tx.Set([]byte("own"), nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	fill := hole(t, s) // validation waits until every epoch before its own is visible
	result := make(chan error, 1)
	go func() { _, err := tx.Commit(t.Context()); result <- err }()
	time.Sleep(10 * time.Millisecond)
	other := mustSession(t, s)
	defer other.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	w := Write{Durability: DurabilityAsync}
	w.Set([]byte("own"), []byte("other"))
	if _, err := other.Commit(ctx, &w); err != nil {
		t.Errorf("another writer of the key: %v", err)
	}
	fill()
	if err := <-result; !errors.As(err, new(*ConflictError)) {
		t.Errorf("the transaction: %v, want a conflict", err)
	}
}

func internalKey(key string) []byte { return keys.Append(nil, keys.SpaceUser, []byte(key)) }
