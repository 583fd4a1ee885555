package enginetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// tiny makes generations rotate all the time.
func tiny(fs vfs.FS) mvcc.Options {
	return mvcc.Options{
		Storage: storage.Options{
			Dir: "db", FS: fs, MemoryBytes: 256 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10,
			CheckpointBytes: 128 << 10,
		},
		SyncInterval: time.Millisecond, GCInterval: time.Millisecond,
	}
}

// mustOpen opens a store that is closed when the test ends, unless the test closed it.
func mustOpen(t testing.TB, o mvcc.Options) *mvcc.Store {
	t.Helper()
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := closeInTime(s)
		switch {
		case err == nil:
			verifyFiles(t, o)
		case !errors.Is(err, vfs.ErrCrashed) && !errors.Is(err, mvcc.ErrFailed):
			t.Errorf("close: %v", err)
		}
	})
	return s
}

// closeMost bounds the close at the end of a test.
const closeMost = time.Minute

// closeInTime closes the store of a test that ends, perhaps by a panic that has left latches held: a
// close that waits for them for ever would keep the panic from being printed.
func closeInTime(s *mvcc.Store) error {
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	select {
	case err := <-closed:
		return err
	case <-time.After(closeMost):
		return errors.New("the store does not close: something waits for what the test has left")
	}
}

func mustClose(t testing.TB, s *mvcc.Store) {
	t.Helper()
	mustVerify(t, s)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// mustVerify checks the newest durable state of an open store.
func mustVerify(t fataler, s *mvcc.Store) {
	t.Helper()
	report, err := s.Verify(context.Background(), inspect.VerifyOptions{})
	if err != nil {
		t.Fatalf("verify: %v", err)
	}
	mustBeSound(t, report)
}

// verifyFiles checks what a closed store left, unless the file system has crashed or the next store has opened it.
func verifyFiles(t fataler, o mvcc.Options) {
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

// session is a session that knows its store and its snapshot.
type session struct {
	*mvcc.Session
	store *mvcc.Store
	at    keys.Epoch
}

func openSession(s *mvcc.Store) (*session, error) {
	x, err := s.Session()
	return &session{Session: x, store: s}, err
}

func (x *session) OpenSnapshot(at keys.Epoch) (keys.Epoch, error) {
	e, err := x.Session.OpenSnapshot(at)
	x.at = e
	return e, err
}

func mustSession(t testing.TB, s *mvcc.Store) *session {
	t.Helper()
	x, err := openSession(s)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// put commits one value and waits as its durability asks.
func put(x *session, key, value string, d mvcc.Durability) (keys.Epoch, error) {
	w := mvcc.Write{Durability: d}
	w.Set([]byte(key), []byte(value))
	return commitAndWait(x, &w)
}

func commitAndWait(x *session, w *mvcc.Write) (keys.Epoch, error) {
	e, err := x.Commit(context.Background(), w)
	if err != nil {
		return 0, err
	}
	return e, x.store.Wait(context.Background(), e, w.Durability)
}

func mustPut(t testing.TB, s *mvcc.Store, key, value string) keys.Epoch {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	e, err := put(x, key, value, mvcc.DurabilitySync)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// get reads a key at an epoch as text, "-" when it is missing.
func get(t testing.TB, s *mvcc.Store, key string, at keys.Epoch) string {
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
func dump(t testing.TB, s *mvcc.Store) map[string]string {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	if _, err := x.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	c, err := x.Scan(mvcc.ScanOptions{})
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

// load loads entries in random order.
func load(s *mvcc.Store, entries map[string]string) (mvcc.BulkLoaded, error) {
	l, err := s.BeginBulkLoad()
	if err != nil {
		return mvcc.BulkLoaded{}, err
	}
	for k, v := range entries {
		if err := l.Add([]byte(k), []byte(v)); err != nil {
			return mvcc.BulkLoaded{}, errors.Join(err, l.Close())
		}
	}
	out, err := l.Commit(context.Background())
	return out, errors.Join(err, l.Close())
}

func mustLoad(t testing.TB, s *mvcc.Store, entries map[string]string) mvcc.BulkLoaded {
	t.Helper()
	out, err := load(s, entries)
	if err != nil || out.Keys != uint64(len(entries)) {
		t.Fatalf("load: %+v, %v", out, err)
	}
	mustVerify(t, s)
	return out
}

// entriesFor makes n entries; some values do not fit into a leaf, some not into a page.
func entriesFor(tag string, n, step int, rng *rand.Rand) map[string]string {
	all := make(map[string]string, n)
	for i := range n {
		size := rng.IntN(100)
		switch rng.IntN(40) {
		case 0:
			size = 2000 + rng.IntN(200)
		case 1:
			size = 8000 + rng.IntN(20000)
		}
		all[fmt.Sprintf("key-%05d", i*step)] = tag + strings.Repeat("v", size)
	}
	return all
}

func mustHold(t testing.TB, s *mvcc.Store, want map[string]string) {
	t.Helper()
	if err := equalMaps(want, dump(t, s)); err != nil {
		t.Fatal(err)
	}
}

// countPrefix counts the keys with a prefix whose value has one too, in a new view of x.
func countPrefix(t testing.TB, x *session, key, value string) (n int) {
	t.Helper()
	if _, err := x.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	defer x.CloseSnapshot()
	upper, _ := keys.Successor(nil, []byte(key)) // nil for an empty prefix
	c, err := x.Scan(mvcc.ScanOptions{Lower: []byte(key), Upper: upper})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for c.Next() {
		if strings.HasPrefix(string(c.Value()), value) {
			n++
		}
	}
	return n
}

// putMany commits n keys in batches.
func putMany(t testing.TB, x *session, n int, set func(w *mvcc.Write, key []byte)) {
	t.Helper()
	w := mvcc.Write{Durability: mvcc.DurabilityAsync}
	for i := range n {
		set(&w, fmt.Appendf(nil, "key-%07d", i))
		if w.Batch.Count() == 500 || i == n-1 {
			if _, err := commitAndWait(x, &w); err != nil {
				t.Fatal(err)
			}
			w.Reset()
			w.Durability = mvcc.DurabilityAsync
		}
	}
}
