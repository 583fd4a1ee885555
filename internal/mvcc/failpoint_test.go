//go:build invariants

package mvcc

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// stops lists the steps at which a commit may be stopped, and what other sessions may see then.
var stops = []struct {
	step                     commitStep
	name                     string
	claimed, logged, visible bool // its epoch, its record, its versions
	latched                  bool
}{
	{step: stepLatched, name: "latched", latched: true},
	{step: stepChecked, name: "checked", latched: true},
	{step: stepReserved, name: "reserved", claimed: true, latched: true},
	{step: stepCopied, name: "copied", claimed: true, logged: true, latched: true},
	{step: stepInserted, name: "inserted", claimed: true, logged: true, latched: true},
	{step: stepInstalled, name: "marked", claimed: true, logged: true, visible: true, latched: true},
	{step: stepReleased, name: "released", claimed: true, logged: true, visible: true},
}

// aMoment is the time for which a test observes that a call waits.
const aMoment = 10 * time.Millisecond

// outcome is how a commit ended.
type outcome struct {
	epoch keys.Epoch
	err   error
}

// halted is a commit that is stopped at a step.
type halted struct {
	resume chan struct{}
	result chan outcome
}

// haltAtStep runs commit, which uses x, and returns once it is stopped at a step.
func haltAtStep(t *testing.T, x *Session, step commitStep, commit func() (keys.Epoch, error)) *halted {
	t.Helper()
	h := &halted{resume: make(chan struct{}), result: make(chan outcome, 1)}
	reached := make(chan struct{})
	x.committing.atStep = func(at commitStep) {
		if at == step {
			x.committing.atStep = nil
			close(reached)
			<-h.resume
		}
	}
	go func() {
		e, err := commit()
		h.result <- outcome{e, err}
	}()
	select {
	case <-reached:
	case end := <-h.result:
		t.Fatalf("the commit ended before its step %d: %+v", step, end)
	}
	return h
}

// end lets the commit continue and returns its outcome.
func (h *halted) end() outcome {
	close(h.resume)
	return <-h.result
}

// quiet is a store without background work.
func quiet(fs vfs.FS) Options {
	o := tiny(fs)
	o.SyncInterval, o.GCInterval = time.Hour, time.Hour
	return o
}

func asyncPut(x *Session, key, value string) func() (keys.Epoch, error) {
	return func() (keys.Epoch, error) {
		w := Write{Durability: DurabilityAsync}
		w.Set([]byte(key), []byte(value))
		return x.Commit(context.Background(), &w)
	}
}

