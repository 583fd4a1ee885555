//go:build invariants

package mvcc

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/storage/memtable"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestCommitThatFindsNoMemoryStopsTheStore: the system gives no more memory after the epoch of a
// commit was reserved, and nothing is left of what was set aside for it. The commit and one after
// it are told that they may be lost, further writes are refused, reads go on, and Close ends. After
// a restart each of the two is there whole or not at all.
func TestCommitThatFindsNoMemoryStopsTheStore(t *testing.T) {
	for name, operation := range operations {
		for _, step := range []commitStep{stepReserved, stepCopied} {
			t.Run(name+"/"+fmt.Sprint(step), func(t *testing.T) { starve(t, operation, step) })
		}
	}
}

func starve(t *testing.T, operation func(context.Context, *Store, *Session) error, step commitStep) {
	fs := vfs.NewMem()
	o := quiet(fs)
	var refusing atomic.Bool
	errNone := errors.New("no memory")
	o.Storage.Obtain = func(uint64) error {
		if refusing.Load() {
			return errNone
		}
		return nil
	}
	s := mustOpen(t, o)
	mustPut(t, s, "k", "old")
	mustPut(t, s, "r", "read")
	x, other, waiting := mustSession(t, s), mustSession(t, s), mustSession(t, s)
	last := s.Visible()
	bounded, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	after := make(chan error, 1)
	x.committing.atStep = func(at commitStep) {
		if at != step {
			return
		}
		x.committing.atStep = nil
		w := Write{Durability: DurabilitySync}
		w.Set([]byte(elsewhere(s, "k")), []byte("after"))
		epoch, err := other.Commit(context.Background(), &w)
		if err != nil {
			t.Error(err)
		}
		go func() { after <- s.Wait(bounded, epoch, DurabilitySync) }()
		refusing.Store(true)
		x.committing.writer.Starve()
	}
	if err := operation(t.Context(), s, x); err != nil {
		t.Fatalf("the commit has a record, so Wait must return its error: %v", err)
	}
	epoch := x.committing.previous
	if epoch <= last || s.Visible() >= epoch {
		t.Fatalf("epoch %d, with visible %d", epoch, s.Visible())
	}
	for what, err := range map[string]error{
		"the commit's wait":                 s.Wait(bounded, epoch, DurabilityAsync),
		"the wait of the one after it":      <-after,
		"the store":                         s.Err(),
		"another write":                     operation(bounded, s, waiting),
		"another write of the same session": operation(bounded, s, x),
	} {
		if !errors.Is(err, ErrFailed) || !errors.Is(err, memtable.ErrStarved) || !errors.Is(err, errNone) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := s.Checkpoint(bounded); err == nil || bounded.Err() != nil {
		t.Errorf("a checkpoint of an incomplete commit: %v", err)
	}
	if k, all := get(t, s, "k", 0), dump(t, s); k != "old" || len(all) != 2 || all["r"] != "read" {
		t.Errorf("k is %s, everything %v", k, all)
	}
	for _, x := range []*Session{x, other, waiting} {
		x.Close()
	}
	if err := s.Close(); err != nil && !errors.Is(err, ErrFailed) {
		t.Error(err)
	}
	again := mustOpen(t, quiet(fs.Crash(1, vfs.SurviveAll)))
	if got := get(t, again, "k", 0); got != "old" && len(got) < 1000 && got != "-" {
		t.Errorf("k is %q after the restart", got)
	}
	mustPut(t, again, "k", "new")
}
