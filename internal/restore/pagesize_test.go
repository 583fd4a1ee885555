package restore

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/testseed"
)

// longKeys makes the store another one, with pages of 64 KiB, and commits keys that are longer than pages of a size take.
func (b *bench) longKeys(n, pageSize int) (last keys.Epoch) {
	b.t.Helper()
	b.close()
	b.dir = filepath.Join(b.t.TempDir(), "large")
	o := b.options(b.dir)
	o.Storage.PageSize, o.Storage.MemtableBytes, b.fileBytes = 64<<10, 0, 1<<20
	s, err := mvcc.Open(o)
	check(b.t, err)
	b.store, b.history = s, s.History().Lineage
	b.archive()
	x, err := s.Session()
	check(b.t, err)
	defer x.Close()
	for from := 0; from < n; from += 100 {
		var w mvcc.Write
		for i := range min(100, n-from) {
			w.Set(longKey(from+i, pageSize), fmt.Append(nil, from+i))
		}
		last, err = x.Commit(b.t.Context(), &w)
		check(b.t, err)
	}
	check(b.t, s.Wait(b.t.Context(), last, mvcc.DurabilitySync))
	b.archived()
	return last
}

func longKey(i, pageSize int) []byte {
	return append(bytes.Repeat([]byte("k"), storage.KeyBytesMax(pageSize)), fmt.Sprintf("%06d", i)...)
}

// forgetPageSize makes lineage.json what it was before page sizes were noted.
func (b *bench) forgetPageSize() {
	b.t.Helper()
	name := b.lineage().String() + "/lineage.json"
	o := archive.Origin{Format: 1, Lineage: b.lineage().String()}
	data, err := json.Marshal(&o)
	check(b.t, err)
	check(b.t, b.target.Delete(b.t.Context(), name))
	check(b.t, b.target.Create(b.t.Context(), name, objectstore.Bytes(data)))
}

// restoredPages restores the archive alone, and checks the size of the restored pages, and that the store has all keys and none of them in quarantine.
func (b *bench) restoredPages(at keys.Epoch, n, longer, pageSize int) {
	b.t.Helper()
	dir := filepath.Join(b.t.TempDir(), "restored")
	r, err := Run(b.t.Context(), Options{Store: b.target, Target: archive.Target{Epoch: at}, Dir: dir, Memory: 64 << 20, Lineage: b.lineage()})
	check(b.t, err)
	if r.Base.ID != "" {
		b.t.Fatalf("restored from backup %s", r.Base.ID)
	}
	s, err := mvcc.Open(mvcc.Options{Storage: storage.Options{Dir: dir, PageSize: pageSize, MemoryBytes: 64 << 20}})
	check(b.t, err)
	defer func() { check(b.t, s.Close()) }()
	if got := s.Stats().Storage.Quarantine.Versions; got != 0 {
		b.t.Errorf("%d versions are in quarantine", got)
	}
	x, err := s.Session()
	check(b.t, err)
	defer x.Close()
	for i := range n {
		if v, err := x.Get(nil, longKey(i, longer), 0); err != nil || string(v.Data) != fmt.Sprint(i) {
			b.t.Fatalf("key %d: %q, %v", i, v.Data, err)
		}
	}
}

// TestRestoreWithoutABaseHasPagesOfTheOriginal: so it takes the keys of the original, which pages of the usual size do not.
func TestRestoreWithoutABaseHasPagesOfTheOriginal(t *testing.T) {
	b := newBench(t)
	const n = 3
	last := b.longKeys(n, 8<<10)
	b.restoredPages(last, n, 8<<10, 64<<10)
	b.commits(1)
	_, err := backup.Create(t.Context(), b.store, b.target, backup.Options{})
	check(t, err)
	b.forgetPageSize()
	b.restoredPages(last, n, 8<<10, 64<<10) // the backup is of a later state, and says it
}

// TestRestoreTriesPagesUntilTheKeysFit: of an older archive, without a backup. More keys than a quarantine takes end the restore in its middle.
func TestRestoreTriesPagesUntilTheKeysFit(t *testing.T) {
	for n, longer := range map[int]int{3: 32 << 10, 4200: 8 << 10} {
		if n > 4096 && testseed.RaceDetector == 1 {
			continue // takes half a minute
		}
		b := newBench(t)
		last := b.longKeys(n, longer)
		b.forgetPageSize()
		b.restoredPages(last, n, longer, 2*longer)
	}
}
