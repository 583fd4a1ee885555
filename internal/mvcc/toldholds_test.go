package mvcc

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestNothingTellsOfAHoldBeforeItIsDurable: while a sync is stuck, a hold that is being taken is not listed, and one that is being renewed has the deadline
// of before: a crash could take back what was told. Both keep what they will keep. When the client does not wait any more, the renewal is still told once it is durable.
func TestNothingTellsOfAHoldBeforeItIsDurable(t *testing.T) {
	fs := vfs.NewFaulty(vfs.NewMem())
	s := mustOpen(t, tiny(fs))
	x := mustSession(t, s)
	defer x.Close()
	y := mustSession(t, s)
	defer y.Close()
	at := mustPut(t, s, "k", "v")
	known, err := x.TakeHold(t.Context(), "known", at, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	stick := func() func() {
		until := make(chan struct{})
		rule := fs.Inject(vfs.Rule{Op: vfs.OpSync | vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Until: until, Sticky: true})
		release := sync.OnceFunc(func() { rule.Remove(); close(until) })
		synced := make(chan error, 1)
		go func() { synced <- writeSync(s, y, "k") }() // what syncs the log does not give up; all others wait for it
		eventually(t, "the sync is stuck", func() bool { return rule.Fired() > 0 })
		once := sync.OnceFunc(func() {
			release()
			if err := <-synced; err != nil {
				t.Error(err)
			}
		})
		t.Cleanup(once) // before the store is closed
		return once
	}
	change := func(do func(ctx context.Context) error) (giveUp func(), ended chan error) {
		before := s.Visible()
		ctx, cancel := context.WithCancel(t.Context())
		ended = make(chan error, 1)
		go func() { ended <- do(ctx) }()
		eventually(t, "the record is visible", func() bool { return s.Visible() > before })
		return cancel, ended
	}
	told := func(want ...Hold) {
		t.Helper()
		got := s.Holds()
		if len(got) != len(want) {
			t.Fatalf("%v are told, not %v", got, want)
		}
		for i := range want {
			if got[i] != want[i] {
				t.Fatalf("%v are told, not %v", got, want)
			}
		}
	}
	held := func() (held keys.Epoch) {
		s.timeline.mu.Lock()
		defer s.timeline.mu.Unlock()
		return s.timeline.heldLocked()
	}

	release := stick()
	var taken Hold
	giveUp, ended := change(func(ctx context.Context) (err error) {
		taken, err = x.TakeHold(ctx, "taken", at, time.Hour)
		return err
	})
	told(known)
	release()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	giveUp()
	told(known, taken)

	release = stick()
	var renewed Hold
	giveUp, ended = change(func(ctx context.Context) (err error) {
		renewed, err = x.RenewHold(ctx, taken.ID, 2*time.Hour)
		return err
	})
	told(known, taken)
	giveUp()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	told(known, taken)
	giveUp, ended = change(func(ctx context.Context) error { _, err := x.TakeHold(ctx, "given up", at, time.Hour); return err })
	giveUp()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	told(known, taken)
	if held() != at {
		t.Errorf("epoch %d is kept, not %d", held(), at)
	}
	release()
	mustPut(t, s, "k", "newer")
	told(known, renewed)
}

func writeSync(s *Store, x *Session, key string) error {
	w := &Write{Durability: DurabilitySync}
	w.Set([]byte(key), []byte("value"))
	epoch, err := x.Commit(context.Background(), w)
	if err != nil {
		return err
	}
	return s.Wait(context.Background(), epoch, DurabilitySync)
}

// TestARenewalThatIsNotPermittedMovesNoDeadline: its commit is refused, so there is no record of it.
func TestARenewalThatIsNotPermittedMovesNoDeadline(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	h, err := x.TakeHold(t.Context(), "test", 0, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	refused := errors.New("the user is gone")
	x.Permit(func() error { return refused })
	if _, err := x.RenewHold(t.Context(), h.ID, HoldTimeMax); !errors.Is(err, refused) {
		t.Fatal(err)
	}
	x.Permit(nil)
	if got := s.Holds(); len(got) != 1 || got[0] != h || len(s.timeline.untold) != 0 || s.timeline.holds[h.ID].Deadline != h.Deadline {
		t.Errorf("%v, not %v", got, h)
	}
}
