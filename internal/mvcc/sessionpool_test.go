package mvcc

import (
	"errors"
	"runtime"
	"testing"
	"weak"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestSessionsKeepTheirAttachmentInThePool: a session comes from the pool with what its user attached to it, and without
// the function that admits its large values. After a burst only so many idle sessions keep their attachments.
func TestSessionsKeepTheirAttachmentInThePool(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	x.Attachment = "mine"
	x.AdmitLarge(func(int) error { return errors.New("of an earlier request") })
	x.Close()
	again := mustSession(t, s)
	if again != x || again.Attachment != "mine" || again.admit != nil {
		t.Errorf("the session came back with attachment %v, admits %v", again.Attachment, again.admit != nil)
	}
	burst := []*Session{again}
	for len(burst) < attachedMax+10 {
		y := mustSession(t, s)
		y.Attachment = "burst"
		burst = append(burst, y)
	}
	for _, y := range burst {
		y.Close()
	}
	attached := 0
	for _, y := range s.sessions.idle {
		if y.Attachment != nil {
			attached++
		}
	}
	if attached != attachedMax {
		t.Errorf("%d idle sessions keep their attachments, want %d", attached, attachedMax)
	}
	if open, all := s.Sessions(); open != 0 || all != len(burst) {
		t.Errorf("%d sessions in use of %d, want 0 of %d", open, all, len(burst))
	}
}

// TestPooledSessionsForgetTheirScans: the bounds of a scan are memory of its request, and its context leads to its connection. Sessions are pooled
// for good.
func TestPooledSessionsForgetTheirScans(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	mustPut(t, s, "a", "b")
	for name, scan := range map[string]func(*Session, ScanOptions) error{
		"a scan": func(x *Session, o ScanOptions) error {
			if _, err := x.OpenSnapshot(0); err != nil {
				return err
			}
			c, err := x.Scan(o)
			if err == nil {
				c.Next()
			}
			return err
		},
		"a scan in a transaction": func(x *Session, o ScanOptions) error {
			txn, err := x.Begin(TxnOptions{})
			if err != nil {
				return err
			}
			c, err := txn.Scan(o)
			if err == nil {
				c.Next()
			}
			return err
		},
	} {
		kept := func() weak.Pointer[[64]byte] {
			x, lower := mustSession(t, s), new([64]byte)
			defer x.Close()
			if err := scan(x, ScanOptions{Lower: lower[:]}); err != nil {
				t.Fatal(err)
			}
			return weak.Make(lower)
		}()
		runtime.GC()
		if kept.Value() != nil {
			t.Errorf("%s: an idle session keeps the memory of its request", name)
		}
	}
}

// TestPooledSessionsKeepNoRoomForManyConditions: a request of some MB may have a hundred thousand of them.
func TestPooledSessionsKeepNoRoomForManyConditions(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	x.buffers.ranged.write.Conditions = make([]Condition, pooledBytesMax/64)
	x.Close()
	if n := cap(x.buffers.ranged.write.Conditions); n > 0 {
		t.Errorf("an idle session has room for %d conditions", n)
	}
}
