package mvcc

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// stuckFS is a file system whose syncs of files with a suffix hang while it is held.
type stuckFS struct {
	vfs.FS
	suffix string
	mu     sync.Mutex
	gate   chan struct{} // nil while syncs go through
	once   func() bool   // from when on they do not; nil is from hold on
}

func (s *stuckFS) hold() (release func()) {
	gate := make(chan struct{})
	s.mu.Lock()
	s.gate = gate
	s.mu.Unlock()
	return func() {
		s.mu.Lock()
		s.gate = nil
		s.mu.Unlock()
		close(gate)
	}
}

func (s *stuckFS) pass() {
	s.mu.Lock()
	gate := s.gate
	s.mu.Unlock()
	if gate != nil && (s.once == nil || s.once()) {
		<-gate
	}
}

// Open implements vfs.FS.
func (s *stuckFS) Open(name string, mode vfs.Mode) (vfs.File, error) {
	f, err := s.FS.Open(name, mode)
	if err != nil || !strings.HasSuffix(name, s.suffix) {
		return f, err
	}
	return stuckFile{f, s}, nil
}

type stuckFile struct {
	vfs.File
	fs *stuckFS
}

func (f stuckFile) Sync() error     { f.fs.pass(); return f.File.Sync() }
func (f stuckFile) SyncData() error { f.fs.pass(); return f.File.SyncData() }

// operations is every way to commit, with a session of its own.
var operations = map[string]func(ctx context.Context, s *Store, x *Session) error{
	"commit": func(ctx context.Context, s *Store, x *Session) error {
		w := Write{Durability: DurabilityAsync}
		w.Set([]byte("k"), make([]byte, 4000))
		_, err := x.Commit(ctx, &w)
		return err
	},
	"commit of a large record": func(ctx context.Context, s *Store, x *Session) error {
		w := Write{Durability: DurabilityAsync}
		w.Set([]byte("k"), make([]byte, 50_000))
		_, err := x.Commit(ctx, &w)
		return err
	},
	"conditional commit": func(ctx context.Context, s *Store, x *Session) error {
		w := Write{Durability: DurabilityAsync, Conditions: []Condition{{Kind: KeyPresent, Key: []byte("k")}}}
		w.Set([]byte("k"), make([]byte, 4000))
		_, err := x.Commit(ctx, &w)
		return err
	},
	"invoke": func(ctx context.Context, s *Store, x *Session) error {
		_, err := x.InvokeAll(ctx, []Invoke{{Kind: InvokeGetAndSet, Key: []byte("k"), Operand: make([]byte, 4000)}}, nil, DurabilityAsync, make([]Invoked, 1))
		return err
	},
	"delete range": func(ctx context.Context, s *Store, x *Session) error {
		_, err := x.DeleteRange(ctx, RangeDelete{Lower: []byte("k"), Upper: []byte("l"), Conditions: []Condition{{Kind: KeyPresent, Key: []byte("k")}}, Durability: DurabilityAsync})
		return err
	},
	"serializable transaction": func(ctx context.Context, s *Store, x *Session) error {
		return readAndWrite(ctx, x, IsolationSerializable)
	},
	"snapshot transaction": func(ctx context.Context, s *Store, x *Session) error { return readAndWrite(ctx, x, IsolationSnapshot) },
}

func readAndWrite(ctx context.Context, x *Session, level Isolation) error {
	tx, err := x.Begin(TxnOptions{Isolation: level, Durability: DurabilityAsync})
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.Get(nil, []byte("r")); err != nil {
		return err
	}
	if err := tx.Set([]byte("k"), make([]byte, 4000)); err != nil {
		return err
	}
	_, err = tx.Commit(ctx)
	return err
}

// untilExpired runs an operation until its context ends it: some of them go through a few times
// before they have to wait.
func untilExpired(t *testing.T, s *Store, x *Session, operation func(context.Context, *Store, *Session) error) {
	t.Helper()
	for range 10_000 {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		err := operation(ctx, s, x)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) {
			return
		}
		if err != nil && !errors.As(err, new(*PreconditionError)) && !errors.As(err, new(*ConflictError)) {
			t.Errorf("not the deadline: %v", err)
			return
		}
	}
	t.Error("no call had to wait: the test tests nothing")
}

