package mvcc

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestExecuteWaitsForABulkLoadThatBecomesVisible: readers have the tree of a bulk load a moment before its epoch is visible. A condition on
// a range that finds it there tells nothing before that, and does not use up its attempts meanwhile.
func TestExecuteWaitsForABulkLoadThatBecomesVisible(t *testing.T) {
	fs := vfs.NewMem()
	o := tiny(fs)
	o.Retention = time.Hour
	s := mustOpen(t, o)
	since := mustPut(t, s, "k", "before")
	var pausing atomic.Bool
	var lock sync.Once
	fs.SetHook(func(op vfs.Op, name string) {
		if pausing.Load() && op&(vfs.OpSync|vfs.OpSyncData) != 0 && name == "db/data.ekv" {
			lock.Do(s.timeline.mu.Lock) // which the publication takes before it makes the epoch visible
		}
	})
	l, err := s.BeginBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	l.Permit(func() error { pausing.Store(true); return nil })
	if err := l.Add([]byte("k"), []byte("loaded")); err != nil {
		t.Fatal(err)
	}
	committed := make(chan error, 1)
	go func() {
		_, err := l.Commit(context.Background())
		committed <- errors.Join(err, l.Close())
	}()
	eventually(t, "readers with the tree of the bulk load", func() bool { return s.engine.Pin().ActiveSince() > s.Visible()+1 })
	x := mustSession(t, s)
	defer x.Close()
	executed := make(chan error, 1)
	var out Executed
	go func() {
		var err error
		out, err = x.Execute(context.Background(), &Execution{
			Write: &Write{}, Ranges: []RangeCondition{{Lower: []byte("k"), UnchangedSince: since}}, Otherwise: true,
			Operate: func(context.Context, *Txn, bool) error { return nil },
		})
		executed <- err
	}()
	select {
	case err := <-executed:
		t.Errorf("before the bulk load is visible: %v", err)
		executed <- nil
	case <-time.After(20 * time.Millisecond):
	}
	s.timeline.mu.Unlock()
	if err := errors.Join(<-executed, <-committed); err != nil || out.Holds && !t.Failed() {
		t.Errorf("holds %v: %v", out.Holds, err)
	}
}
