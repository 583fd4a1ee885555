package mvcc

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestLargeInvocationsCopyTheirValuesOnce at most, beside the log and the memtable: the largest of them would otherwise take several times what a
// batch may have. The values are right, also when the session is used again.
func TestLargeInvocationsCopyTheirValuesOnce(t *testing.T) {
	const n, size = 8, 1 << 20
	soon := uint64(time.Now().Add(time.Hour).UnixMilli())
	transaction := func(x *Session, ops []Invoke, out []Invoked) error {
		txn, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
		for i := 0; err == nil && i < len(ops); i++ {
			out[i], err = txn.Invoke(&ops[i])
		}
		if err == nil {
			_, err = txn.Commit(t.Context())
		}
		return err
	}
	invokeAll := func(x *Session, ops []Invoke, out []Invoked) error {
		_, err := x.InvokeAll(t.Context(), ops, nil, DurabilityAsync, out)
		return err
	}
	for _, c := range []struct {
		name   string
		op     Invoke
		run    func(*Session, []Invoke, []Invoked) error
		copies int
	}{
		{"set", Invoke{Kind: InvokeGetAndSet}, invokeAll, 0},
		{"put if absent", Invoke{Kind: InvokePutIfAbsent}, invokeAll, 0},
		{"append", Invoke{Kind: InvokeAppend}, invokeAll, 1},
		{"set with a deadline", Invoke{Kind: InvokeGetAndSet, ExpiresAt: soon}, invokeAll, 0},
		{"set in a transaction", Invoke{Kind: InvokeGetAndSet}, transaction, 0},
		{"append in a transaction", Invoke{Kind: InvokeAppend}, transaction, 1},
		{"set with a deadline in a transaction", Invoke{Kind: InvokeGetAndSet, ExpiresAt: soon}, transaction, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := Options{Storage: storage.Options{
				Dir: t.TempDir() + "/db", FS: vfs.NewOS(), MemoryBytes: 256 << 20, CacheBytes: 1 << 20, MemtableBytes: 32 << 20, SegmentBytes: 32 << 20,
			}}
			s := mustOpen(t, o)
			x := mustSession(t, s)
			ops, out, values := make([]Invoke, n), make([]Invoked, n), make([][]byte, n)
			for i := range ops {
				ops[i] = c.op
				ops[i].Key, ops[i].Operand, ops[i].ReturnNew = fmt.Appendf(nil, "key%d", i), bytes.Repeat([]byte{byte('a' + i)}, size), true
			}
			if _, err := put(x, "other", "value", DurabilityAsync); err != nil {
				t.Fatal(err)
			}
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			if err := c.run(x, ops, out); err != nil {
				t.Fatal(err)
			}
			for i := range out {
				values[i] = out[i].TakeNew()
			}
			runtime.ReadMemStats(&after)
			if got, most := after.TotalAlloc-before.TotalAlloc, uint64(c.copies*n*size+n*size/4); got > most {
				t.Errorf("%d bytes of %d allocated, at most %d are expected", got, n*size, most)
			}
			if _, err := x.InvokeAll(t.Context(), []Invoke{{Kind: InvokeAppend, Key: []byte("other"), Operand: []byte("x")}}, nil, DurabilityAsync, out[:1]); err != nil {
				t.Fatal(err)
			}
			for i := range ops {
				v, err := x.Get(nil, ops[i].Key, 0)
				if err != nil || !bytes.Equal(v.Data, ops[i].Operand) || !bytes.Equal(values[i], ops[i].Operand) {
					t.Errorf("%s has %d bytes, and %d were returned: %v", ops[i].Key, len(v.Data), len(values[i]), err)
				}
			}
		})
	}
}

