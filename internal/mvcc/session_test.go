package mvcc

import (
	"context"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestPooledSessionKeepsNoHugeBuffers: whatever its largest request was, a session in the pool
// holds little, and works as before.
func TestPooledSessionKeepsNoHugeBuffers(t *testing.T) {
	const size = 4 * pooledBytesMax
	s := mustOpen(t, tiny(vfs.NewMem()))
	huge := string(make([]byte, size))
	for name, request := range map[string]func(x *Session) error{
		"transaction": func(x *Session) error {
			tx, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
			if err == nil {
				err = tx.Set([]byte("huge"), []byte(huge))
			}
			if err == nil {
				_, err = tx.Commit(context.Background())
			}
			return err
		},
		"validated reads": func(x *Session) error {
			tx, err := x.Begin(TxnOptions{})
			for i := 0; err == nil && i < 200_000; i++ {
				_, err = tx.Get(nil, fmt.Appendf(nil, "%010d", i))
			}
			return err
		},
		"range delete": func(x *Session) error {
			var w Write
			for i := range 30_000 {
				w.Set(fmt.Appendf(nil, "many-%06d", i), nil)
			}
			if _, err := x.Commit(context.Background(), &w); err != nil {
				return err
			}
			_, err := x.DeleteRange(context.Background(), RangeDelete{Lower: []byte("many-"), Upper: []byte("many."), Durability: DurabilityAsync})
			return err
		},
		"operations": func(x *Session) error {
			op := Invoke{Kind: InvokeGetAndSet, Key: []byte("huge"), Operand: []byte(huge)}
			for range 2 {
				if _, err := x.InvokeAll(context.Background(), []Invoke{op}, nil, DurabilityAsync, make([]Invoked, 1)); err != nil {
					return err
				}
			}
			return nil
		},
	} {
		x := mustSession(t, s)
		if err := request(x); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if held := x.memoryBytes(); held <= pooledBytesMax {
			t.Errorf("%s: the session has %d bytes after it: the test tests nothing", name, held)
		}
		x.Close()
		if held := x.memoryBytes(); held > pooledBytesMax {
			t.Errorf("%s: a pooled session has %d bytes", name, held)
		}
		again := mustSession(t, s)
		if _, err := put(again, "small", "v", DurabilityAsync); err != nil {
			t.Fatal(err)
		}
		if _, err := again.OpenSnapshot(0); err != nil {
			t.Fatal(err)
		}
		if v, err := again.Read(nil, []byte("small")); err != nil || string(v.Data) != "v" {
			t.Errorf("after %s: %q, %v", name, v.Data, err)
		}
		again.Close()
	}
	if got := get(t, s, "huge", 0); got != huge {
		t.Errorf("the value has %d bytes", len(got))
	}
}
