package lease

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// harness is a store with its leases.
type harness struct {
	*Manager
	t     testing.TB
	store *mvcc.Store
	stop  func()
}

func storeOptions(fs vfs.FS) mvcc.Options {
	return mvcc.Options{
		Storage: storage.Options{
			Dir: "db", FS: fs, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 256 << 10, SegmentBytes: 256 << 10,
		},
		Limits: mvcc.Limits{Sessions: 64},
	}
}

// tryOpen opens store and leases, and runs the expirer.
func tryOpen(t testing.TB, fs vfs.FS, o Options) (*harness, error) {
	return tryOpenStore(t, storeOptions(fs), o)
}

func tryOpenStore(t testing.TB, so mvcc.Options, o Options) (*harness, error) {
	store, err := mvcc.Open(so)
	if err != nil {
		return nil, err
	}
	m, err := Open(context.Background(), store, o)
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); m.Run(ctx) }()
	h := &harness{Manager: m, t: t, store: store}
	h.stop = func() { stop(); <-done; _ = store.Close() }
	return h, nil
}

func mustOpen(t testing.TB, fs vfs.FS, o Options) *harness {
	t.Helper()
	h, err := tryOpen(t, fs, o)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// List is that of the manager, which nothing ends.
func (h *harness) List(after ID, limit int) (list []Info, more bool) {
	list, more, _ = h.Manager.List(context.Background(), after, limit)
	return list, more
}

// mustGrant grants a lease, and waits until it is durable.
func (h *harness) mustGrant(id ID, ttl time.Duration) {
	h.t.Helper()
	if err := h.grant(id, ttl); err != nil {
		h.t.Fatal(err)
	}
}

func (h *harness) grant(id ID, ttl time.Duration) error {
	_, epoch, err := h.Grant(context.Background(), id, ttl, "test")
	if err != nil {
		return err
	}
	return h.store.Wait(context.Background(), epoch, mvcc.DurabilitySync)
}

// put sets a key with a lease; zero is none.
func (h *harness) put(key, value string, id ID) error {
	return h.write(func(w *mvcc.Write) {
		w.SetWithMetadata([]byte(key), []byte(value), &metadata.Fields{Lease: uint64(id)})
	})
}

func (h *harness) mustPut(key, value string, id ID) {
	h.t.Helper()
	if err := h.put(key, value, id); err != nil {
		h.t.Fatal(err)
	}
}

func (h *harness) write(fill func(*mvcc.Write)) error {
	x, err := h.store.Session()
	if err != nil {
		return err
	}
	defer x.Close()
	w := &mvcc.Write{Durability: mvcc.DurabilitySync}
	fill(w)
	epoch, err := x.Commit(context.Background(), w)
	if err != nil {
		return err
	}
	return h.store.Wait(context.Background(), epoch, mvcc.DurabilitySync)
}

// found reports whether a key exists.
func (h *harness) found(key string) bool {
	h.t.Helper()
	x, err := h.store.Session()
	if err != nil {
		h.t.Fatal(err)
	}
	defer x.Close()
	v, err := x.Get(nil, []byte(key), 0)
	if err != nil {
		h.t.Fatal(err)
	}
	return v.Found
}

// checkRecords compares leases and attachments with the versions: each live version with a lease has both, and an
// attachment has a lease.
func (h *harness) checkRecords() {
	h.t.Helper()
	x, err := h.store.Session()
	if err != nil {
		h.t.Fatal(err)
	}
	defer x.Close()
	ctx := context.Background()
	leases, attachments := map[ID]bool{}, map[string]bool{}
	var internals [][]byte
	err = x.ScanSystem(ctx, nil, nil, func(key, _ []byte, _ keys.Epoch) bool {
		switch key[0] {
		case keys.SystemLease:
			leases[leaseOf(key)] = true
		case keys.SystemAttachment:
			attachments[string(key)] = true
		case keys.SystemLock:
			internals = append(internals, keys.Append(nil, keys.SpaceSystem, key))
		}
		return true
	})
	if err != nil {
		h.t.Fatal(err)
	}
	internals = append(internals, h.userKeys(x)...)
	for _, internal := range internals {
		n, err := x.NewestVersion(ctx, internal)
		if err != nil {
			h.t.Fatal(err)
		}
		id := n.Metadata.Lease
		if id == 0 {
			continue
		}
		if !leases[ID(id)] {
			h.t.Errorf("%q belongs to lease %d, which does not exist", internal, id)
		}
		if !attachments[string(keys.AppendOwned(nil, keys.SystemAttachment, id, internal))] {
			h.t.Errorf("%q belongs to lease %d, and has no attachment", internal, id)
		}
	}
	for key := range attachments {
		if id := leaseOf([]byte(key)[:9]); !leases[id] {
			h.t.Errorf("attachment %q of lease %d, which does not exist", key, id)
		}
	}
}

func (h *harness) userKeys(x *mvcc.Session) (all [][]byte) {
	if _, err := x.OpenSnapshot(0); err != nil {
		h.t.Fatal(err)
	}
	defer x.CloseSnapshot()
	c, err := x.Scan(mvcc.ScanOptions{KeysOnly: true})
	if err != nil {
		h.t.Fatal(err)
	}
	defer c.Close()
	for c.Next() {
		all = append(all, keys.Append(nil, keys.SpaceUser, bytes.Clone(c.Key())))
	}
	return all
}

func (h *harness) ids() (all []ID) {
	list, _ := h.List(0, 1<<20)
	for _, i := range list {
		all = append(all, i.ID)
	}
	return all
}
