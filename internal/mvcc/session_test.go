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

// TestBuffersBesideASessionCount with its own until the next Trim, or until it is closed.
func TestBuffersBesideASessionCount(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x, y := mustSession(t, s), mustSession(t, s)
	wantKept := func(want int64) {
		t.Helper()
		if n := s.sessions.kept.total.Load(); n < want || n > want+100<<10 {
			t.Errorf("%d bytes are counted, want %d", n, want)
		}
	}
	const most = keptBytesMin
	if !x.TrimBeside(most * 3 / 4) {
		t.Error("there is no room for the first")
	}
	if y.TrimBeside(most / 2) {
		t.Error("there is room for more than all may keep")
	}
	wantKept(most * 3 / 4)
	if !y.TrimBeside(most / 8) {
		t.Error("there is no room for what is left")
	}
	wantKept(most * 7 / 8)
	y.Trim()
	wantKept(most * 3 / 4)
	x.Close()
	wantKept(0)
}

// TestSessionsTogetherKeepLittle: each may keep something, all of them only so much. A session that has been given up keeps its count of nothing.
func TestSessionsTogetherKeepLittle(t *testing.T) {
	testseed.SkipUnderRace(t)
	s := mustOpen(t, tiny(vfs.NewMem()))
	const count = 64
	var all []*Session
	for range count {
		all = append(all, mustSession(t, s))
	}
	kept := func() (sum int64) {
		counted := int64(0)
		for _, x := range all {
			sum += int64(x.memoryBytes())
			counted += int64(x.buffers.kept)
			if x.buffers.kept > x.memoryBytes() {
				t.Errorf("%d bytes of a session are counted that keeps %d", x.buffers.kept, x.memoryBytes())
			}
		}
		if counted != s.sessions.kept.total.Load() {
			t.Errorf("%d bytes are counted of all, and %d of each", s.sessions.kept.total.Load(), counted)
		}
		return sum
	}
	request := func(x *Session, reads int) {
		tx, err := x.Begin(TxnOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for i := range reads {
			if _, err := tx.Get(nil, fmt.Appendf(nil, "%010d", i)); err != nil {
				t.Fatal(err)
			}
			if err := tx.Set(fmt.Appendf(nil, "%010d", i), nil); err != nil {
				t.Fatal(err)
			}
		}
		if x.Trim(); reads > 0 && x.memoryBytes() < keptBytesMin/count*2 {
			t.Fatalf("a session keeps %d bytes: the test tests nothing", x.memoryBytes())
		}
		tx.Rollback()
		x.Trim()
	}
	for _, reads := range []int{5_000, 8_000} {
		for _, x := range all {
			request(x, reads)
			request(x, 0) // which takes what the one before has left
		}
		if n := kept(); n > keptBytesMin+count*keptUncounted || n < keptBytesMin/2 {
			t.Errorf("all sessions keep %d bytes", n)
		}
	}
	for _, x := range all {
		x.buffers = sessionBuffers{txn: Txn{session: x}, kept: x.buffers.kept}
		x.Trim()
		x.Close()
	}
	if n := s.sessions.kept.total.Load(); n != 0 {
		t.Errorf("%d bytes are counted of sessions that keep nothing", n)
	}
}
