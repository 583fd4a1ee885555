package users

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// cheap makes tests fast.
var cheap = HashCost{KiB: 8, Passes: 1, Threads: 1}

// harness is a store with its users, and a clock that the test moves.
type harness struct {
	*Manager
	t     testing.TB
	store *mvcc.Store
	now   time.Time
	end   func() error // ends it, whatever has become of the store
	stop  func()
	seen  []*auth.Table // as observed
	bad   []string      // as reported
}

func mustOpen(t testing.TB, fs vfs.FS) *harness {
	t.Helper()
	h, err := tryOpen(t, fs)
	must(t, err)
	h.stop = func() {
		if err := h.end(); err != nil {
			t.Error(err)
		}
		h.stop = func() {}
	}
	t.Cleanup(func() { h.stop() })
	return h
}

// tryOpen opens a store with its users. The caller calls end.
func tryOpen(t testing.TB, fs vfs.FS) (*harness, error) {
	t.Helper()
	store, err := mvcc.Open(mvcc.Options{
		Storage: storage.Options{
			Dir: "db", FS: fs, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 256 << 10, SegmentBytes: 256 << 10,
		},
		Limits: mvcc.Limits{Sessions: 16},
	})
	if err != nil {
		return nil, err
	}
	h := &harness{t: t, store: store, now: time.Unix(1_800_000_000, 0)}
	h.Manager, err = Open(context.Background(), store, Options{
		Hash: cheap, Rule: CertificateCN, Now: func() time.Time { return h.now },
		Elapsed: func() time.Duration { return time.Duration(h.now.UnixNano()) },
		Observe: func(a *auth.Table) { h.seen = append(h.seen, a) },
		Report:  func(what string, _ error) { h.bad = append(h.bad, what) },
	})
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); h.Run(ctx) }()
	h.end = func() error {
		stop()
		<-done
		return store.Close()
	}
	return h, nil
}

// must ends the test at an error.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// bootstrapped has the administrator "ann" with the password "ann's secret".
func bootstrapped(t testing.TB, fs vfs.FS) *harness {
	t.Helper()
	h := mustOpen(t, fs)
	must(t, h.Bootstrap(context.Background(), h.BootstrapToken(), "ann", "ann's secret"))
	return h
}

// login is the identity of a new session token, and the token.
func (h *harness) login(name, password string) (auth.Identity, string) {
	h.t.Helper()
	secret, _, err := h.Login(context.Background(), name, password, "", 0)
	must(h.t, err)
	id, err := h.Bearer("Bearer " + secret)
	must(h.t, err)
	return id, secret
}

// damage replaces a record by one that cannot be read.
func (h *harness) damage(key []byte) {
	h.t.Helper()
	h.overwrite(key, []byte("damaged"))
}

// overwrite replaces a record.
func (h *harness) overwrite(key, value []byte) {
	h.t.Helper()
	w := &mvcc.Write{Durability: mvcc.DurabilitySync}
	w.SetOwn()
	w.Batch.SetRecord(keys.SpaceSystem, key, value)
	_, err := h.store.OwnSession().Commit(context.Background(), w)
	must(h.t, err)
}

// may is whether a user may read a key now.
func (h *harness) may(id auth.Identity, key string) error {
	var f auth.Footprint
	f.Key(auth.RightRead, []byte(key))
	return h.Table().Authorize(&id, h.now, &f)
}
