package mvcc

import (
	"context"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestPausedCursorKeepsNoLargeValue: the caller may wait for a client for minutes.
func TestPausedCursorKeepsNoLargeValue(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	for i := range 4 {
		if _, err := put(x, fmt.Sprint(i), string(make([]byte, 4*pausedBytesMax)), DurabilityAsync); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
	if _, err := x.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	c, err := x.Scan(ScanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for n := 0; c.Next(); n++ {
		if len(c.Value()) != 4*pausedBytesMax || x.memoryBytes() < pausedBytesMax {
			t.Fatalf("entry %d has %d bytes, the session %d: the test tests nothing", n, len(c.Value()), x.memoryBytes())
		}
		if c.Pause(); x.memoryBytes() > pausedBytesMax {
			t.Fatalf("a paused cursor keeps %d bytes", x.memoryBytes())
		}
	}
	d, err := x.Difference(DifferenceOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	found := 0
	for ; d.Next(); found++ {
		if d.Pause(); len(d.Value()) > 0 {
			t.Fatalf("a paused difference keeps %d bytes", len(d.Value()))
		}
	}
	if c.Err() != nil || d.Err() != nil || found != 4 {
		t.Fatalf("%v, %v, %d differences", c.Err(), d.Err(), found)
	}
}

// TestPooledSessionKeepsNoHugeBuffers: whatever its largest request was, a session in the pool
// holds little, and works as before.
func TestPooledSessionKeepsNoHugeBuffers(t *testing.T) {
	testseed.SkipUnderRace(t)
	const size = 4 * pooledBytesMax
	s := mustOpen(t, tiny(vfs.NewMem()))
	huge := string(make([]byte, size))
	part, parts := huge[:largeValueMin/2], 2*size/largeValueMin // one that is large has memory of its own
	for name, request := range map[string]func(x *Session) error{
		"transaction": func(x *Session) error {
			tx, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
			for i := 0; err == nil && i < 10_000; i++ { // a longer value is not copied into the batch
				err = tx.Set(fmt.Append(nil, "short", i), []byte(huge[:500]))
			}
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
			ops := []Invoke{{Kind: InvokeGetAndSet, Key: []byte("huge"), Operand: []byte(huge)}}
			for i := range parts {
				ops = append(ops, Invoke{Kind: InvokeGetAndSet, Key: fmt.Append(nil, "part", i), Operand: []byte(part)})
			}
			for range 2 {
				if _, err := x.InvokeAll(context.Background(), ops, nil, DurabilityAsync, make([]Invoked, len(ops))); err != nil {
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
