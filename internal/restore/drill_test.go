package restore

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// drill makes a drill, and checks that it leaves nothing, neither in its directory nor in the archive.
func (b *bench) drill(progress func(Progress)) (*Report, error) {
	b.t.Helper()
	ctx, cancel := context.WithCancel(b.t.Context())
	defer cancel()
	parent := b.t.TempDir()
	r, err := Drill(ctx, Options{Store: b.target, Dir: parent, PageSize: 1024, Memory: 64 << 20, Lineage: b.lineage(), Progress: func(p Progress) {
		if entries, err := filepath.Glob(filepath.Join(parent, scratchPrefix+"*")); p.Step == "base" && (err != nil || len(entries) != 1) {
			b.t.Errorf("the drill restores to %v: %v", entries, err)
		}
		if progress != nil {
			progress(p)
		}
	}})
	entries, left := os.ReadDir(parent)
	check(b.t, left)
	check(b.t, b.target.Store.List(b.t.Context(), b.lineage().String()+"/restores/", func(o objectstore.Object) error { return errors.New(o.Name + " was left") }))
	if len(entries) > 0 {
		b.t.Fatalf("the drill has left %v", entries)
	}
	return r, err
}

// TestDrillProvesThatTheNewestStateCanBeRestored: with the newest backup and the log after it, while the store is written.
func TestDrillProvesThatTheNewestStateCanBeRestored(t *testing.T) {
	b := newBench(t)
	b.commits(20)
	m, err := backup.Create(t.Context(), b.store, b.target, backup.Options{})
	check(t, err)
	b.commits(20)
	b.archived()
	last := b.arch.Status().Archived
	r, err := b.drill(func(p Progress) {
		if p.Step == "base" {
			b.commits(3)
		}
	})
	check(t, err)
	if r.Base.ID != m.ID || r.Reached.Epoch != last || r.Records != uint64(last-keys.Epoch(m.State.Epoch)) || r.Took == 0 {
		t.Fatalf("%+v", r)
	}
}

// TestDrillFindsWhatARestoreWouldFind: lost and damaged objects of the backup and of the archive make the drill fail, by name.
func TestDrillFindsWhatARestoreWouldFind(t *testing.T) {
	b := newBench(t)
	b.commits(20)
	_, err := backup.Create(t.Context(), b.store, b.target, backup.Options{})
	check(t, err)
	b.commits(20)
	b.archived()
	b.close()
	if _, err := b.drill(nil); err != nil {
		t.Fatal(err)
	}
	logs := b.objects()
	var parts []string
	check(t, b.target.List(t.Context(), b.lineage().String()+"/", func(o objectstore.Object) error {
		if strings.Contains(o.Name, "/parts/") {
			parts = append(parts, o.Name)
		}
		return nil
	}))
	for _, name := range []string{logs[len(logs)-1], parts[0]} {
		fault := b.target.Inject(objectstore.Fault{Op: objectstore.OpRead, Prefix: name, Kind: objectstore.ReadFlipped, Bytes: 100})
		if _, err := b.drill(nil); err == nil || b.target.Fired(fault) == 0 || !strings.Contains(err.Error(), filepath.Base(name)) {
			t.Errorf("%s is damaged: %v", name, err)
		}
		b.target.Heal()
	}
	if _, err := Drill(t.Context(), Options{Store: b.target, Dir: t.TempDir(), Lineage: b.lineage(), Target: archive.Target{}, PlanOnly: true}); err == nil {
		t.Error("a plan is a drill")
	}
	if _, err := Drill(t.Context(), Options{Store: b.target, Dir: filepath.Join(t.TempDir(), "missing"), Lineage: b.lineage()}); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}
