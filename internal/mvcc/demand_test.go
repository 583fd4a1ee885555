package mvcc

import (
	"fmt"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// invoking is the write of an InvokeAll.
func invoking(ops []Invoke, request *Request) *Write {
	w := &Write{Durability: DurabilityAsync, ops: ops, outcomes: make([]Invoked, len(ops))}
	w.setRequest(request)
	for i := range ops {
		w.Delete(ops[i].Key)
	}
	return w
}

// TestTheDemandHasAllThatACommitInstalls: what a commit of many keys waits for, before it takes its latches, has room for all that it writes: values
// that it computes, the records of deadlines, old and new, and of leases, and that of its request.
func TestTheDemandHasAllThatACommitInstalls(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Storage.MemtableBytes, o.Storage.SegmentBytes = 4<<20, 4<<20
	s := mustOpen(t, o)
	s.GuardLeases(LeaseGuard{Admit: func(uint64, int) error { return nil }, Room: func(uint64) int { return 1 << 20 }})
	x := mustSession(t, s)
	defer x.Close()
	key := func(i, keyBytes int) []byte { return fmt.Appendf(nil, "%0*d", keyBytes, i) }
	// promised commits 40 operations, and compares what it writes with the demand.
	promised := func(name string, w *Write) {
		t.Helper()
		var d *storage.Demand
		x.Permit(func() error { // the latches are held, and nothing is computed
			if d == nil {
				d = x.demand(w)
				body := *d.Body
				d.Body = &body
			}
			return nil
		})
		defer x.Permit(nil)
		if _, err := commitAndWait(x, w); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if size, count := d.Body.Size()+d.More, d.Body.Count()+d.Records; size < w.body.Size() || count < w.body.Count() {
			t.Errorf("%s: %d bytes in %d operations, and the demand was %d in %d", name, w.body.Size(), w.body.Count(), size, count)
		}
	}
	result := func() []byte { return make([]byte, resultBytesMax) }
	for _, had := range []metadata.Fields{{}, {ExpiresAt: far}, {Lease: 1 << 60}, {ExpiresAt: far, Lease: 1 << 60}} {
		for _, size := range []struct{ key, value int }{{4, 1}, {300, 1}, {4, 2000}} {
			for kind := InvokeAdd; kind <= InvokePersist; kind++ {
				for _, deadline := range []uint64{0, far + 1<<40} {
					if kind == InvokePersist && deadline != 0 {
						continue
					}
					name := fmt.Sprintf("%d, deadline %d, had %+v, %+v", kind, deadline, had, size)
					var before Write
					before.Durability = DurabilityAsync
					ops := make([]Invoke, 40)
					for i := range ops {
						value := strings.Repeat("0", size.value-1) + "1"
						ops[i] = Invoke{Kind: kind, Key: key(i, size.key), Expect: []byte(value), ExpiresAt: deadline}
						switch kind {
						case InvokeAdd, InvokeMin:
							ops[i].Delta = -1 << 62
						case InvokeMax:
							ops[i].Delta = 1 << 62
						case InvokeAppend, InvokeCompareSet, InvokePutIfAbsent, InvokeGetAndSet:
							ops[i].Operand = make([]byte, size.value)
						}
						if kind != InvokePutIfAbsent {
							before.SetWithMetadata(ops[i].Key, []byte(value), &had)
						} else {
							before.Delete(ops[i].Key)
						}
					}
					promised("puts before "+name, &before)
					var r *Request
					if had.Lease == 0 {
						r = &Request{ID: requestID(s.now()), Result: result}
					}
					promised(name, invoking(ops, r))
				}
			}
		}
	}
}