// ends reports whether wait ends within aMoment. If it should end, the limit is long enough for a
// busy machine.
func ends(should bool, wait func(context.Context) error) bool {
	patience := aMoment
	if should {
		patience = time.Minute
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return wait(ctx) == nil
}

func newest(visible bool) string {
	if visible {
		return "new"
	}
	return "old"
}

// TestReadersSeeAStoppedCommitWholeOrNotAtAll: at whatever step a commit is stopped, its two keys
// are both old or both new, and a snapshot from before does not change.
func TestReadersSeeAStoppedCommitWholeOrNotAtAll(t *testing.T) {
	for _, stop := range stops {
		t.Run(stop.name, func(t *testing.T) {
			s := mustOpen(t, quiet(vfs.NewMem()))
			mustPut(t, s, "a", "old")
			mustPut(t, s, "b", "old")
			reader, x := mustSession(t, s), mustSession(t, s)
			defer reader.Close()
			defer x.Close()
			if _, err := reader.OpenSnapshot(0); err != nil {
				t.Fatal(err)
			}
			h := haltAtStep(t, x, stop.step, func() (keys.Epoch, error) {
				w := Write{Durability: DurabilityAsync}
				w.Set([]byte("a"), []byte("new"))
				w.Set([]byte("b"), []byte("new"))
				return x.Commit(context.Background(), &w)
			})
			want := newest(stop.visible)
			for _, key := range []string{"a", "b"} {
				if got := get(t, s, key, 0); got != want {
					t.Errorf("%s reads %s, want %s", key, got, want)
				}
			}
			if all := dump(t, s); all["a"] != want || all["b"] != want {
				t.Errorf("a scan reads %v, want %s", all, want)
			}
			if end := h.end(); end.err != nil {
				t.Fatal(end.err)
			}
			if v, err := reader.Read(nil, []byte("a")); err != nil || string(v.Data) != "old" {
				t.Errorf("the older snapshot reads %q, %v", v.Data, err)
			}
			if got := get(t, s, "b", 0); got != "new" {
				t.Errorf("b reads %s in the end", got)
			}
		})
	}
}

// TestWritersDuringAStoppedCommit: a writer of another key commits, and may be acknowledged only
// when every smaller epoch is visible. A writer of the same key waits for the latch. Then a plain
// write gets a later epoch, and a transaction gets a conflict.
func TestWritersDuringAStoppedCommit(t *testing.T) {
	for _, stop := range stops {
		t.Run(stop.name, func(t *testing.T) {
			s := mustOpen(t, quiet(vfs.NewMem()))
			mustPut(t, s, "k", "old")
			x, y, z, other := mustSession(t, s), mustSession(t, s), mustSession(t, s), mustSession(t, s)
			for _, session := range []*Session{x, y, z, other} {
				defer session.Close()
			}
			tx, err := z.Begin(TxnOptions{Isolation: IsolationSnapshot, Durability: DurabilityAsync})
			if err == nil {
				err = tx.Set([]byte("k"), []byte("conflict"))
			}
			if err != nil {
				t.Fatal(err)
			}
			h := haltAtStep(t, x, stop.step, asyncPut(x, "k", "new"))

			e, err := asyncPut(other, elsewhere(s, "k"), "v")()
			if err != nil {
				t.Fatal(err)
			}
			want := !stop.claimed || stop.visible
			if acknowledged := ends(want, func(ctx context.Context) error { return s.Wait(ctx, e, DurabilityAsync) }); acknowledged != want {
				t.Errorf("a later epoch may be acknowledged: %v, want %v", acknowledged, want)
			}

			blind, txn := make(chan outcome, 1), make(chan outcome, 1)
			go func() {
				e, err := asyncPut(y, "k", "later")()
				blind <- outcome{e, err}
			}()
			patience := aMoment
			if !stop.latched {
				patience = time.Minute
			}
			select {
			case end := <-blind:
				if stop.latched {
					t.Errorf("a writer of the same key did not wait: %+v", end)
				}
				blind <- end
			case <-time.After(patience):
				if !stop.latched {
					t.Error("a writer of the same key waits, though the latch is free")
				}
			}
			go func() {
				e, err := tx.Commit(context.Background())
				txn <- outcome{e, err}
			}()
			first := h.end()
			later, conflict := <-blind, <-txn
			if first.err != nil || later.err != nil || later.epoch <= first.epoch {
				t.Errorf("the stopped commit ended with %+v and the later one with %+v", first, later)
			}
			if !errors.As(conflict.err, new(*ConflictError)) {
				t.Errorf("a transaction that began before ended with %+v", conflict)
			}
			if got := get(t, s, "k", 0); got != "later" {
				t.Errorf("k is %s in the end", got)
			}
		})
	}
}

// elsewhere is a key with another latch.
func elsewhere(s *Store, key string) string {
	stripe := func(key string) int {
		var set latchSet
		set.add(s.latches, keys.Append(nil, keys.SpaceUser, []byte(key)))
		return set.only
	}
	for i := 0; ; i++ {
		if other := strconv.Itoa(i); stripe(other) != stripe(key) {
			return other
		}
	}
}

// TestFlusherStopsAtTheHoleOfAStoppedCommit: records after an incomplete record do not become
// durable. A complete record becomes durable whether its versions are visible or not.
func TestFlusherStopsAtTheHoleOfAStoppedCommit(t *testing.T) {
	for _, stop := range stops {
		t.Run(stop.name, func(t *testing.T) {
			s := mustOpen(t, quiet(vfs.NewMem()))
			before := mustPut(t, s, "k", "old")
			x, other := mustSession(t, s), mustSession(t, s)
			defer x.Close()
			defer other.Close()
			h := haltAtStep(t, x, stop.step, asyncPut(x, "k", "new"))
			behind, err := asyncPut(other, elsewhere(s, "k"), "v")()
			if err != nil {
				t.Fatal(err)
			}
			want := !stop.claimed || stop.logged
			durable := ends(want, func(ctx context.Context) error { return s.AwaitDurable(ctx, behind) })
			if durable != want {
				t.Errorf("later records become durable: %v, want %v", durable, want)
			}
			if !durable && s.Durable() != before {
				t.Errorf("durable is %d, past the hole after %d", s.Durable(), before)
			}
			end := h.end()
			if err := errors.Join(end.err, s.AwaitDurable(t.Context(), max(end.epoch, behind))); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestCrashDuringAStoppedCommit: the commit survives the crash if its record was durable. Otherwise
// it is absent or complete.
func TestCrashDuringAStoppedCommit(t *testing.T) {
	for _, stop := range stops {
		for _, flush := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/flush=%v", stop.name, flush), func(t *testing.T) {
				fs := vfs.NewMem()
				s := mustOpen(t, quiet(fs))
				before := mustPut(t, s, "k", "old")
				x := mustSession(t, s)
				defer x.Close()
				h := haltAtStep(t, x, stop.step, asyncPut(x, "k", "new"))
				if flush {
					ends(stop.logged, func(ctx context.Context) error { return s.AwaitDurable(ctx, before+1) })
				}
				left := fs.Crash(1, vfs.SurviveSome)
				h.end()
				again := mustOpen(t, quiet(left))
				got := get(t, again, "k", 0)
				switch {
				case flush && stop.logged && got != "new":
					t.Errorf("k is %s, though its record was durable", got)
				case !stop.logged && got != "old":
					t.Errorf("k is %s, though its record was not written", got)
				case got != "old" && got != "new":
					t.Errorf("k is %s", got)
				}
				mustPut(t, again, "k", "after")
			})
		}
	}
}

// TestCollectionDuringAStoppedCommit: min-visible stays below the epoch of the commit while it is
// not visible. The version that readers see is not pruned, although a newer one may be in the chain
// already. A checkpoint does not merge an incomplete commit.
func TestCollectionDuringAStoppedCommit(t *testing.T) {
	for _, stop := range stops {
		t.Run(stop.name, func(t *testing.T) {
			s := mustOpen(t, quiet(vfs.NewMem()))
			x, reader := mustSession(t, s), mustSession(t, s)
			defer x.Close()
			defer reader.Close()
			for i := range 100 {
				if i == 50 {
					if _, err := reader.OpenSnapshot(0); err != nil {
						t.Fatal(err)
					}
				}
				if _, err := put(x, "k", strconv.Itoa(i), DurabilityAsync); err != nil {
					t.Fatal(err)
				}
			}
			last := mustPut(t, s, "k", "old")
			h := haltAtStep(t, x, stop.step, asyncPut(x, "k", "new"))
			s.collector.collect(nil, true)
			if oldest := s.MinVisible(); oldest > reader.at {
				t.Errorf("min-visible is %d with a snapshot at %d", oldest, reader.at)
			}
			if v, err := reader.Read(nil, []byte("k")); err != nil || string(v.Data) != "49" {
				t.Errorf("the snapshot reads %q, %v", v.Data, err)
			}
			reader.CloseSnapshot()
			s.collector.collect(nil, true)
			if oldest := s.MinVisible(); oldest > last && !stop.visible {
				t.Errorf("min-visible is %d, and the commit after %d is not visible", oldest, last)
			}
			if got, want := get(t, s, "k", 0), newest(stop.visible); got != want {
				t.Errorf("k is %s after a collection, want %s", got, want)
			}
			whole := !stop.claimed || stop.visible
			if merged := ends(whole, s.Checkpoint); merged != whole {
				t.Errorf("a checkpoint of all commits completes: %v, want %v", merged, whole)
			}
			if got, want := get(t, s, "k", 0), newest(stop.visible); got != want {
				t.Errorf("k is %s after a checkpoint, want %s", got, want)
			}
			if end := h.end(); end.err != nil {
				t.Fatal(end.err)
			}
			if err := s.Checkpoint(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := get(t, s, "k", 0); got != "new" {
				t.Errorf("k is %s in the end", got)
			}
		})
	}
}

// TestValidationSeesACommitThatIsStopped: the commit has its epoch and is not in the memtable yet.
// A transaction that has read its key waits for it and gets the conflict.
func TestValidationSeesACommitThatIsStopped(t *testing.T) {
	for _, step := range []commitStep{stepReserved, stepCopied, stepInserted} {
		t.Run(fmt.Sprint(step), func(t *testing.T) {
			s := mustOpen(t, quiet(vfs.NewMem()))
			mustPut(t, s, "read", "old")
			x, y := mustSession(t, s), mustSession(t, s)
			defer x.Close()
			defer y.Close()
			tx := mustReadAndWrite(t, y)
			h := haltAtStep(t, x, step, asyncPut(x, "read", "new"))
			result := make(chan outcome, 1)
			go func() {
				e, err := tx.Commit(context.Background())
				result <- outcome{e, err}
			}()
			select {
			case end := <-result:
				t.Errorf("did not wait for the smaller epoch: %+v", end)
				result <- end
			case <-time.After(aMoment):
			}
			first := h.end()
			if end := <-result; first.err != nil || !errors.As(end.err, new(*ConflictError)) {
				t.Errorf("the writer ended with %+v, the transaction that read its key with %+v", first, end)
			}
			if got := get(t, s, elsewhere(s, "read"), 0); got != "-" {
				t.Errorf("the refused transaction wrote %s", got)
			}
		})
	}
}

// TestCommitAfterTheValidationIsFoundBeforeTheInstallation: a commit between the validation and the
// reservation is found in the window, and the epoch becomes a no-op record.
func TestCommitAfterTheValidationIsFoundBeforeTheInstallation(t *testing.T) {
	fs := vfs.NewMem()
	s := mustOpen(t, quiet(fs))
	mustPut(t, s, "read", "old")
	x := mustSession(t, s)
	defer x.Close()
	tx := mustReadAndWrite(t, x)
	h := haltAtStep(t, x, stepChecked, func() (keys.Epoch, error) { return tx.Commit(context.Background()) })
	between := mustPut(t, s, "read", "new")
	if end := h.end(); !errors.As(end.err, new(*ConflictError)) {
		t.Fatalf("ended with %+v", end)
	}
	if got := s.Visible(); got != between+1 {
		t.Errorf("visible is %d, want the epoch %d of the no-op record", got, between+1)
	}
	if got := s.Stats().Commits; got != 2 {
		t.Errorf("%d commits are counted, want the two puts", got)
	}
	last := mustPut(t, s, "behind", "v")
	again := mustOpen(t, quiet(fs.Crash(1, vfs.SurviveNone)))
	if got := again.Recovery().Epoch; got != last {
		t.Errorf("recovery ended at %d, want %d, after the no-op record", got, last)
	}
	if got := get(t, again, elsewhere(s, "read"), 0); got != "-" {
		t.Errorf("the refused transaction wrote %s", got)
	}
}

// mustReadAndWrite begins a serializable transaction that reads one key and writes another.
func mustReadAndWrite(t *testing.T, x *Session) *Txn {
	t.Helper()
	tx, err := x.Begin(TxnOptions{Isolation: IsolationSerializable, Durability: DurabilityAsync})
	if err == nil {
		_, err = tx.Get(nil, []byte("read"))
	}
	if err == nil {
		err = tx.Set([]byte(elsewhere(x.store, "read")), []byte("v"))
	}
	if err != nil {
		t.Fatal(err)
	}
	return tx
}