// TestInvokeAllReturnsAtMostABatch of values, old and new ones together. A refusal changes nothing.
func TestInvokeAllReturnsAtMostABatch(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Limits.BatchBytes, o.Limits.ValueBytes = 1<<20, 512<<10
	s := mustOpen(t, o)
	x := mustSession(t, s)
	ops, out := manyInvokes(t, s, 6, 100<<10), make([]Invoked, 6)
	for i := range ops {
		ops[i].Kind, ops[i].Operand, ops[i].ReturnOld, ops[i].ReturnNew = InvokeGetAndSet, make([]byte, 100<<10), true, true
	}
	before := dump(t, s)
	var limit *LimitError
	if _, err := x.InvokeAll(t.Context(), ops, nil, DurabilityAsync, out); !errors.As(err, &limit) || limit.What != "batch bytes" || limit.Got != 12*100<<10 {
		t.Errorf("12 values of 100 KiB with a limit of 1 MiB: %v", err)
	}
	if after := dump(t, s); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Error("what is refused has changed something")
	}
	ops[0].ReturnOld, ops[1].ReturnNew = false, false
	if _, err := x.InvokeAll(t.Context(), ops, nil, DurabilityAsync, out); err != nil {
		t.Errorf("10 values: %v", err)
	}
}

// TestOneInvocationReturnsItsValues, also if both together have more than a batch: it cannot be divided.
func TestOneInvocationReturnsItsValues(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Limits.BatchBytes, o.Limits.ValueBytes = 1<<20, 1<<20
	x, out := mustSession(t, mustOpen(t, o)), make([]Invoked, 1)
	for range 2 {
		set := []Invoke{{Kind: InvokeGetAndSet, Key: []byte("k"), Operand: make([]byte, 600<<10), ReturnOld: true, ReturnNew: true}}
		if _, err := x.InvokeAll(t.Context(), set, nil, DurabilityAsync, out); err != nil {
			t.Fatal(err)
		}
	}
	if len(out[0].Old) != 600<<10 || len(out[0].New) != 600<<10 {
		t.Errorf("%d and %d bytes", len(out[0].Old), len(out[0].New))
	}
}

