package mvcc

import (
	"errors"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// roomOptions are those of a store that has room for so many bytes of values in an InvokeAll of n operations with the keys of roomOps.
func roomOptions(n, values int) Options {
	o := tiny(vfs.NewMem())
	o.Limits.BatchBytes = 1 << 20
	o.Limits.InvokeBytes = values + n*2*len(roomKey(0)) + (n-InvokeOperationsFree)*InvokeOperationBytes
	return o
}

func roomKey(i int) []byte { return fmt.Appendf(nil, "key %05d", i) }

// roomOps are n operations whose operands, and old values, have so many bytes together.
func roomOps(n int, op Invoke, operands, old int) (ops []Invoke, values []int) {
	ops, values = make([]Invoke, n), make([]int, n)
	for i := range ops {
		ops[i] = op
		ops[i].Key = roomKey(i)
		share := operands / (n - i)
		ops[i].Operand, operands = make([]byte, share), operands-share
		values[i] = old / (n - i)
		old -= values[i]
	}
	return ops, values
}

// TestAnInvokeAllIsLimitedWithItsOperations: what it has, what it reads, and what it writes. One byte more is refused and changes nothing; what is
// admitted is there after a restart.
func TestAnInvokeAllIsLimitedWithItsOperations(t *testing.T) {
	const n, room = InvokeOperationsFree + 100, 50_000
	for _, c := range []struct {
		name          string
		op            Invoke
		operands, old int // at the limit
		more          func(operands, old *int)
	}{
		{"has", Invoke{Kind: InvokePutIfAbsent}, room, 0, func(operands, _ *int) { *operands++ }},
		{"has, with what it compares", Invoke{Kind: InvokeCompareSet, Expect: make([]byte, 10)}, room - 10*n, 10 * n, func(operands, _ *int) { *operands++ }},
		{"reads", Invoke{Kind: InvokeGetAndSet}, 0, room, func(_, old *int) { *old++ }},
		{"reads and removes", Invoke{Kind: InvokeGetAndDelete}, 0, room, func(_, old *int) { *old++ }},
		{"writes", Invoke{Kind: InvokeAppend}, room / 2, room / 2, func(_, old *int) { *old++ }},
	} {
		t.Run(c.name, func(t *testing.T) {
			operands, old := c.operands, c.old
			c.more(&operands, &old)
			o := roomOptions(n, room)
			s := mustOpen(t, o)
			x := mustSession(t, s)
			fill := func(values []int) {
				w := &Write{Durability: DurabilityAsync}
				for i, size := range values {
					if old > 0 {
						w.Set(roomKey(i), make([]byte, size))
					}
				}
				w.Set([]byte("other"), nil)
				if _, err := commitAndWait(x, w); err != nil {
					t.Fatal(err)
				}
			}
			ops, values := roomOps(n, c.op, operands, old)
			fill(values)
			before := dump(t, s)
			_, err := x.InvokeAll(t.Context(), ops, nil, DurabilityAsync, make([]Invoked, n))
			limit := new(LimitError)
			if !errors.As(err, &limit) || limit.What != "batch bytes" || limit.Limit != o.Limits.InvokeBytes || limit.Got != limit.Limit+1 || limit.Operations != 100*InvokeOperationBytes {
				t.Errorf("one byte more: %v", err)
			}
			if err := equalMaps(dump(t, s), before); err != nil {
				t.Errorf("what is refused has changed something: %v", err)
			}
			ops, values = roomOps(n, c.op, c.operands, c.old)
			fill(values)
			out := make([]Invoked, n)
			epoch, err := x.InvokeAll(t.Context(), ops, nil, DurabilitySync, out)
			if err == nil {
				err = s.WaitWritten(t.Context(), epoch, DurabilitySync)
			}
			if err != nil {
				t.Fatalf("at the limit: %v", err)
			}
			after := dump(t, s)
			for i := range out {
				if value, found := after[string(roomKey(i))]; !out[i].Applied || found != out[i].NewFound || c.op.Kind == InvokeAppend && len(value) != len(ops[i].Operand)+values[i] {
					t.Fatalf("operation %d: %+v, and there is %d bytes, %v", i, out[i], len(value), found)
				}
			}
			x.Close()
			mustClose(t, s)
			if err := equalMaps(dump(t, mustOpen(t, o)), after); err != nil {
				t.Errorf("after a restart: %v", err)
			}
		})
	}
}

// TestFewOperationsMayHaveAllBytes of a batch, and so may many if Limits.InvokeBytes is much more.
func TestFewOperationsMayHaveAllBytes(t *testing.T) {
	const batchBytes = 1 << 20
	for _, c := range []struct{ operations, invokeBytes int }{{1, batchBytes}, {InvokeOperationsFree, batchBytes}, {2 * InvokeOperationsFree, 2 * batchBytes}} {
		o := tiny(vfs.NewMem())
		o.Limits.BatchBytes, o.Limits.ValueBytes, o.Limits.InvokeBytes = batchBytes, batchBytes, c.invokeBytes
		x, out := mustSession(t, mustOpen(t, o)), make([]Invoked, c.operations)
		for _, kind := range []InvokeKind{InvokeGetAndSet, InvokeGetAndDelete} { // the second one reads what the first has written
			ops, _ := roomOps(c.operations, Invoke{Kind: kind}, batchBytes-c.operations*len(roomKey(0)), 0)
			for excess := 1; excess >= 0; excess-- {
				last := &ops[c.operations-1]
				operand := last.Operand
				last.Operand = make([]byte, len(operand)+excess)
				_, err := x.InvokeAll(t.Context(), ops, nil, DurabilityAsync, out)
				last.Operand = operand
				if refused := errors.As(err, new(*LimitError)); refused != (excess > 0 && kind == InvokeGetAndSet) || !refused && err != nil {
					t.Fatalf("%d operations and %d bytes more: %v", c.operations, excess, err)
				}
			}
		}
	}
}

// TestManyOperationsReadAtMostABatch, also if Limits.InvokeBytes is much more.
func TestManyOperationsReadAtMostABatch(t *testing.T) {
	const n, size = 2 * InvokeOperationsFree, 1000
	o := tiny(vfs.NewMem())
	o.Limits.BatchBytes, o.Limits.InvokeBytes = n/2*size, 10*n*size
	x, out := mustSession(t, mustOpen(t, o)), make([]Invoked, n)
	ops, _ := roomOps(n, Invoke{Kind: InvokeAppend}, n*size, 0)
	for from := 0; from < n; from += n / 4 {
		if _, err := x.InvokeAll(t.Context(), ops[from:from+n/4], nil, DurabilityAsync, out[:n/4]); err != nil {
			t.Fatal(err)
		}
	}
	for i := range ops {
		ops[i].Kind, ops[i].Operand = InvokeGetAndDelete, nil
	}
	var limit *LimitError
	if _, err := x.InvokeAll(t.Context(), ops, nil, DurabilityAsync, out); !errors.As(err, &limit) || limit.Limit != o.Limits.BatchBytes {
		t.Errorf("twice as much: %v", err)
	}
	if _, err := x.InvokeAll(t.Context(), ops[:n/2], nil, DurabilityAsync, out[:n/2]); err != nil {
		t.Errorf("as much as a batch: %v", err)
	}
}

// TestATransactionOfOneRequestIsLimitedWithItsOperations, if it has many.
func TestATransactionOfOneRequestIsLimitedWithItsOperations(t *testing.T) {
	const n = 20
	s := mustOpen(t, tiny(vfs.NewMem()))
	txn, err := mustSession(t, s).Begin(TxnOptions{})
	if err == nil {
		err = txn.Set([]byte("k"), make([]byte, 10_000))
	}
	if err != nil {
		t.Fatal(err)
	}
	defer txn.Rollback()
	counted, most := n*InvokeOperationBytes, &s.options.Limits.InvokeBytes
	*most = txn.Size() + counted
	if err := txn.CheckOperations(InvokeOperationsFree + n); err != nil {
		t.Errorf("at the limit: %v", err)
	}
	*most--
	var limit *LimitError
	if err := txn.CheckOperations(InvokeOperationsFree + n); !errors.As(err, &limit) || limit.Got != *most+1 || limit.Limit != *most || limit.Operations != counted {
		t.Errorf("one byte more: %v", err)
	}
	*most = 100
	if err := txn.CheckOperations(InvokeOperationsFree); err != nil {
		t.Errorf("few operations: %v", err)
	}
}
