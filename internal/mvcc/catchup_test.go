package mvcc

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// With -validation.keys=2000000 it is the measurement that docs/adr/0034 names.
var validationKeys = flag.Int("validation.keys", 100_000, "keys of a range that is validated while another session writes")

// TestWindowIsShortDespiteAFastWriter: while a transaction validates a large range, another session writes at full
// speed. Only a few of the keys that it writes are left for the window, in which every later commit waits.
func TestWindowIsShortDespiteAFastWriter(t *testing.T) {
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
	ctx, stop := context.WithCancel(t.Context())
	written := make(chan int)
	go func() { written <- writeUntil(ctx, t, s) }()
	least, most := 1<<30, 0
	for range 8 {
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
		if err != nil {
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

// writeUntil commits one batch of keys after the other until ctx ends, and returns how many keys. None of them has the
// latch of the key "own".
func writeUntil(ctx context.Context, t *testing.T, s *Store) (n int) {
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
				o.Storage.MemtableBytes, o.Storage.SegmentBytes = 16<<20, 16<<20
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
				if err := x.walk(t.Context(), &r); err != nil {
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
