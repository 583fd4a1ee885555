package mvcc

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestWhatIsReadUnderLatchesIsReadBefore: pages that the device has to read are read before the latches are taken, because writers of other
// keys wait for them. The cache has room for all; conditions need none.
func TestWhatIsReadUnderLatchesIsReadBefore(t *testing.T) {
	const count = 200
	key := func(i int) []byte { return fmt.Appendf(nil, "key%06d", i) }
	var values int       // bytes of each
	var since keys.Epoch // after which the tree got other keys
	invocations := func(ctx context.Context, x *Session) error {
		ops := make([]Invoke, count)
		for i := range ops {
			ops[i] = Invoke{Kind: InvokeAppend, Key: key(i), Operand: []byte("more")}
		}
		_, err := x.InvokeAll(ctx, ops, nil, DurabilityAsync, make([]Invoked, count))
		return err
	}
	conditions := func(kind ConditionKind) func(context.Context, *Session) error {
		return func(ctx context.Context, x *Session) error {
			w := Write{Durability: DurabilityAsync}
			for i := range count {
				w.Conditions = append(w.Conditions, Condition{Kind: kind, Key: key(i), Value: make([]byte, values)})
			}
			w.Set([]byte("other"), nil)
			_, err := x.Commit(ctx, &w)
			return err
		}
	}
	for name, commit := range map[string]func(context.Context, *Session) error{
		"invocations":          invocations,
		"invocations of large": invocations,
		"conditions":           conditions(KeyPresent),
		"conditions, evicted":  conditions(ValueEquals),
		"conditions on large":  conditions(ValueEquals),
		"transactions": func(ctx context.Context, x *Session) error {
			w := Write{Durability: DurabilityAsync, snapshot: since, firstWins: true}
			for i := range count {
				w.Set(key(i), nil)
			}
			mustPutAsync(t, x.store, besideInStripe(x.store, key(0)), "")
			_, err := x.Commit(ctx, &w)
			return err
		},
		"deadlines": func(ctx context.Context, x *Session) error {
			w := Write{Durability: DurabilityAsync}
			for i := range count {
				w.SetWithMetadata(key(i), []byte("value"), &metadata.Fields{ExpiresAt: 1 << 50})
			}
			_, err := x.Commit(ctx, &w)
			return err
		},
		"latched": func(ctx context.Context, x *Session) error {
			w := Write{Durability: DurabilityAsync}
			w.SetOwn()
			for i := range count {
				w.Latch(keys.Append(nil, keys.SpaceUser, key(i)))
			}
			w.Under(func(l *Latched) error {
				for i := range count {
					n, err := l.Newest(keys.Append(nil, keys.SpaceUser, key(i)))
					if err != nil || !n.Found {
						return fmt.Errorf("key %d: %t, %w", i, n.Found, err)
					}
				}
				return nil
			})
			_, err := x.Commit(ctx, &w)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			files := vfs.NewFaulty(vfs.NewMem())
			o := tiny(files)
			o.Storage.CacheBytes = 4 << 20
			if values = 1000; strings.HasSuffix(name, "large") {
				values = 3000 // not in the leaf
			}
			s := mustOpen(t, o)
			for i := range count {
				since = mustPutAsync(t, s, string(key(i)), string(make([]byte, values)))
			}
			mustCheckpoint(t, s)
			for i := range count {
				mustPutAsync(t, s, string(key(i))+" beside", "")
			}
			mustCheckpoint(t, s)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = mustOpen(t, o)
			x := mustSession(t, s)
			defer x.Close()
			reads := files.Inject(vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Fault: vfs.Slow})
			before := -1
			x.Permit(func() error { // the latches are held
				if before < 0 {
					if strings.HasSuffix(name, "evicted") {
						if _, err := s.engine.ResizeCache(128 << 10); err != nil {
							t.Error(err)
						}
					}
					before = reads.Fired()
				}
				return nil
			})
			if err := commit(t.Context(), x); err != nil {
				t.Fatal(err)
			}
			if n := reads.Fired() - before; n > 2 || before < 10 { // another goroutine may read a page
				t.Errorf("%d reads of the device while the latches are held, and %d before", n, before)
			}
		})
	}
}

