package restore

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
)

var makeGolden = flag.String("restore.golden", "", "make a golden archive in this directory, which must not exist; goes with docs/formats.md")

// golden says what a golden archive has.
type golden struct {
	Lineage string            `json:"lineage"`
	States  map[string]uint64 `json:"states"` // hash of the state that a client sees, by epoch
}

// TestGoldenArchivesRestore: what earlier versions have archived is restored to each state.
func TestGoldenArchivesRestore(t *testing.T) {
	all, err := filepath.Glob("testdata/archive-*")
	check(t, err)
	if len(all) == 0 {
		t.Fatal("there is no golden archive")
	}
	for _, dir := range all {
		t.Run(filepath.Base(dir), func(t *testing.T) { restoreGolden(t, dir) })
	}
}

func restoreGolden(t *testing.T, dir string) {
	data, err := os.ReadFile(filepath.Join(dir, "states.json"))
	check(t, err)
	var want golden
	check(t, json.Unmarshal(data, &want))
	copied := t.TempDir() // a restore writes a lease
	check(t, os.CopyFS(copied, os.DirFS(dir)))
	store, err := objectstore.Open("file://"+copied, objectstore.Options{})
	check(t, err)
	lineages, err := archive.Lineages(t.Context(), store)
	check(t, err)
	if len(lineages) != 1 || lineages[0].String() != want.Lineage || len(want.States) < 3 {
		t.Fatalf("%v, want %+v", lineages, want)
	}
	for name, state := range want.States {
		var epoch keys.Epoch
		_, err := fmt.Sscan(name, &epoch)
		check(t, err)
		b := &bench{t: t, target: objectstore.NewFaulty(store), history: lineages[0]}
		r, got, err := b.restore(archive.Target{Epoch: epoch})
		check(t, err)
		if got != state || r.Reached.Epoch > epoch {
			t.Errorf("epoch %d is restored as epoch %d, with another state", epoch, r.Reached.Epoch)
		}
	}
}

// TestMakeGoldenArchive makes a golden archive of this version, if it is asked for: backups, a bulk load, and commits before and after.
func TestMakeGoldenArchive(t *testing.T) {
	if *makeGolden == "" {
		t.Skip("without -restore.golden nothing is made")
	}
	b := newBench(t)
	out := golden{Lineage: b.lineage().String(), States: map[string]uint64{}}
	note := func() {
		b.archived()
		out.States[fmt.Sprint(b.arch.Status().Archived)] = hash(b.now)
	}
	b.commits(12)
	note()
	_, err := backup.Create(t.Context(), b.store, b.target, backup.Options{})
	check(t, err)
	b.commits(8)
	note()
	load, err := b.store.BeginBulkLoad()
	check(t, err)
	for i := range 50 {
		key, value := fmt.Sprintf("key %03d", i*7), fmt.Sprintf("loaded %d", i)
		check(t, load.Add([]byte(key), []byte(value)))
		b.now[key] = value
	}
	_, err = load.Commit(t.Context())
	check(t, errors.Join(err, load.Close()))
	b.commits(2)
	_, err = backup.Create(t.Context(), b.store, b.target, backup.Options{})
	check(t, err)
	b.commits(8)
	note()
	b.close()
	check(t, os.MkdirAll(*makeGolden, 0o755))
	copied := 0
	check(t, b.target.List(t.Context(), "", func(o objectstore.Object) error {
		name := filepath.Join(*makeGolden, o.Name)
		copied++
		return errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, b.object(o.Name), 0o644))
	}))
	data, err := json.MarshalIndent(out, "", "  ")
	check(t, err)
	check(t, os.WriteFile(filepath.Join(*makeGolden, "states.json"), append(data, '\n'), 0o644))
	t.Logf("%d objects and %d states", copied, len(out.States))
}
