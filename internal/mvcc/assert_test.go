//go:build invariants

package mvcc

import (
	"runtime"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAssertionsFire plants one bug for each assertion.
func TestAssertionsFire(t *testing.T) {
	for name, c := range map[string]struct {
		plant func(s *Store, x *Session)
		want  string
	}{
		"installed twice": {func(s *Store, _ *Session) { s.watermark.markInstalled(s.Visible()) }, "visible already"},
		"ring too small":  {func(s *Store, _ *Session) { s.watermark.markInstalled(s.Visible() + 1<<20) }, "ring's"},
		"ring entry in use": {func(s *Store, _ *Session) {
			e := uint64(s.Visible()) + 2
			s.watermark.ringEntry(e).Store(e)
			s.watermark.assertInstallable(e)
		}, "not visible"},
		"visible goes back": {func(s *Store, _ *Session) { s.watermark.jumpTo(s.Visible() - 1) }, "decreases"},
		"snapshot in the future": {func(s *Store, x *Session) {
			x.at = s.Visible() + 1
			x.assertSnapshot()
		}, "after visible"},
		"snapshot before min-visible": {func(s *Store, x *Session) {
			for s.MinVisible() < s.Visible() { // a snapshot of the store's own may be of before the puts
				s.collector.collect(nil, true)
				runtime.Gosched()
			}
			x.at, x.hasSnapshot = s.MinVisible()-1, true
			x.assertSnapshot()
		}, "before min-visible"},
		"no latches": {func(_ *Store, x *Session) {
			var w Write
			w.Set([]byte("k"), nil)
			x.committing.held.reset()
			x.committing.held.add(x.store.latches, w.Batch.Key(0))
			x.assertLatched(&w, 1)
		}, "without the latches"},
		"latch of another key": {func(s *Store, x *Session) {
			var w Write
			w.Set([]byte("k"), nil)
			x.committing.held.reset()
			x.assertLatched(&w, 1)
		}, "is not held"},
		"later epoch under the latch": {func(s *Store, x *Session) {
			var w Write
			w.Set([]byte("k"), nil)
			x.committing.held.reset()
			x.committing.held.add(s.latches, w.Batch.Key(0))
			stripe := &s.latches.table[x.committing.held.only]
			stripe.tryLock()
			defer stripe.unlock()
			stripe.newest = 9
			x.assertLatched(&w, 8)
		}, "newest epoch is 9"},
		"two goroutines": {func(_ *Store, x *Session) {
			x.assertAlone(true)
			x.assertAlone(true)
		}, "two goroutines"},
	} {
		t.Run(name, func(t *testing.T) {
			s := mustOpen(t, tiny(vfs.NewMem()))
			for range 3 {
				mustPut(t, s, "k", "v")
			}
			x := mustSession(t, s)
			defer func() {
				broken, _ := recover().(string)
				if !strings.Contains(broken, c.want) {
					t.Errorf("panicked with %q, want %q", broken, c.want)
				}
				x.hasSnapshot = false
				x.Close()
			}()
			c.plant(s, x)
		})
	}
}
