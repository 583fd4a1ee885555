package backup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
)

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantError(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("got error %v, want %v", err, want)
	}
}

// tiny is a store of tiny pages, caches and generations.
func tiny(fs vfs.FS) mvcc.Options {
	return mvcc.Options{
		Storage: storage.Options{
			Dir: "db", FS: fs, PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 32 << 10, SegmentBytes: 32 << 10,
			CheckpointBytes: 64 << 10, CheckpointWorkers: 2,
		},
		SyncInterval: time.Millisecond, GCInterval: time.Millisecond,
	}
}

// fixture is a store with its model, and a target with injected faults.
type fixture struct {
	t       *testing.T
	disk    *vfs.Mem
	options mvcc.Options
	store   *mvcc.Store
	target  *objectstore.Faulty
	dir     string // of the lineage

	mu      sync.Mutex
	changes []change // ascending by epoch; guarded by mu
	rng     *rand.Rand
}

// change is a commit of one key. A nil value deletes it.
type change struct {
	epoch keys.Epoch
	key   string
	value []byte
}

func newFixture(t *testing.T) *fixture {
	disk := vfs.NewMem()
	f := &fixture{t: t, disk: disk, options: tiny(disk), rng: rand.New(rand.NewPCG(1, 2))}
	inner, err := objectstore.Open(t.TempDir(), objectstore.Options{Retry: objectstore.QuickRetry})
	check(t, err)
	f.target = objectstore.NewFaulty(inner)
	f.open()
	t.Cleanup(func() { check(t, f.store.Close()) })
	return f
}

func (f *fixture) open() {
	f.t.Helper()
	store, err := mvcc.Open(f.options)
	check(f.t, err)
	f.store = store
	f.dir = Dir(store.History().Lineage, store.ID())
}

// write commits n random changes.
func (f *fixture) write(n int) {
	f.t.Helper()
	x, err := f.store.Session()
	check(f.t, err)
	defer x.Close()
	for range n {
		f.writeOne(x)
	}
}

func (f *fixture) writeOne(x *mvcc.Session) {
	c := change{key: fmt.Sprintf("key-%04d", f.rng.IntN(600))}
	switch f.rng.IntN(10) {
	case 0:
	case 1: // large values: overflow pages, blob pages
		c.value = bytes.Repeat([]byte{byte(f.rng.Uint32())}, 200+f.rng.IntN(3000))
	default:
		c.value = fmt.Appendf(nil, "%x", f.rng.Uint64())
	}
	var w mvcc.Write
	w.Durability = mvcc.DurabilityAsync
	if c.value == nil {
		w.Batch.Delete(keys.SpaceUser, []byte(c.key))
	} else {
		w.Batch.Set(keys.SpaceUser, []byte(c.key), c.value)
	}
	epoch, err := x.Commit(context.Background(), &w)
	check(f.t, err)
	c.epoch = epoch
	f.mu.Lock()
	f.changes = append(f.changes, c)
	f.mu.Unlock()
}

// writing writes until the result is called.
func (f *fixture) writing() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		x, err := f.store.Session()
		if err != nil {
			f.t.Error(err)
			return
		}
		defer x.Close()
		for ctx.Err() == nil {
			f.writeOne(x)
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}
}

// model is what the store had at an epoch.
func (f *fixture) model(epoch keys.Epoch) map[string][]byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := map[string][]byte{}
	for _, c := range f.changes {
		switch {
		case c.epoch > epoch:
		case c.value == nil:
			delete(m, c.key)
		default:
			m[c.key] = c.value
		}
	}
	return m
}

// backUp makes a backup in small parts.
func (f *fixture) backUp(o Options) *Manifest {
	f.t.Helper()
	m, err := f.tryBackUp(o)
	check(f.t, err)
	return m
}

func (f *fixture) tryBackUp(o Options) (*Manifest, error) {
	if o.PartBytes == 0 {
		o.PartBytes = 16 << 10
	}
	o.lease = quickLease
	return Create(context.Background(), f.store, f.target, o)
}

var quickLease = leaseTimes{recheck: time.Millisecond}

// restored opens what a backup is restored to.
func (f *fixture) restored(m *Manifest, o RestoreOptions) *mvcc.Store {
	f.t.Helper()
	disk := vfs.NewMem()
	check(f.t, disk.MkdirAll("db"))
	check(f.t, RestoreBase(f.t.Context(), f.target, m, disk, "db", o))
	report, err := inspect.VerifyDir(f.t.Context(), disk, "db", inspect.VerifyOptions{})
	check(f.t, err)
	if len(m.Damaged) == 0 && (!report.OK() || len(report.Notes) > 0) {
		f.t.Fatalf("the restored files: %v, %v", report.Damages, report.Notes)
	}
	options := tiny(disk)
	options.Storage.Dir = "db"
	s, err := mvcc.Open(options)
	check(f.t, err)
	if repaired := s.Recovery().Repaired; len(m.Damaged) == 0 && len(repaired) > 0 {
		f.t.Fatalf("the restored store was repaired: %v", repaired)
	}
	return s
}

// mustRestore restores a backup, and compares it with the model.
func (f *fixture) mustRestore(m *Manifest) {
	f.t.Helper()
	s := f.restored(m, RestoreOptions{})
	defer func() { check(f.t, s.Close()) }()
	if s.Recovery().Epoch != m.Epoch() {
		f.t.Fatalf("the restored store has epoch %d, the backup %d", s.Recovery().Epoch, m.Epoch())
	}
	compare(f.t, s, f.model(m.Epoch()))
	x, err := s.Session() // the store goes on
	check(f.t, err)
	defer x.Close()
	var w mvcc.Write
	w.Batch.Set(keys.SpaceUser, []byte("after"), []byte("restore"))
	_, err = x.Commit(context.Background(), &w)
	check(f.t, err)
	check(f.t, s.Checkpoint(context.Background()))
}

func compare(t *testing.T, s *mvcc.Store, want map[string][]byte) {
	t.Helper()
	x, err := s.Session()
	check(t, err)
	defer x.Close()
	_, err = x.OpenSnapshot(0)
	check(t, err)
	c, err := x.Scan(mvcc.ScanOptions{})
	check(t, err)
	defer c.Close()
	n := 0
	for c.Next() {
		if v, ok := want[string(c.Key())]; !ok || !bytes.Equal(v, c.Value()) {
			t.Fatalf("%s has %d bytes, the model has it: %v, %d bytes", c.Key(), len(c.Value()), ok, len(v))
		}
		n++
	}
	check(t, c.Err())
	if n != len(want) {
		t.Fatalf("%d keys, the model has %d", n, len(want))
	}
}

// objects are the names of the target's objects below a directory of the lineage.
func (f *fixture) objects(dir string) (names []string) {
	f.t.Helper()
	prefix := path.Join(f.dir, dir) + "/"
	check(f.t, f.target.List(context.Background(), prefix, func(o objectstore.Object) error {
		names = append(names, strings.TrimPrefix(o.Name, prefix))
		return nil
	}))
	return names
}
