package mvcc

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// manyValues puts n keys with values of 100 bytes, and returns operations of a kind on them.
func manyValues(t *testing.T, n int, kind InvokeKind) (*Session, []Invoke, []Invoked) {
	t.Helper()
	s := mustOpen(t, Options{Storage: storage.Options{
		Dir: t.TempDir() + "/db", FS: vfs.NewOS(), MemoryBytes: 256 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 20, SegmentBytes: 64 << 20,
	}})
	x, ops, out := mustSession(t, s), make([]Invoke, n), make([]Invoked, n)
	t.Cleanup(x.Close)
	for i := range ops {
		ops[i] = Invoke{Kind: InvokePutIfAbsent, Key: fmt.Appendf(nil, "key %08d", i), Operand: oldValue(i), ExpiresAt: far}
	}
	if _, err := x.InvokeAll(t.Context(), ops, nil, DurabilityAsync, out); err != nil {
		t.Fatal(err)
	}
	for i := range ops {
		ops[i] = Invoke{Kind: kind, Key: ops[i].Key}
		if kind == InvokeGetAndSet {
			ops[i].Operand = newValue(i)
		}
	}
	x.Trim()
	return x, ops, out
}

func oldValue(i int) []byte { return bytes.Repeat([]byte{byte(i)}, 100) }
func newValue(i int) []byte { return bytes.Repeat([]byte{byte(i + 1)}, 100) }

// TestManyValuesAreInMemoryOnce: under its latches an InvokeAll of many short values has nothing more of what it read than the values, its batch has no copies of
// those that it writes, and the demand was about what it writes. What is returned is not copied either, and stays as it is.
func TestManyValuesAreInMemoryOnce(t *testing.T) {
	const n = 20_000
	for _, c := range []struct {
		name    string
		kind    InvokeKind
		returns bool
	}{{"exchanges", InvokeGetAndSet, true}, {"persists", InvokePersist, false}} {
		t.Run(c.name, func(t *testing.T) {
			x, ops, out := manyValues(t, n, c.kind)
			for i := range ops {
				ops[i].ReturnOld, ops[i].ReturnNew = c.returns, c.returns
			}
			wanted, w := 0, &x.buffers.ranged.write
			x.Permit(func() error {
				if wanted == 0 { // nothing is computed yet
					d := x.demand(w)
					wanted = d.Body.Size() + d.More
					if held := x.buffers.batch.memoryBytes(); held > pooledBytesMax {
						t.Errorf("%d bytes of the keys that were read", held)
					}
					return nil
				}
				if written := w.body.Size(); wanted < written || wanted > written+n*50 {
					t.Errorf("the demand was %d bytes, and %d are written", wanted, written)
				}
				if held := w.Batch.MemoryBytes() / n; held > 200 {
					t.Errorf("the batch has %d bytes for each operation", held)
				}
				return nil
			})
			if _, err := x.InvokeAll(t.Context(), ops, nil, DurabilityAsync, out); err != nil {
				t.Fatal(err)
			}
			x.Permit(nil)
			old, fresh := make([][]byte, n), make([][]byte, n)
			for i := range out {
				if c.returns {
					old[i], fresh[i] = out[i].TakeOld(), out[i].TakeNew()
				}
			}
			if c.returns && (&old[9][0] != &out[9].Old[0] || &fresh[9][0] != &ops[9].Operand[0]) {
				t.Error("what is returned is copied")
			}
			if _, err := x.InvokeAll(t.Context(), ops[:1000], nil, DurabilityAsync, make([]Invoked, 1000)); err != nil { // with the same buffers
				t.Fatal(err)
			}
			for i := range ops {
				now := newValue(i)
				if !c.returns {
					now = oldValue(i)
				} else if !bytes.Equal(old[i], oldValue(i)) || !bytes.Equal(fresh[i], now) {
					t.Fatalf("operation %d returned %x and %x", i, old[i], fresh[i])
				}
				if v, err := x.Get(nil, ops[i].Key, 0); err != nil || !bytes.Equal(v.Data, now) {
					t.Fatalf("%s is %x, %v", ops[i].Key, v.Data, err)
				}
			}
		})
	}
}

// TestAFewValuesOfManyAreCopied: an answer with one of them does not keep the memory of all.
func TestAFewValuesOfManyAreCopied(t *testing.T) {
	const n = 20_000
	x, ops, out := manyValues(t, n, InvokeGetAndSet)
	ops[7].ReturnOld, ops[7].ReturnNew = true, true
	if _, err := x.InvokeAll(t.Context(), ops, nil, DurabilityAsync, out); err != nil {
		t.Fatal(err)
	}
	if old := out[7].TakeOld(); !bytes.Equal(old, oldValue(7)) || &old[0] == &out[7].Old[0] {
		t.Errorf("%x is returned, in the memory of the others", old)
	}
}

// TestAnOperandWithMoreMemoryIsCopied: an answer keeps no more than it counts.
func TestAnOperandWithMoreMemoryIsCopied(t *testing.T) {
	const n = 20_000
	x, ops, out := manyValues(t, n, InvokeGetAndSet)
	for i := range ops {
		ops[i].ReturnOld, ops[i].ReturnNew = true, true
	}
	ops[7].Operand = append(make([]byte, 0, 1000), ops[7].Operand...)
	if _, err := x.InvokeAll(t.Context(), ops, nil, DurabilityAsync, out); err != nil {
		t.Fatal(err)
	}
	if value := out[7].TakeNew(); !bytes.Equal(value, newValue(7)) || cap(value) > 200 {
		t.Errorf("%x is returned, with room for %d bytes", value, cap(value))
	}
}
