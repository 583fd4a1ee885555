package mvcc

import (
	"errors"
	"testing"

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
