package mvcc

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestCommitsGoOnWhileABulkLoadIsMerged stops the merge of a bulk load in its first write to the
// data file. It makes commits of every kind, and then lets the merge continue: no commit waits for
// the merge, and the bulk load catches up with the commits.
func TestCommitsGoOnWhileABulkLoadIsMerged(t *testing.T) {
	fs := vfs.NewMem()
	s := mustOpen(t, tiny(fs))
	mustPut(t, s, "n", "0")
	want := entriesFor("x", 3000, 1, rand.New(rand.NewPCG(4, 4)))
	l, err := s.BeginBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range want {
		if err := l.Add([]byte(k), []byte(v)); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	met, goOn := make(chan struct{}), make(chan struct{})
	var stopped atomic.Bool
	fs.SetHook(func(op vfs.Op, name string) {
		if op == vfs.OpWrite && strings.HasSuffix(name, ".ekv") && !stopped.Swap(true) {
			close(met)
			<-goOn
		}
	})
	done := make(chan error, 1)
	var out BulkLoaded
	go func() {
		var err error
		out, err = l.Commit(context.Background())
		done <- err
	}()
	<-met
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	x := mustSession(t, s)
	defer x.Close()
	large := strings.Repeat("L", 20_000)
	for i := range 30 {
		for j, value := range []string{"put beside", large} { // over what is loaded, and beside it
			w := Write{Durability: DurabilitySync}
			key := fmt.Sprintf("key-%05d%s", i, []string{"", "-beside"}[j])
			w.Set([]byte(key), []byte(value))
			e, err := x.Commit(ctx, &w)
			if err == nil {
				err = s.Wait(ctx, e, DurabilitySync)
			}
			if err != nil {
				close(goOn)
				t.Fatalf("put %d during a bulk load: %v", i, err)
			}
			if j == 1 {
				want[key] = value
			}
		}
		if err := incrementSomehow(x, []byte("n"), i%3); err != nil {
			close(goOn)
			t.Fatal(err)
		}
		want["n"] = fmt.Sprint(i + 1)
	}
	before, err := x.OpenSnapshot(0)
	if err != nil {
		t.Fatal(err)
	}
	close(goOn)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	fs.SetHook(nil)
	if st := s.Stats(); out.CommitPause <= 0 || st.CommitPause < out.CommitPause || st.CommitPauseMax != st.CommitPause {
		t.Errorf("the bulk load paused commits for %v; the statistics have %v, and at most %v", out.CommitPause, st.CommitPause, st.CommitPauseMax)
	}
	if v, err := x.Read(nil, []byte("key-00003")); err != nil || string(v.Data) != "put beside" {
		t.Errorf("a snapshot at %d from before the switch reads %.20q, %v", before, v.Data, err)
	}
	x.CloseSnapshot()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if v := get(t, s, "key-00003", 0); v != want["key-00003"] {
		t.Errorf("after the bulk load at %d: %.20q", out.Epoch, v)
	}
	mustHold(t, s, want)
	mustPut(t, s, "after", "1")
	want["after"] = "1"
	mustClose(t, s)
	s = mustOpen(t, tiny(fs))
	mustHold(t, s, want)
}

// TestContextEndsTheWaitForABulkLoadsSwitch stops a bulk load in its switch. A commit whose context
// ends has changed nothing. The other commits complete after the switch, and also if the bulk load
// is cancelled.
func TestContextEndsTheWaitForABulkLoadsSwitch(t *testing.T) {
	for _, cancelled := range []bool{false, true} {
		fs := vfs.NewMem()
		s := mustOpen(t, tiny(fs))
		l, err := s.BeginBulkLoad()
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Add([]byte("k"), []byte("loaded")); err != nil {
			t.Fatal(err)
		}
		met, goOn := make(chan struct{}), make(chan struct{})
		var stopped atomic.Bool
		fs.SetHook(func(op vfs.Op, name string) {
			if op == vfs.OpWrite && strings.HasSuffix(name, ".ekv") && s.latches.table[stripes-1].state.Load()&latchHeld != 0 && !stopped.Swap(true) {
				close(met)
				<-goOn
			}
		})
		loading, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := l.Commit(loading)
			done <- err
		}()
		<-met
		x, y := mustSession(t, s), mustSession(t, s)
		ctx, stop := context.WithTimeout(t.Context(), 10*time.Millisecond)
		var w Write
		w.Set([]byte("gone"), []byte("1"))
		if _, err := x.Commit(ctx, &w); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("during the switch of a bulk load: %v", err)
		}
		stop()
		other := make(chan error, 1)
		go func() {
			_, err := put(y, "other", "1", DurabilitySync)
			other <- err
		}()
		if cancelled {
			cancel()
		}
		close(goOn)
		want := map[string]string{"other": "1"}
		if err := <-done; cancelled != errors.Is(err, context.Canceled) {
			t.Errorf("the bulk load: %v", err)
		} else if !cancelled {
			want["k"] = "loaded"
		}
		if err := <-other; err != nil {
			t.Error(err)
		}
		cancel()
		fs.SetHook(nil)
		x.Close()
		y.Close()
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		mustHold(t, s, want)
		noSpoolsLeft(t, fs)
		mustClose(t, s)
	}
}

// TestDeletionOfNothingDirectlyAfterABulkLoadDoesNotWait: a range deletion that finds no key, and
// so only checks its conditions, validates in the generation that the bulk load has left, which
// takes no commits. It returns and releases its latches.
func TestDeletionOfNothingDirectlyAfterABulkLoadDoesNotWait(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	mustPut(t, s, "a", "1")
	loaded := mustLoad(t, s, map[string]string{"b": "2"})
	x := mustSession(t, s)
	defer x.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for _, c := range []struct {
		kind  ConditionKind
		holds bool
	}{{KeyPresent, true}, {KeyAbsent, false}} {
		out, err := x.DeleteRange(ctx, RangeDelete{Lower: []byte("x"), Conditions: []Condition{{Kind: c.kind, Key: []byte("b")}}})
		if c.holds && (err != nil || out.Epoch != loaded.Epoch) || !c.holds && !errors.As(err, new(*PreconditionError)) {
			t.Fatalf("condition %v: %+v, %v", c.kind, out, err)
		}
	}
	mustPut(t, s, "b", "3")
}
