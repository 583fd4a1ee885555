package mvcc

import (
	"testing"

	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/vfs"
)

// What the tree refuses is beside it, in a file of its own, and in a backup as well.
func TestBackupHasQuarantinedEntries(t *testing.T) {
	s, _, long := quarantinedStore(t, true)
	if s.Stats().Storage.Quarantine.Versions == 0 {
		t.Fatal("nothing is in quarantine")
	}
	target, err := objectstore.Open(t.TempDir(), objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := backup.Create(t.Context(), s, target, backup.Options{})
	if err != nil || m.Quarantine == nil {
		t.Fatalf("%+v, %v", m, err)
	}
	disk := vfs.NewMem()
	if err := disk.MkdirAll("db"); err != nil {
		t.Fatal(err)
	}
	if err := backup.RestoreBase(t.Context(), target, m, disk, "db", backup.RestoreOptions{}); err != nil {
		t.Fatal(err)
	}
	o := tiny(disk)
	o.Storage.Dir = "db"
	restored := mustOpen(t, o)
	x := mustSession(t, restored)
	defer x.Close()
	readLongKeys(t, x, long)
	if got, want := restored.Stats().Storage.Quarantine.Versions, s.Stats().Storage.Quarantine.Versions; got != want {
		t.Fatalf("%d versions are in quarantine, want %d", got, want)
	}
}
