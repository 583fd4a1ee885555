package mvcc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// manyInvokes names n keys that hold values of size bytes, and asks for each to be taken out.
func manyInvokes(t *testing.T, s *Store, n, size int) []Invoke {
	t.Helper()
	ops := make([]Invoke, n)
	for i := range ops {
		key := fmt.Sprintf("key%06d", i)
		mustPutAsync(t, s, key, string(make([]byte, size)))
		ops[i] = Invoke{Kind: InvokeGetAndDelete, Key: []byte(key)}
	}
	return ops
}

// TestInvokeAllReadsAtMostABatch: a request of short names must not read more into memory than a
// batch may hold, and what is large is admitted before it is read. A refusal changes nothing.
func TestInvokeAllReadsAtMostABatch(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Limits.BatchBytes, o.Limits.ValueBytes = 1<<20, 512<<10
	s := mustOpen(t, o)
	ops := manyInvokes(t, s, 12, 100<<10)
	x := mustSession(t, s)
	defer x.Close()
	var limit *LimitError
	if _, err := x.InvokeAll(t.Context(), ops, nil, DurabilityAsync, make([]Invoked, len(ops))); !errors.As(err, &limit) || limit.What != "batch bytes" {
		t.Fatalf("12 values of 100 KiB with a limit of 1 MiB: %v", err)
	}
	errFull, asked := errors.New("full"), 0
	x.AdmitLarge(func(bytes int) error {
		if asked += bytes; asked > 300<<10 {
			return errFull
		}
		return nil
	})
	if _, err := x.InvokeAll(t.Context(), ops[:5], nil, DurabilityAsync, make([]Invoked, 5)); !errors.Is(err, errFull) {
		t.Fatalf("a large value is read although it was not admitted: %v", err)
	}
	x.AdmitLarge(nil)
	if n := len(dump(t, s)); n != len(ops) {
		t.Fatalf("%d keys are left, want %d", n, len(ops))
	}
	out := make([]Invoked, 10)
	ops[9].ReturnOld = true
	if _, err := x.InvokeAll(t.Context(), ops[:10], nil, DurabilityAsync, out); err != nil || len(out[9].Old) != 100<<10 {
		t.Fatalf("10 values of 100 KiB: %v", err)
	}
}

// TestInvokeAllOfManyReadsAtMostABatch: what was read together counts before the first value that is read alone, in any order of the operations. A value that was
// replaced meanwhile counts once.
func TestInvokeAllOfManyReadsAtMostABatch(t *testing.T) {
	const size = 10 << 10
	for name, c := range map[string]struct {
		values   int
		replaced bool
		refused  bool
	}{"too many": {values: 120, refused: true}, "enough": {values: 100}, "replaced": {values: 100, replaced: true}} {
		t.Run(name, func(t *testing.T) {
			o := tiny(vfs.NewMem())
			o.Limits.BatchBytes, o.Limits.ValueBytes = 1<<20, 512<<10
			s := mustOpen(t, o)
			ops := manyInvokes(t, s, c.values, size)
			if err := s.Checkpoint(t.Context()); err != nil { // the tree is read in the order of the keys
				t.Fatal(err)
			}
			slices.Reverse(ops)
			x := mustSession(t, s)
			defer x.Close()
			read := 0
			x.AdmitLarge(func(bytes int) error {
				if read += bytes; c.replaced && read > c.values*size/2 { // while they are read together
					c.replaced = false
					for _, op := range ops {
						mustPutAsync(t, s, string(op.Key), string(make([]byte, size)))
					}
				}
				return nil
			})
			_, err := x.InvokeAll(t.Context(), ops, nil, DurabilityAsync, make([]Invoked, len(ops)))
			if c.replaced {
				t.Error("nothing was replaced: this tests nothing")
			}
			if refused := errors.As(err, new(*LimitError)); refused != c.refused || err != nil && !refused {
				t.Errorf("%d values of 10 KiB with a limit of 1 MiB: %v", c.values, err)
			}
		})
	}
}

// TestReadsUnderLatchesEndWithTheirContext: a commit that has much to read while it holds latches
// ends with its context, and changes nothing.
func TestReadsUnderLatchesEndWithTheirContext(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	ops := manyInvokes(t, s, 300, 10)
	conditions := make([]Condition, len(ops))
	for i := range ops {
		conditions[i] = Condition{Kind: KeyPresent, Key: ops[i].Key}
	}
	x := mustSession(t, s)
	defer x.Close()
	for name, commit := range map[string]func(context.Context) error{
		"invoke": func(ctx context.Context) error {
			_, err := x.InvokeAll(ctx, ops, nil, DurabilityAsync, make([]Invoked, len(ops)))
			return err
		},
		"conditions": func(ctx context.Context) error {
			w := Write{Durability: DurabilityAsync, Conditions: conditions}
			w.Set([]byte("other"), nil)
			_, err := x.Commit(ctx, &w)
			return err
		},
	} {
		// Its latches are free, so that nothing else looks at the context before the reads begin.
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := commit(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
		if n := len(dump(t, s)); n != len(ops) {
			t.Errorf("%s: %d keys are left, want %d", name, n, len(ops))
		}
	}
}
