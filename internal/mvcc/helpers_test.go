package mvcc

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// tiny makes generations rotate all the time.
func tiny(fs vfs.FS) Options {
	return Options{
		Storage: storage.Options{
			Dir: "db", FS: fs, MemoryBytes: 256 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10,
			CheckpointBytes: 128 << 10,
		},
		SyncInterval: time.Millisecond, GCInterval: time.Millisecond,
	}
}

// mustOpen opens a store that is closed when the test ends, unless the test closed it.
func mustOpen(t testing.TB, o Options) *Store {
	t.Helper()
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := closeInTime(s)
		if err == nil && turnsTaken(s) > 0 {
			t.Errorf("%d turns are taken for ever", turnsTaken(s))
		}
		switch {
		case err == nil:
			verifyFiles(t, o)
		case !errors.Is(err, vfs.ErrCrashed) && !errors.Is(err, ErrFailed):
			t.Errorf("close: %v", err)
		}
	})
	return s
}

// closeMost bounds the close at the end of a test.
const closeMost = time.Minute

// closeInTime closes the store of a test that ends, perhaps by a panic that has left latches held: a
// close that waits for them for ever would keep the panic from being printed.
func closeInTime(s *Store) error {
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	select {
	case err := <-closed:
		return err
	case <-time.After(closeMost):
		return errors.New("the store does not close: something waits for what the test has left")
	}
}

func mustClose(t testing.TB, s *Store) {
	t.Helper()
	mustVerify(t, s)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// mustVerify checks the newest durable state of an open store.
func mustVerify(t fataler, s *Store) {
	t.Helper()
	report, err := s.Verify(context.Background(), inspect.VerifyOptions{})
	if err != nil {
		t.Fatalf("verify: %v", err)
	}
	mustBeSound(t, report)
}

// verifyFiles checks what a closed store left, unless the file system has crashed or the next store has opened it.
func verifyFiles(t fataler, o Options) {
	t.Helper()
	report, err := inspect.VerifyDir(context.Background(), o.Storage.FS, o.Storage.Dir, inspect.VerifyOptions{})
	if errors.Is(err, vfs.ErrCrashed) || errors.Is(err, vfs.ErrLocked) {
		return
	}
	if err != nil {
		t.Fatalf("verify the files: %v", err)
	}
	mustBeSound(t, report)
}

// fataler is what testing.TB and rapid.T have in common.
type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
}

func mustBeSound(t fataler, report *inspect.VerifyReport) {
	t.Helper()
	if !report.OK() || !report.Accounted {
		t.Fatalf("%d damages, accounted %v, checkpoint %d at epoch %d: %+v",
			report.DamageTotal, report.Accounted, report.Checkpoint, report.Epoch, report.Damages)
	}
}

func mustSession(t testing.TB, s *Store) *Session {
	t.Helper()
	x, err := s.Session()
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// put commits one value and waits as its durability asks.
func put(x *Session, key, value string, d Durability) (keys.Epoch, error) {
	w := Write{Durability: d}
	w.Set([]byte(key), []byte(value))
	return commitAndWait(x, &w)
}

func commitAndWait(x *Session, w *Write) (keys.Epoch, error) {
	e, err := x.Commit(context.Background(), w)
	if err != nil {
		return 0, err
	}
	return e, x.store.Wait(context.Background(), e, w.Durability)
}

func mustPut(t testing.TB, s *Store, key, value string) keys.Epoch {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	e, err := put(x, key, value, DurabilitySync)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// get reads a key at an epoch as text, "-" when it is missing.
func get(t testing.TB, s *Store, key string, at keys.Epoch) string {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	v, err := x.Get(nil, []byte(key), at)
	if err != nil {
		t.Fatal(err)
	}
	if !v.Found {
		return "-"
	}
	return string(v.Data)
}

// dump is the whole content at the newest snapshot.
func dump(t testing.TB, s *Store) map[string]string {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	if _, err := x.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	c, err := x.Scan(ScanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	all := make(map[string]string)
	for c.Next() {
		all[string(c.Key())] = string(c.Value())
	}
	if c.Err() != nil {
		t.Fatal(c.Err())
	}
	return all
}

func equalMaps(a, b map[string]string) error {
	for k, v := range a {
		if w, ok := b[k]; !ok || v != w {
			return fmt.Errorf("key %q: %q against %q (present %v)", k, clip(v), clip(w), ok)
		}
	}
	for k := range b {
		if _, ok := a[k]; !ok {
			return fmt.Errorf("key %q is too many", k)
		}
	}
	return nil
}

func clip(s string) string {
	if len(s) > 40 {
		return s[:40] + "..."
	}
	return s
}

func mustCheckpoint(t testing.TB, s *Store) {
	t.Helper()
	if err := s.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
}