// TestDeadlineEndsEveryWaitOfTheCommitPath: for each thing that a commit can wait for and each kind
// of commit, the deadline ends the wait while what is waited for stays stuck; then nothing of it is
// left: others write, and the store closes.
func TestDeadlineEndsEveryWaitOfTheCommitPath(t *testing.T) {
	waits := map[string]struct {
		suffix string // of files whose syncs hang
		stick  func(t *testing.T, s *Store, fs *stuckFS, x *Session) (release func())
		skip   string // operations that need not wait for it
	}{
		"latch": {stick: func(t *testing.T, s *Store, _ *stuckFS, _ *Session) func() {
			for i := range s.latches.table {
				if err := s.latches.table[i].lock(t.Context(), newWaiter()); err != nil {
					t.Fatal(err)
				}
			}
			return func() {
				for i := range s.latches.table {
					s.latches.table[i].unlock()
				}
			}
		}},
		"horizon": {stick: func(t *testing.T, s *Store, _ *stuckFS, x *Session) func() {
			fill := hole(t, s)
			w := Write{Durability: DurabilityAsync}
			w.Set([]byte("previous"), nil)
			if _, err := x.Commit(t.Context(), &w); err != nil { // a session waits for its own previous commit
				t.Fatal(err)
			}
			return fill
		}},
		"full memory": {suffix: ".ekv", stick: func(t *testing.T, s *Store, fs *stuckFS, _ *Session) func() {
			release := fs.hold()
			fillUp(t, s)
			return release
		}, skip: "delete range"},
		"sync": {suffix: ".log", stick: func(t *testing.T, s *Store, fs *stuckFS, _ *Session) func() {
			release := fs.hold()
			fillUp(t, s)
			return release
		}, skip: "delete range"},
	}
	for name, wait := range waits {
		t.Run(name, func(t *testing.T) {
			for what, operation := range operations {
				if what == wait.skip {
					continue
				}
				t.Run(strings.ReplaceAll(what, " ", "-"), func(t *testing.T) {
					t.Parallel()
					fs := &stuckFS{FS: vfs.NewMem(), suffix: wait.suffix}
					o := tiny(fs)
					o.Storage.MemoryBytes = 4 << 20
					o.Storage.StallMax = time.Hour
					s := mustOpen(t, o)
					mustPut(t, s, "k", "v")
					x := mustSession(t, s)
					defer x.Close()
					release := wait.stick(t, s, fs, x)
					done := make(chan struct{})
					go func() {
						defer close(done)
						untilExpired(t, s, x, operation)
					}()
					select {
					case <-done:
						release()
					case <-time.After(20 * time.Second):
						t.Error("the deadline ended nothing")
						release()
						<-done
					}
					for i := range 3 {
						mustPut(t, s, "k", fmt.Sprint(i))
					}
					for i := range s.latches.table {
						if l := &s.latches.table[i]; l.first != nil || !l.tryLock() {
							t.Errorf("latch %d is held or has waiters", i)
						} else {
							l.unlock()
						}
					}
				})
			}
		})
	}
}

// fillUp writes from a session of its own until a write has to wait.
func fillUp(t *testing.T, s *Store) {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	untilExpired(t, s, x, operations["commit"])
}

// TestStuckSegmentEndsWithTheContextOfABulkLoad: a bulk load that needs a log segment while the
// device makes none ends with its context, and a writer that has waited its time is told of the
// cause.
func TestStuckSegmentEndsWithTheContextOfABulkLoad(t *testing.T) {
	fs := vfs.NewFaulty(vfs.NewMem())
	o := tiny(fs)
	o.Storage.StallMax = 300 * time.Millisecond
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	until := make(chan struct{})
	release := sync.OnceFunc(func() { close(until) })
	defer release()
	fs.Inject(vfs.Rule{Op: vfs.OpCreate, Name: "*.log", Fault: vfs.Slow, Until: until})
	ok := true
	var err error
	for range 10 { // a segment that a checkpoint gives back late lets a rotation succeed once more
		err = nil
		for i := 0; err == nil && i < 10_000; i++ {
			_, err = put(x, "k", strings.Repeat("v", 4000), DurabilityAsync)
		}
		if !errors.Is(err, storage.ErrNoSegment) || strings.Contains(err.Error(), "%!") {
			t.Errorf("a writer that has waited long enough: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		ok, err = s.engine.RotateForBulkLoad(ctx)
		cancel()
		if !ok {
			break
		}
	}
	if ok || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a bulk load: %v, %v", ok, err)
	}
	release()
	mustPut(t, s, "k", "w")
}