// interfering is a context that does something each time it is asked whether it has ended.
type interfering struct {
	context.Context
	do func()
}

func (c *interfering) Err() error {
	c.do()
	return c.Context.Err()
}

// TestWhatIsReadBeforeLatchesIsNotTakenForDamage: a value that a checkpoint drops between the look at its leaf and its reading.
func TestWhatIsReadBeforeLatchesIsNotTakenForDamage(t *testing.T) {
	const count, size = 64, 3000 // not in the leaf
	s := mustOpen(t, tiny(vfs.NewMem()))
	w := Write{Durability: DurabilityAsync}
	w.Set([]byte("other"), nil)
	putAll := func() {
		for i := range count {
			mustPutAsync(t, s, fmt.Sprint("key", i), strings.Repeat("v", size))
		}
		mustCheckpoint(t, s)
	}
	putAll()
	for i := range count {
		w.Conditions = append(w.Conditions, Condition{Kind: ValueEquals, Key: fmt.Append(nil, "key", i), Value: make([]byte, size)})
	}
	x := mustSession(t, s)
	defer x.Close()
	asked := 0
	ctx := &interfering{Context: t.Context(), do: func() {
		if asked++; asked < 8 {
			putAll()
			s.engine.Reclaim()
		}
	}}
	var failed *PreconditionError
	if _, err := x.Commit(ctx, &w); !errors.As(err, &failed) || asked < count/2 {
		t.Errorf("asked %d times: %v", asked, err)
	}
	if n := s.Stats().Storage.Damage.Reads; n != 0 {
		t.Errorf("%d damaged values were met", n)
	}
}

// TestConditionsThatHeldBeforeTheLatchesAreLookedAtAgain: a key is deleted after the look at it, and checkpoints remove what they may of it.
func TestConditionsThatHeldBeforeTheLatchesAreLookedAtAgain(t *testing.T) {
	const count = 64
	s := mustOpen(t, tiny(vfs.NewMem()))
	w := Write{Durability: DurabilityAsync}
	w.Set([]byte("other"), nil)
	for i := range count {
		mustPutAsync(t, s, fmt.Sprint("key", i), "v")
		w.Conditions = append(w.Conditions, Condition{Kind: KeyPresent, Key: fmt.Append(nil, "key", i)})
	}
	mustCheckpoint(t, s)
	x, deleting := mustSession(t, s), mustSession(t, s)
	defer x.Close()
	defer deleting.Close()
	deleted := false
	ctx := &interfering{Context: t.Context(), do: func() {
		if deleted || !x.hasSnapshot || w.Conditions[count-1].held == 0 {
			return
		}
		deleted = true
		var d Write
		d.Delete([]byte("key1"))
		if _, err := deleting.Commit(t.Context(), &d); err != nil {
			t.Error(err)
		}
	}}
	x.Permit(func() error { // the latches are held
		s.collector.mu.Lock()
		s.collector.refresh(time.Now())
		s.collector.mu.Unlock()
		mustCheckpoint(t, s)
		return nil
	})
	var failed *PreconditionError
	if _, err := x.Commit(ctx, &w); !errors.As(err, &failed) || failed.Index != 1 || !deleted || x.hasSnapshot {
		t.Errorf("deleted: %t, a snapshot is left: %t: %v", deleted, x.hasSnapshot, err)
	}
}

// besideInStripe is another key with the latch of a key.
func besideInStripe(s *Store, key []byte) string {
	stripe := func(key []byte) int { return s.latches.stripe(keys.Append(nil, keys.SpaceUser, key)) }
	for i := 0; ; i++ {
		if other := fmt.Appendf(nil, "%d", i); stripe(other) == stripe(key) {
			return string(other)
		}
	}
}
