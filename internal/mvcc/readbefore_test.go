package mvcc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestWhatIsReadUnderLatchesIsReadBefore: pages that the device has to read are read before the latches are taken, because writers of other
// keys wait for them. The cache has room for all; conditions and invocations need none.
func TestWhatIsReadUnderLatchesIsReadBefore(t *testing.T) {
	testseed.SkipUnderRace(t)
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
	deadlines := func(ctx context.Context, x *Session) error {
		w := Write{Durability: DurabilityAsync}
		for i := range count {
			w.SetWithMetadata(key(i), []byte("value"), &metadata.Fields{ExpiresAt: 1 << 50})
		}
		_, err := x.Commit(ctx, &w)
		return err
	}
	for name, commit := range map[string]func(context.Context, *Session) error{
		"invocations":                   invocations,
		"invocations of large":          invocations,
		"invocations, evicted":          invocations,
		"invocations of large, evicted": invocations,
		"invocations of huge, evicted":  invocations,
		"conditions":                    conditions(KeyPresent),
		"conditions, evicted":           conditions(ValueEquals),
		"conditions on large":           conditions(ValueEquals),
		"conditions on huge, evicted":   conditions(ValueEquals),
		"transactions": func(ctx context.Context, x *Session) error {
			w := Write{Durability: DurabilityAsync, snapshot: since, firstWins: true}
			for i := range count {
				w.Set(key(i), nil)
			}
			mustPutAsync(t, x.store, besideInStripe(x.store, key(0)), "")
			_, err := x.Commit(ctx, &w)
			return err
		},
		"deadlines":          deadlines,
		"deadlines, evicted": deadlines,
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
			switch values = 1000; {
			case strings.Contains(name, "large"):
				values = 3000 // not in the leaf
			case strings.Contains(name, "huge"):
				values = largeValueMin + 1
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
			admitted := 0
			x.AdmitLarge(func(bytes int) error {
				admitted += bytes
				return nil
			})
			if err := commit(t.Context(), x); err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(name, "invocations") && (admitted <= count*values-largeValueMin || admitted > count*values) {
				t.Errorf("%d bytes of values are admitted", admitted)
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

// TestInvocationsAreAppliedToTheNewestVersion: others write some keys after the look at them, and delete others.
func TestInvocationsAreAppliedToTheNewestVersion(t *testing.T) {
	const count = 64
	s := mustOpen(t, tiny(vfs.NewMem()))
	var ops []Invoke
	for i := range count {
		if i%3 > 0 {
			mustPutAsync(t, s, fmt.Sprint("key", i), fmt.Sprint(i))
		}
		ops = append(ops, Invoke{Kind: InvokeAdd, Key: fmt.Append(nil, "key", i), Delta: 1000})
	}
	slices.Reverse(ops)
	mustCheckpoint(t, s)
	x, other := mustSession(t, s), mustSession(t, s)
	defer x.Close()
	defer other.Close()
	written := false
	ctx := &interfering{Context: t.Context(), do: func() {
		kept := func(i int) bool { return i < len(x.buffers.before) && x.buffers.before[i].read }
		if written || !kept(0) || !kept(count-1) {
			return
		}
		written = true
		var w Write
		for i := range 8 {
			w.Set(fmt.Append(nil, "key", i), []byte("7"))
		}
		w.Delete([]byte("key8"))
		if _, err := other.Commit(t.Context(), &w); err != nil {
			t.Error(err)
		}
	}}
	out := make([]Invoked, count)
	if _, err := x.InvokeAll(ctx, ops, nil, DurabilityAsync, out); err != nil || !written || x.hasSnapshot {
		t.Fatalf("written: %t, a snapshot is left: %t: %v", written, x.hasSnapshot, err)
	}
	few := []Invoke{{Kind: InvokeAdd, Key: []byte("another"), Delta: 5}, {Kind: InvokeAdd, Key: []byte("one more"), Delta: 5}}
	outcomes := make([]Invoked, len(few))
	if _, err := x.InvokeAll(t.Context(), few, nil, DurabilityAsync, outcomes); err != nil || string(outcomes[0].New) != "5" || string(outcomes[1].New) != "5" {
		t.Errorf("other keys are %q and %q: %v", outcomes[0].New, outcomes[1].New, err)
	}
	for at, o := range out {
		i := count - 1 - at
		want := 1000
		switch {
		case i < 8:
			want += 7
		case i%3 > 0 && i != 8:
			want += i
		}
		if string(o.New) != fmt.Sprint(want) || o.OldFound != (want != 1000) {
			t.Errorf("key %d: %q and %q, found %t; want %d", i, o.Old, o.New, o.OldFound, want)
		}
	}
}

// TestDeadlinesOfTheNewestVersionsAreReplaced: others change some deadlines after the look at them, and delete keys.
func TestDeadlinesOfTheNewestVersionsAreReplaced(t *testing.T) {
	const count, first, between, last = 64, 1 << 50, 1<<50 + 1000, 1<<50 + 2000
	s := mustOpen(t, tiny(vfs.NewMem()))
	fill := func(w *Write, n int, deadline uint64) *Write {
		for i := range n {
			w.SetWithMetadata(fmt.Append(nil, "key", i), []byte("v"), &metadata.Fields{ExpiresAt: deadline + uint64(i)})
		}
		return w
	}
	x, other := mustSession(t, s), mustSession(t, s)
	defer x.Close()
	defer other.Close()
	w := fill(new(Write), count/2, first)
	w.Set([]byte("key40"), []byte("no deadline"))
	if _, err := x.Commit(t.Context(), w); err != nil {
		t.Fatal(err)
	}
	mustCheckpoint(t, s)
	written := false
	ctx := &interfering{Context: t.Context(), do: func() {
		if written || len(x.buffers.before) < count || !x.buffers.before[count-1].read {
			return
		}
		written = true
		w := fill(new(Write), 8, between)
		w.Delete([]byte("key9"))
		if _, err := other.Commit(t.Context(), w); err != nil {
			t.Error(err)
		}
	}}
	if _, err := x.Commit(ctx, fill(new(Write), count, last)); err != nil || !written || x.hasSnapshot {
		t.Fatalf("written: %t, a snapshot is left: %t: %v", written, x.hasSnapshot, err)
	}
	if stale := checkQueue(t, s); stale != 1 { // that of the key which was deleted
		t.Errorf("%d stale entries of the queue", stale)
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