// TestATransactionKeepsNoMoreThanItIsChargedFor of an operand in memory that is much larger, as a decoder leaves it that met a longer one before.
func TestATransactionKeepsNoMoreThanItIsChargedFor(t *testing.T) {
	const size = 100 << 10
	txn, err := mustSession(t, mustOpen(t, tiny(vfs.NewMem()))).Begin(TxnOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer txn.Rollback()
	for i, room := range []int{size, size + size/8, size + size/8 + 1, 16 << 20} {
		operand := make([]byte, size, room)
		out, err := txn.Invoke(&Invoke{Kind: InvokeGetAndSet, Key: fmt.Append(nil, i), Operand: operand, ReturnNew: true})
		if err != nil {
			t.Fatal(err)
		}
		if kept, most := cap(txn.own.large[i]), size+size/8; kept > most || cap(out.TakeNew()) > most {
			t.Errorf("of an operand with room for %d bytes %d are kept, and %d in the answer", room, kept, cap(out.TakeNew()))
		}
	}
}

// TestManyLargeOldValuesAreReadOnce: they are read together before the latches are taken, and are in memory once, beside the new ones. What is
// written again is admitted before it is copied, and the session keeps none of it.
func TestManyLargeOldValuesAreReadOnce(t *testing.T) {
	const n, size = 2 * readBeforeMin, 256 << 10
	s := mustOpen(t, Options{Storage: storage.Options{
		Dir: t.TempDir() + "/db", FS: vfs.NewOS(), MemoryBytes: 256 << 20, CacheBytes: 1 << 20, MemtableBytes: 32 << 20, SegmentBytes: 32 << 20,
	}})
	x := mustSession(t, s)
	ops, out := make([]Invoke, n), make([]Invoked, n)
	for i := range ops {
		ops[i] = Invoke{Kind: InvokeAppend, Key: fmt.Appendf(nil, "key%d", i), Operand: []byte{byte(i)}, ReturnOld: i%2 == 0, ReturnNew: true}
		if _, err := put(x, string(ops[i].Key), string(bytes.Repeat([]byte{byte(i)}, size)), DurabilityAsync); err != nil {
			t.Fatal(err)
		}
	}
	made := 0
	x.AdmitMade(func(bytes int) error {
		made = bytes
		return nil
	})
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, err := x.InvokeAll(t.Context(), ops, nil, DurabilityAsync, out); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if got, most := after.TotalAlloc-before.TotalAlloc, uint64(2*n*size+n*size/4); got > most {
		t.Errorf("%d bytes allocated for values of %d, at most %d are expected", got, n*size, most)
	}
	if made != n*size {
		t.Errorf("%d bytes are admitted, want %d", made, n*size)
	}
	for i := range out {
		if want := bytes.Repeat([]byte{byte(i)}, size+1); !bytes.Equal(out[i].New, want) || !bytes.Equal(out[i].Old, want[:len(out[i].Old)]) || (len(out[i].Old) == size) != ops[i].ReturnOld {
			t.Fatalf("the values of operation %d are others", i)
		}
	}
	if all := x.buffers.alone[:cap(x.buffers.alone)]; slices.ContainsFunc(all, func(value []byte) bool { return value != nil }) || x.buffers.aloneBytes != 0 {
		t.Error("the session keeps old values")
	}
	refused := errors.New("no room")
	x.AdmitMade(func(int) error { return refused })
	if _, err := x.InvokeAll(t.Context(), ops, nil, DurabilityAsync, out); !errors.Is(err, refused) {
		t.Errorf("without room: %v", err)
	}
	if v, err := x.Get(nil, ops[0].Key, 0); err != nil || len(v.Data) != size+1 {
		t.Errorf("after that: %d bytes, %v", len(v.Data), err)
	}
}

// TestManyTouchesAreInMemoryOnce: what a request of many small operations takes is its records, for which there is room from the beginning.
func TestManyTouchesAreInMemoryOnce(t *testing.T) {
	testseed.SkipUnderRace(t)
	const n = 50_000
	s := mustOpen(t, Options{Storage: storage.Options{
		Dir: t.TempDir() + "/db", FS: vfs.NewOS(), MemoryBytes: 256 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 20, SegmentBytes: 64 << 20,
	}})
	x := mustSession(t, s)
	ops, out, hour := make([]Invoke, n), make([]Invoked, n), uint64(3_600_000)
	for i := range ops {
		ops[i] = Invoke{Kind: InvokePutIfAbsent, Key: fmt.Appendf(nil, "m%08d", i), Operand: []byte("v"), ExpiresAt: s.clock.Now()/1000 + hour}
	}
	if _, err := x.InvokeAll(t.Context(), ops, nil, DurabilityAsync, out); err != nil {
		t.Fatal(err)
	}
	for i := range ops {
		ops[i] = Invoke{Kind: InvokeTouch, Key: ops[i].Key, ExpiresAt: ops[i].ExpiresAt + hour}
	}
	x.Trim()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, err := x.InvokeAll(t.Context(), ops, nil, DurabilityAsync, out); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	for i := range out {
		if !out[i].Applied || out[i].ExpiresAt != ops[i].ExpiresAt {
			t.Fatalf("the outcome of operation %d is %+v", i, out[i])
		}
	}
	if got, most := after.TotalAlloc-before.TotalAlloc, uint64(n*600); got > most {
		t.Errorf("%d bytes allocated for %d operations, at most %d are expected", got, n, most)
	}
}

// TestRoomForManyValuesIsMadeOfThoseThatWereMet: a buffer that grows by a quarter again and again is in memory twice, and leaves five times as much to the
// collector.
func TestRoomForManyValuesIsMadeOfThoseThatWereMet(t *testing.T) {
	const all, size, most = 100_000, 100, 64 << 20
	var x Session
	buf, grown := &x.buffers.invoked, 0
	for met := 1; met <= all; met++ {
		was := cap(*buf)
		x.reserveBefore(met, all, size, most)
		*buf = append(*buf, make([]byte, size)...)
		if cap(*buf) != was && was > 0 && met > readBeforeMin {
			grown++
		}
	}
	if c := cap(*buf); grown > 6 || c > all*size*5/4 {
		t.Errorf("the buffer grew %d times, to %d bytes for %d", grown, c, all*size)
	}
	x.buffers.invoked = nil
	for met := 1; met <= readBeforeMin; met++ { // the first are large, and no others
		x.reserveBefore(met, all, 10_000, most)
		*buf = append(*buf, make([]byte, 10_000)...)
	}
	if c := cap(*buf); c > 5*readBeforeMin*10_000 {
		t.Errorf("%d bytes for %d", c, readBeforeMin*10_000)
	}
}
