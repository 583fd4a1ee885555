package restore

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// damageLeaf damages a live leaf with keys of clients, and makes a backup, which lacks it. It may have made others before, of which the last one
// is the newest that lacks nothing.
func (b *bench) damageLeaf(o backup.Options, whole *backup.Manifest) (m, newestWhole *backup.Manifest) {
	b.t.Helper()
	f, err := os.OpenFile(filepath.Join(b.dir, "data.ekv"), os.O_RDWR, 0)
	check(b.t, err)
	defer func() { check(b.t, f.Close()) }()
	info, err := f.Stat()
	check(b.t, err)
	const size = 1024
	content := make([]byte, size)
	for at := int64(2 * size); at < info.Size(); at += size {
		_, err := f.ReadAt(content, at)
		check(b.t, err)
		if page.Check(content, page.ID(at/size)) != nil || page.ReadHeader(content).Type != page.TypeLeaf {
			continue
		}
		v := page.Leaf(content).Layout()
		if key := append(bytes.Clone(v.Prefix()), v.Suffix(0)...); keys.SpaceOf(key) != keys.SpaceUser {
			continue
		}
		_, err = f.WriteAt(bytes.Repeat([]byte{0xdb}, 100), at+size/2)
		check(b.t, err)
		b.commits(1) // backups of one epoch have no order within a second
		m, err := backup.Create(b.t.Context(), b.store, b.target, o)
		check(b.t, err)
		if len(m.Damaged) > 0 {
			return m, whole
		}
		whole = m
	}
	b.t.Fatal("no leaf is live")
	return nil, nil
}

// TestABackupOfADamagedStoreIsRestoredIfThatIsAllowed: it may be all that is left of the store. What a damaged page had stays an error; an older page
// that the base has in its place is not taken for it.
func TestABackupOfADamagedStoreIsRestoredIfThatIsAllowed(t *testing.T) {
	b := newBench(t)
	b.commits(150)
	full, err := backup.Create(t.Context(), b.store, b.target, backup.Options{})
	check(t, err)
	b.commits(150)
	b.archived()
	b.stop()
	for _, name := range b.objects() { // only backups are left
		check(t, b.target.Delete(t.Context(), name))
	}
	for _, base := range []string{full.ID, ""} {
		var m *backup.Manifest
		m, full = b.damageLeaf(backup.Options{KeepGoing: true, Base: base, ReadAll: true}, full)
		o := Options{Store: b.target, Dir: filepath.Join(t.TempDir(), "restored"), PageSize: 1024, Memory: 64 << 20, Lineage: b.lineage()}
		left := new(LeftOutError)
		if _, err := Run(t.Context(), o); !errors.As(err, &left) || left.Backup != m.ID || left.Latest.Epoch != full.Epoch() || !strings.Contains(err.Error(), "--allow-damaged") {
			t.Fatalf("the latest state, without damage: %v", err)
		}
		o.Target.Epoch = full.Epoch()
		r, err := Run(t.Context(), o)
		check(t, err)
		if r.Base.ID != full.ID || len(r.Damages) > 0 { // the newest that lacks nothing
			t.Fatalf("without damage: %+v", r)
		}
		o.Target.Epoch = 0
		o.Dir, o.AllowDamaged = filepath.Join(t.TempDir(), "restored"), true
		r, err = Run(t.Context(), o)
		check(t, err)
		if r.Base.ID != m.ID || len(r.Damages) == 0 {
			t.Fatalf("with damage: %+v", r)
		}
		b.compareDamaged(o.Dir)
	}
}

// compareDamaged compares a restored store with damaged pages with the model: each key has its value, or cannot be read.
func (b *bench) compareDamaged(dir string) {
	b.t.Helper()
	s, err := mvcc.Open(mvcc.Options{Storage: storage.Options{Dir: dir, PageSize: 1024, MemoryBytes: 64 << 20}})
	check(b.t, err)
	x, err := s.Session()
	check(b.t, err)
	read, lost := 0, 0
	for key, want := range b.now {
		v, err := x.Get(nil, []byte(key), 0)
		switch {
		case errors.Is(err, storage.ErrDamaged):
			lost++
		case err != nil || string(v.Data) != want:
			b.t.Errorf("%s is %.40q (%v) instead of %.40q", key, v.Data, err, want)
		default:
			read++
		}
	}
	if read == 0 || lost == 0 {
		b.t.Errorf("%d keys can be read, and %d cannot", read, lost)
	}
	x.Close()
	check(b.t, s.Close())
}
